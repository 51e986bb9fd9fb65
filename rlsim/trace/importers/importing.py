"""`import_trace`: finds the files, recognises their layout, reads them into rlsim's schema."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.errors import TraceError
from rlsim.trace.files import absorb_source, read_table
from rlsim.trace.importers import areal, metrics, servegen
from rlsim.trace.importers.dumps import read_dump
from rlsim.trace.importers.layouts import (
    DUMPS,
    FILES,
    FORMATS,
    KINDS,
    SHAPES,
    dump_of,
    find_files,
    nearest,
    refuse_near,
)
from rlsim.trace.importers.rows import PARQUET, ends
from rlsim.trace.importers.shapes import COUNTS, from_cdf, from_histogram, made_row
from rlsim.trace.importers.tables import TABLES, RowName, read_known
from rlsim.trace.schema import BY_NAME, Trace, TraceMeta, check_names, make_trace


def import_trace(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the name of the command's option
    columns: Mapping[str, str] | None = None,
    cap_tokens: int | None = None,
    name: str | None = None,
    source: str = "",
    rows: int = 10_000,
    tokenizer: str | Path | None = None,
) -> Trace:
    """The trace in a file, folder or glob pattern of any known layout, in rlsim's schema.

    `columns` maps a column of the schema to the file's, such as {"response_tokens": "output_len"}. `format` is one of
    `FORMATS`; by default the file's name tells Parquet, CSV or JSON Lines and its columns tell the layout. The files of
    a folder are one trace. `tokenizer` is a local tokenizer.json, or a folder with one, for dumps that hold texts and
    no lengths. Rows without a prompt id are prompts of their own, and samples are numbered as they come. Distributions
    (histogram, CDF, ServeGen's clients) become `rows` equally likely lengths. `cap_tokens` is the cap the lengths were
    sampled under. What was assumed stands in the trace's notes. Raises `TraceError` with file and row.
    """
    path, columns = Path(path), dict(columns or {})
    if format is not None and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(FORMATS)}"
        raise TraceError(f"{path}: unknown format {format!r}; {hint}")
    _check_ours(columns)
    notes: list[str] = []
    meta = TraceMeta(name=_name(path))
    row_name: RowName
    clients = servegen.datasets(path) if format in (None, "servegen") else []
    if clients or format == "servegen":
        if not clients:
            raise TraceError(f"{path}: no chunk-<i>-dataset.json, which ServeGen's layout needs")
        frame, row_name = servegen.read_servegen(clients, path, rows, notes), made_row
    else:
        files, sessions = find_files(path, notes)
        if format == metrics.NAME or (format is None and "response_tokens" not in columns
                                      and metrics.is_metric_log(files[0])):  # fmt: skip
            raise TraceError(f"{path}: {metrics.ADVICE}")
        dump = dump_of(files[0], format, columns)
        if dump is not None:
            join = None
            if sessions:
                dump, join = areal.with_sessions(dump, sessions)
            frame, places, said = read_dump(dump, files, path, columns, tokenizer, cap_tokens)
            notes += said
            if join is not None:
                frame = join(frame, notes)
            row_name = _placed(places, path)
        elif len(files) > 1:
            known = ", ".join(sorted({dump.name for dump in DUMPS}))
            raise TraceError(
                f"{path}: {len(files)} files, such as {files[0].name}, of no layout that a folder may hold ({known}, "
                "servegen); import one file"
            )
        else:
            frame, meta, row_name = read_table(files[0], format if format in KINDS else _kind_for(files[0], format))
            notes = [*meta.notes, *notes]
            frame, row_name = _table(frame, files[0], format, columns, row_name, notes, rows)
            frame = _renamed(frame, columns, files[0])
    if cap_tokens is not None or name or source:
        meta = meta.model_copy(update={"cap_tokens": cap_tokens or meta.cap_tokens, "name": name or meta.name,
                                       "source": source or meta.source})  # fmt: skip
    frame, meta = absorb_source(frame, meta)
    check_names(list(frame.columns), str(path), optional=("prompt_id", "sample_id"))
    frame = _numbered(frame, notes)
    return make_trace(frame, meta.model_copy(update={"notes": tuple(notes)}), where=str(path), row_name=row_name)


def files_of(path: Path) -> list[Path]:
    """The files that an import of a file, folder or glob pattern reads. Raises `TraceError` if there are none."""
    files, sessions = (servegen.datasets(path), []) if servegen.datasets(path) else find_files(path, [])
    return [*files, *sessions]


def _name(path: Path) -> str:
    name = path.name
    for suffix in sorted(FILES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return name.replace("*", "").strip("-_.") or "trace"


def _placed(places: Sequence[tuple[Path, str]], path: Path) -> RowName:
    def name(index: int) -> str:
        file, place = places[index]
        if file == path:
            return place
        return f"{file.relative_to(path) if file.is_relative_to(path) else file.name}: {place}"

    return name


def _kind_for(path: Path, layout: str | None) -> str | None:
    """The kind of file that a layout is usual in, where the name does not tell."""
    if layout is None or ends(path, (*PARQUET, ".csv", ".gz", ".jsonl", ".ndjson")):
        return None
    return "jsonl" if layout == "mooncake" else "csv"


def _check_ours(columns: Mapping[str, str]) -> None:
    for ours, theirs in columns.items():
        if ours not in BY_NAME:
            near = difflib.get_close_matches(ours, list(BY_NAME), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(BY_NAME)}"
            raise TraceError(f"--column {ours}={theirs}: rlsim's schema has no column {ours!r}; {hint}")


def _renamed(frame: pd.DataFrame, columns: Mapping[str, str], path: Path) -> pd.DataFrame:
    for ours, theirs in columns.items():
        if theirs not in frame.columns:
            known = [str(c) for c in frame.columns]
            near = difflib.get_close_matches(theirs, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known)}"
            raise TraceError(f"{path}: no column {theirs!r} (asked for as {ours}); {hint}")
        if ours != theirs and ours in frame.columns:
            frame = frame.drop(columns=ours)
        frame = frame.rename(columns={theirs: ours})
    return frame


def _table(
    frame: pd.DataFrame, path: Path, wanted: str | None, columns: dict[str, str], row_name: RowName,
    notes: list[str], rows: int,
) -> tuple[pd.DataFrame, RowName]:  # fmt: skip
    """Recognises a table by its columns and fills in the mapping that goes with it (the caller's comes first)."""
    names = {str(c) for c in frame.columns}
    if "response_tokens" in columns or (wanted is None and "response_tokens" in names and not names & set(COUNTS)):
        return frame, row_name
    if wanted in (None, "histogram") and "response_tokens" in names and names & set(COUNTS):
        return from_histogram(frame, path, rows, row_name, notes), made_row
    if wanted in (None, "cdf") and {"length", "cdf"} <= names:
        return from_cdf(frame, path, rows, row_name, notes), made_row
    found = [table for table in TABLES if set(table.needs) <= names and wanted in (None, table.name)]
    if found:
        return read_known(found[0], frame, path, row_name, columns, notes)
    if wanted is None or wanted in KINDS:
        refuse_near(names, path, [(table.name, table.needs) for table in TABLES])
        return frame, row_name
    needs = ({table.name: table.needs for table in reversed(TABLES)} | SHAPES)[wanted]
    raise TraceError(f"{path}: not in the {wanted} layout, which needs {', '.join(needs)}{nearest(needs, names)}")


def _numbered(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    if "prompt_id" not in frame:
        notes.append("no prompt id: every response is taken as a prompt of its own")
        return frame.assign(prompt_id=np.arange(len(frame)), sample_id=frame.get("sample_id", 0))
    if "sample_id" not in frame:
        keys = [frame[k].map(str) for k in ("prompt_id", "epoch") if k in frame]
        frame = frame.assign(sample_id=frame.groupby(keys, sort=False).cumcount())
    return frame
