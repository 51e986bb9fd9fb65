"""Every column of every result table: name, type, unit, meaning; and tables of them as Parquet files.

They are rows of `rlsim/data/columns.csv`. `every` table begins with the same columns; the parts of a call add up to its
time on its GPUs. Where a row of the summary has no meaning of its own, it is that of the column of `steps`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlsim.base.reading import shipped
from rlsim.base.records import file_sha256
from rlsim.base.refusals import code_of
from rlsim.base.tables import parquet_errors
from rlsim.errors import ConfigError


class Column(NamedTuple):
    """One column of a result table."""

    name: str
    dtype: str  # as pandas names it
    unit: str
    meaning: str
    of: str = ""  # an expression over what is known of a step, its responses, or sums over steps; else code makes it


def _groups() -> dict[str, dict[str, Column]]:
    found: dict[str, dict[str, Column]] = {}
    for group, name, *told, of in shipped("columns.csv")[1:]:
        known = (
            Column._make((name, *told, of)) if any(told) else {**found["every"], **found["steps"]}[name]._replace(of=of)
        )
        found.setdefault(group, {})[name] = known
    return found


_GROUPS = _groups()
#: What a call's time goes to.
CALL_PARTS = tuple(_GROUPS.pop("call parts").values())
#: Columns of `Result.summary()`, one row per case and system; means are over the steady steps of all seeds.
SUMMARY = tuple(_GROUPS.pop("summary").values())
#: Such means that only ratios are taken of.
MEANS = tuple(_GROUPS.pop("means").values())
_EVERY = _GROUPS.pop("every").values()
TABLES: dict[str, tuple[Column, ...]] = {
    table: (*_EVERY, *own.values(), *(CALL_PARTS if table == "calls" else ())) for table, own in _GROUPS.items()
}
#: What rollout controls did: changes of degree, responses moved, replicas given up, responses dropped.
ACTED = ("switches", "moved", "released", "aborted")


def computed(columns: Sequence[Column], **known: Any) -> dict[str, Any]:
    """Those of these columns that are expressions over what is `known`, by name."""
    return {column.name: eval(code_of(column.of), known) for column in columns if column.of}


# ---- as Parquet files ------------------------------------------------------------------------------------------------


TYPES = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string(), "bool": pa.bool_()}


def field_of(column: Any) -> Any:
    """A column's field."""
    return pa.field(column.name, TYPES[column.dtype], metadata={"unit": column.unit, "meaning": column.meaning})


def to_arrow(frame: pd.DataFrame, columns: Sequence[Column]) -> pa.Table:
    """A table in Arrow, with the types, units and meanings of its columns."""
    arrays = [pa.array(frame[c.name], type=TYPES[c.dtype], from_pandas=True) for c in columns]
    return pa.Table.from_arrays(arrays, schema=pa.schema(map(field_of, columns)))


def to_pandas(rows: pa.Table) -> pd.DataFrame:
    """A table as a frame, texts in pandas' own type as in the frames that `to_arrow` takes."""
    texts = dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), pd.StringDtype())
    frame: pd.DataFrame = rows.replace_schema_metadata().to_pandas(types_mapper=texts.get)
    return frame


def write_parquet(rows: pa.Table, target: Any) -> None:
    """Write a table, to a path or an Arrow stream; equal tables give equal bytes."""
    pq.write_table(rows, target, compression="zstd", write_page_checksum=True)


def to_bytes(rows: pa.Table) -> bytes:
    """The Parquet file of a table."""
    sink = pa.BufferOutputStream()
    write_parquet(rows, sink)
    return bytes(sink.getvalue().to_pybytes())


def read_parquet(
    path: Path,
    columns: Sequence[Column],
    sha256: str = "",
    only: Mapping[str, Collection[Any]] = MappingProxyType({}),
    *,
    every: bool = False,
) -> pa.Table:
    """These columns of a Parquet file, or `every` one, of the rows whose values are among those of `only`.

    Raises `ConfigError`, naming the file, for one that is missing, cannot be read, is damaged (a page does not have its
    checksum, or the file not this SHA-256), or lacks such columns.
    """
    wanted = [column.name for column in columns]
    with parquet_errors(path, ConfigError):
        if sha256 and file_sha256(path) != sha256:
            raise ConfigError(f"{path}: damaged, or changed after rlsim wrote it: its SHA-256 is not the recorded one")
        for name in sorted({*wanted} - {*pq.read_schema(path).names}, key=wanted.index):
            raise ConfigError(f"{path}: has no column {name}: written by another version of rlsim; run it again")
        return pq.read_table(
            path,
            columns=None if every else wanted,
            filters=[(name, "in", list(values)) for name, values in only.items()] or None,
            use_threads=False,
            partitioning=None,
            page_checksum_verification=True,
        )
