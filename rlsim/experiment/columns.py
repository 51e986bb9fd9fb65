"""Every column of every result table: name, type, unit, meaning; and tables of them as Parquet files.

They are rows of `rlsim/data/columns.csv`. `every` table begins with the same columns; the parts of a call add up to its
time on its GPUs. Where a row of the summary has no meaning of its own, it is that of the column of `steps`.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlsim.base.catalogue import DATA
from rlsim.base.output import reason
from rlsim.base.records import file_sha256
from rlsim.base.refusals import code_of
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
    path = DATA / "columns.csv"
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    for group, name, *told, of in rows:
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


# ---- as Parquet files, read only with their recorded SHA-256 ---------------------------------------------------------


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


@contextmanager
def opened(path: Path, columns: Sequence[Column], sha256: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file, open to be read, once it is known that it has its SHA-256 and these columns.

    Raises `ConfigError`, naming the file, for one that is missing, cannot be read, is damaged, or lacks such columns.
    """
    try:
        if file_sha256(path) != sha256:
            raise ConfigError(f"{path}: damaged, or changed after rlsim wrote it: its SHA-256 is not the recorded one")
        with pq.ParquetFile(path) as file:
            for name in [column.name for column in columns if column.name not in file.schema_arrow.names]:
                raise ConfigError(f"{path}: has no column {name}: written by another version of rlsim; run it again")
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing: the results are damaged, or of a version of rlsim without it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from None


def read_parquet(
    path: Path, columns: Sequence[Column], sha256: str, only: Mapping[str, Collection[Any]] = MappingProxyType({})
) -> pa.Table:
    """These columns of a Parquet file, checked as `opened` does: of the rows whose values are among those of `only`."""
    with opened(path, columns, sha256):
        names, rows = [column.name for column in columns], [(name, "in", list(values)) for name, values in only.items()]
        return pq.read_table(path, columns=names, filters=rows or None, use_threads=False)
