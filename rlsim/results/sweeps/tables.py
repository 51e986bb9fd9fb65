"""Tables of a point as Parquet: axis columns first, units and meanings of all columns, the configuration.

The column of an axis has name, type, unit and meaning, and its values, from the resolved experiments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from rlsim.base.formats import few
from rlsim.base.records import Record, sealed
from rlsim.base.reference import keys_of
from rlsim.experiment.columns import SUMMARY, TABLES, TYPES, Column, field_of
from rlsim.experiment.load import place_in
from rlsim.experiment.schema import Experiment

#: Every table that a sweep may keep; `summary` is always kept, and written last.
COLUMNS: dict[str, tuple[Column, ...]] = {**TABLES, "summary": SUMMARY}
DEFAULT_TABLES = ("steps", "calls")
#: Key of the point's record in the Parquet metadata: JSON.
RECORD = b"rlsim.point"
#: Names of the columns of a sweep's tables.
TAKEN = {"point", "status", "error", *(column.name for columns in COLUMNS.values() for column in columns)}


class AxisColumn(Record):
    """The column of one axis: the key path that it sets (but for names that tables have), type, unit, meaning."""

    name: str
    key: str
    dtype: Literal["int64", "float64", "string", "bool"]
    unit: str
    meaning: str


class Axis(NamedTuple):
    """The value of one axis at one point."""

    column: AxisColumn
    value: Any  # None where the point does not have it


def of_point(rows: pa.Table, axes: Sequence[Axis], record: Mapping[str, Any]) -> pa.Table:
    """`rows` of a point after the columns of its axes, with the point's record in their metadata."""
    arrays = [pa.array([a.value] * len(rows), type=TYPES[a.column.dtype]) for a in axes]
    fields = [field_of(a.column) for a in axes]
    metadata = {RECORD: sealed(record, indent=None)}
    return pa.Table.from_arrays([*arrays, *rows.columns], schema=pa.schema([*fields, *rows.schema], metadata=metadata))


def columns_of(keys: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> tuple[AxisColumn, ...]:
    """The columns of the keys that a sweep sets, typed so that they hold the values of all its points.

    A key that a table also has as a column (`model` in `calls`) is called `experiment.model`.
    """
    known, columns = {row.key: row for row in keys_of(Experiment)}, []
    for key in keys:
        name = f"experiment.{key}" if key in TAKEN else key
        unit, meaning = (known[key].unit, known[key].meaning) if key in known else ("", "")
        dtype = _dtype(value_at(config, key) for config in configs)
        columns.append(AxisColumn(name=name, key=key, dtype=dtype, unit=unit, meaning=meaning))
    return tuple(columns)


def resolved(config: Mapping[str, Any], column: AxisColumn) -> Any:
    """The value of an axis in a resolved experiment, as its column holds it; None if it is not there."""
    value = value_at(config, column.key)
    if value is None or column.dtype != "string":
        return float(value) if column.dtype == "float64" and value is not None else value
    return value if isinstance(value, str) else json.dumps(value)


def value_at(config: Any, key: str) -> Any:
    """The value at a key path of a resolved experiment; None if there is none."""
    here = config
    for part in key.split("."):
        if (place := place_in(here, part)) is not None:
            here = here[place]
        elif isinstance(here, Mapping):
            here = here.get(part)
        else:
            return None
    return here


def _dtype(values: Iterable[Any]) -> Literal["int64", "float64", "string", "bool"]:
    """The type that holds all values: mixed ones are text, and so are lists and mappings (JSON)."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    return "float64" if kinds and kinds <= {int, float} else "string"


#: A key that a configuration does not have.
ABSENT = "(none)"
MOST_KEYS = 5


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all configurations, as key paths, with the value in each."""
    flat = [flattened(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    values = {key: [config.get(key, ABSENT) for config in flat] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as key paths and values; lists are values."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def shown(value: Any, width: int = 40) -> str:
    """A value of a configuration as text of at most so many characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 1] + "…"


def listed(changed: Mapping[str, Sequence[Any]]) -> str:
    """Differences of two configurations in a sentence: `trace.cap 8192 there, 4096 here`."""
    items = [f"{key} {shown(there)} there, {shown(here)} here" for key, (there, here) in changed.items()]
    return "; ".join(few(items, MOST_KEYS, "keys", "and "))
