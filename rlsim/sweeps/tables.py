"""Tables of a point as Parquet: axis columns first, units and meanings of all columns, the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from rlsim.experiment.columns import SUMMARY, TABLES, Column
from rlsim.experiment.parquet import TYPES, field_of

#: Every table that a sweep may keep; `summary` is always kept, and written last.
COLUMNS: dict[str, tuple[Column, ...]] = {**TABLES, "summary": SUMMARY}
DEFAULT_TABLES = ("steps", "calls")
#: Key of the point's record in the Parquet metadata: JSON.
RECORD = b"rlsim.point"


class AxisColumn(NamedTuple):
    """The column of one axis: the key path that it sets (but for names that tables have), type, unit, meaning."""

    name: str
    key: str
    dtype: str  # int64, float64, string or bool
    unit: str
    meaning: str


class Axis(NamedTuple):
    """The value of one axis at one point."""

    column: AxisColumn
    value: Any  # None where the point does not have it


def with_axes(rows: pa.Table, axes: Sequence[Axis], table: str) -> pa.Table:
    """`rows` of a point with the columns of its axes before the table's own; those of other axes are dropped."""
    own = rows.select([column.name for column in COLUMNS[table]])
    fields = [field_of(a.column.name, a.column.dtype, a.column.unit, a.column.meaning) for a in axes]
    arrays = [pa.array([a.value] * len(own), type=TYPES[a.column.dtype]) for a in axes]
    schema = pa.schema([*fields, *own.schema], metadata=rows.schema.metadata)
    return pa.Table.from_arrays([*arrays, *(c.combine_chunks() for c in own.columns)], schema=schema)


def with_record(rows: pa.Table, record: Mapping[str, Any]) -> pa.Table:
    """`rows` with the point's record in their metadata."""
    return rows.replace_schema_metadata(
        {RECORD: json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace")}
    )


def record_of(schema: pa.Schema) -> Any:
    """The point's record in a file's schema, as it stands there; None if there is none."""
    try:
        return json.loads((schema.metadata or {})[RECORD])
    except (KeyError, ValueError, RecursionError):
        return None


def has_axes(schema: pa.Schema, axes: Sequence[Axis], table: str) -> bool:
    """Whether a file has just these axis columns, of these types, units and meanings."""
    wanted = pa.schema([field_of(a.column.name, a.column.dtype, a.column.unit, a.column.meaning) for a in axes])
    found = pa.schema([field for field in schema if field.name not in {c.name for c in COLUMNS[table]}])
    return bool(found.equals(wanted, check_metadata=True))
