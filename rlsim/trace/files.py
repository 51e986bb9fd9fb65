"""Reading and writing trace files: Parquet, CSV and JSON Lines (the last two also as .gz)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from rlsim.base.output import atomic_path
from rlsim.base.refusals import refuse
from rlsim.base.tables import csv_errors, json_lines, open_data, read_parquet
from rlsim.errors import TraceError
from rlsim.trace.schema import BY_NAME, COLUMNS, Trace, TraceMeta, make_trace
from rlsim.trace.turns import FIELDS, agents_of, as_rows

#: What the names of files of each kind end in.
PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz")
JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_SUFFIXES = (*PARQUET, *CSV, *JSONL)
_META_KEY = b"rlsim.trace"


def ends(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether the name of `path` ends in one of `suffixes`, in any case."""
    return path.name.lower().endswith(suffixes)


def stem(path: Path, suffixes: tuple[str, ...]) -> str:
    """The name of `path` without the endings in `suffixes`, the longest first."""
    name = path.name
    for suffix in sorted(suffixes, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return name


def read_trace(path: str | Path, *, cap_tokens: int | None = None) -> Trace:
    """The trace in `path`, which must be in rlsim's schema (see `COLUMNS`); other layouts go through `import_trace`.

    `cap_tokens`: the cap it was sampled under, if the file does not say it. Constant columns `model` and `source`
    become the trace's source. Raises `TraceError` with file and row for anything that is not a valid trace.
    A file that has not changed since it was last read is not read again.
    """
    path = Path(path)
    try:
        file = path.stat()
    except (OSError, ValueError):
        return _read_trace(path, cap_tokens)  # which says why it cannot be read
    return _read_trace(path, cap_tokens, file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size)


@lru_cache(maxsize=8)
def _read_trace(path: Path, cap_tokens: int | None, *_: int) -> Trace:
    frame, meta, row_name = read_table(path)
    if cap_tokens is not None:
        meta = meta.model_copy(update={"cap_tokens": cap_tokens})
    frame, meta = absorb_source(frame, meta)
    return make_trace(frame, meta, where=str(path), row_name=row_name)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes `trace` to `path` as Parquet, whole or not at all; one trace gives the same bytes (per pyarrow version).

    Name, source, cap, recipe and notes go into the file's key-value metadata, with unit and meaning per column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if path.suffix not in (".parquet", ".pq"):
        raise TraceError(f"{path}: a trace is written as Parquet; give a name that ends in .parquet")
    fields = [_arrow_field(name, trace) for name in trace.frame.columns]
    frame = trace.frame.assign(turns=trace.frame["turns"].map(as_rows)) if "turns" in trace.frame else trace.frame
    arrays = [pa.array(frame[f.name], type=f.type, from_pandas=True) for f in fields]
    metadata = {_META_KEY: trace.meta.model_dump_json(exclude_none=True).encode()}
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))
    with atomic_path(path, TraceError) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=15, write_page_checksum=True)


def _arrow_field(name: str, trace: Trace) -> Any:
    import pyarrow as pa

    column = BY_NAME[name]
    of_turn = (pa.int32(), pa.int32(), pa.float32(), pa.string())
    has_agents = column.kind == "turns" and any(map(agents_of, trace.frame[name]))
    kinds = {
        "id": pa.string() if trace.frame[name].dtype == object else pa.int64(),
        "tokens": pa.int32(), "index": pa.int32(), "number": pa.float64(), "flag": pa.bool_(),
        "text": pa.string(), "numbers": pa.list_(pa.float64()),
        "turns": pa.list_(pa.struct(list(zip(FIELDS, of_turn, strict=True))[: 3 + has_agents])),
    }  # fmt: skip
    notes = {b"unit": column.unit.encode(), b"meaning": column.meaning.encode()}
    return pa.field(name, kinds[column.kind], metadata=notes)


def read_table(path: Path, kind: str | None = None) -> tuple[pd.DataFrame, TraceMeta, Callable[[int], str]]:
    """The raw rows of a file, its metadata, and a function that names a row (`line 7` of text, `row 6` of Parquet).

    `kind` (parquet, csv or jsonl) overrules the file's ending. Raises `TraceError` if it cannot be read.
    """
    refuse("trace file", TraceError, path=path, unknown=not kind and not ends(path, _SUFFIXES), known=_SUFFIXES)
    meta = TraceMeta(name=stem(path, _SUFFIXES) or "trace")
    if kind == "parquet" or (kind is None and ends(path, PARQUET)):
        frame, meta = _read_parquet(path, meta)
        return frame, meta, lambda i: f"row {i + 1}"
    if kind == "csv" or (kind is None and ends(path, CSV)):
        frame = _read_csv(path)
        lines = [i + 2 for i in frame.index]
        return frame.reset_index(drop=True), meta, lambda i: f"line {lines[i]}"
    numbers, rows = zip(*json_lines(path, TraceError), strict=True)
    names = list(dict.fromkeys(key for row in rows for key in row))
    frame = pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in names})
    return frame, meta, lambda i: f"line {numbers[i]}"


def _read_parquet(path: Path, meta: TraceMeta) -> tuple[pd.DataFrame, TraceMeta]:
    frame, metadata = read_parquet(path, TraceError)
    stored = metadata.get(_META_KEY)
    if stored is not None:
        try:
            meta = TraceMeta.model_validate_json(stored)
        except ValidationError as error:
            problem = error.errors()[0]
            raise TraceError(f"{path}: damaged rlsim metadata: {problem['loc']}: {problem['msg']}") from None
    return frame, meta


def _read_csv(path: Path) -> pd.DataFrame:
    texts: dict[str, Any] = {c.name: str for c in COLUMNS if c.kind in ("id", "text", "numbers", "turns")}
    with csv_errors(path, TraceError), open_data(path) as file:
        frame = pd.read_csv(file, dtype=texts, skip_blank_lines=False, low_memory=False, index_col=False)
    frame = frame[~frame.isna().all(axis=1)]
    whole = re.compile(r"0|-?[1-9]\d{0,17}")
    if "prompt_id" in frame and all(isinstance(v, str) and whole.fullmatch(v) for v in frame["prompt_id"]):
        frame["prompt_id"] = frame["prompt_id"].astype("int64")
    return frame


def absorb_source(frame: pd.DataFrame, meta: TraceMeta) -> tuple[pd.DataFrame, TraceMeta]:
    """Takes constant columns `model` and `source` out of the rows and into the trace's source."""
    parts = [meta.source] if meta.source else []
    for name in ("source", "model"):
        values = {str(v) for v in frame[name]} if name in frame else set()
        if len(values) == 1 and not frame[name].isna().any():
            parts.append(values.pop())
            frame = frame.drop(columns=name)
    return frame, meta.model_copy(update={"source": ", ".join(dict.fromkeys(parts))})
