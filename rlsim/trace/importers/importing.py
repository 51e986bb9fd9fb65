"""`import_trace`: finds the files, recognises their layout, reads them into rlsim's schema."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.refusals import refuse
from rlsim.base.tables import floats
from rlsim.errors import TraceError
from rlsim.trace.files import CSV, PARQUET, absorb_source, ends, read_table, stem
from rlsim.trace.importers import layouts, servegen
from rlsim.trace.importers.dumps import read_dump
from rlsim.trace.importers.layouts import DUMPS, FILES, FORMATS, JSON, KINDS, Table
from rlsim.trace.importers.rows import first_keys
from rlsim.trace.schema import BY_NAME, Trace, TraceMeta, check_names, make_trace

RowName = Callable[[int], str]
#: Columns that say how many responses a row of lengths stands for.
_COUNTS = {"expected_requests", "count", "counts", "requests", "frequency"}


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
    no lengths. Rows without a prompt id are prompts of their own, and samples are numbered as they come. ServeGen's
    distributions become `rows` equally likely requests. `cap_tokens` is the cap the lengths were sampled under. The
    trace's notes say what was assumed. Raises `TraceError` with file and row.
    """
    path, columns = Path(path), dict(columns or {})
    if format is not None and format not in FORMATS:
        raise TraceError(f"{path}: unknown format {format!r}; {_hint(format, FORMATS, 'expected one of')}")
    for ours, theirs in columns.items():
        if ours not in BY_NAME:
            hint = _hint(ours, BY_NAME, "expected one of")
            raise TraceError(f"--column {ours}={theirs}: rlsim's schema has no column {ours!r}; {hint}")
    notes: list[str] = []
    meta = TraceMeta(name=stem(path, FILES).replace("*", "").strip("-_.") or "trace")
    clients = servegen.datasets(path) if format in (None, "servegen") else []
    row_name: RowName = lambda i: f"made-up row {i + 1}"  # noqa: E731  # of what is computed
    if clients:
        frame = servegen.read_servegen(clients, path, rows, notes)
    elif format == "servegen":
        raise TraceError(f"{path}: no chunk-<i>-dataset.json, which ServeGen's layout needs")
    else:
        files = layouts.find_files(path, notes)
        unasked = format is None and "response_tokens" not in columns
        if format == layouts.METRICS or (unasked and layouts.is_metric_log(files[0])):
            raise TraceError(f"{path}: {layouts.METRICS_ADVICE}")
        dump = layouts.dump_of(files[0], format, columns)
        if dump is not None:
            frame, places, said = read_dump(dump, files, path, columns, tokenizer, cap_tokens)
            notes, row_name = [*notes, *said], partial(_place, path, places)
        else:
            frame, meta, row_name = _table(files, path, format, columns, notes)
    given = {"cap_tokens": cap_tokens, "name": name, "source": source}
    meta = meta.model_copy(update={key: value for key, value in given.items() if value})
    frame, meta = absorb_source(frame, meta)
    frame = _counted(frame, path, notes)
    check_names(list(frame.columns), str(path), optional=("prompt_id", "sample_id"))
    if "prompt_id" not in frame:
        notes.append("no prompt id: every response is taken as a prompt of its own")
        frame = frame.assign(prompt_id=np.arange(len(frame)), sample_id=frame.get("sample_id", 0))
    elif "sample_id" not in frame:
        keys = [frame[k].map(str) for k in ("prompt_id", "epoch") if k in frame]
        frame = frame.assign(sample_id=frame.groupby(keys, sort=False).cumcount())
    return make_trace(frame, meta.model_copy(update={"notes": tuple(notes)}), where=str(path), row_name=row_name)


def files_of(path: Path) -> list[Path]:
    """The files that an import of a file, folder or glob pattern reads. Raises `TraceError` if there are none."""
    return servegen.datasets(path) or layouts.find_files(path, [])


def _hint(name: str, known: Collection[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise}: {', '.join(known)}"


def _place(path: Path, places: Sequence[tuple[Path, str]], index: int) -> str:
    """What names a row of a dump: file and place."""
    file, place = places[index]
    if file == path:
        return place
    return f"{file.relative_to(path) if file.is_relative_to(path) else file.name}: {place}"


def _table(
    files: Sequence[Path], path: Path, wanted: str | None, columns: dict[str, str], notes: list[str]
) -> tuple[pd.DataFrame, TraceMeta, RowName]:
    """The rows of a table under the names of rlsim's schema, as `columns` or the layout it is recognised by map them.

    What reading it has noted comes before `notes`.
    """
    first = files[0]
    kind = wanted if wanted in KINDS else None
    if kind is None and wanted is not None and not ends(first, (*PARQUET, *CSV, ".gz", ".jsonl", ".ndjson")):
        kind = "jsonl" if wanted == "mooncake" else "csv"  # usual in that layout, where the name does not tell
    keys = first_keys(first) if kind is None and ends(first, JSON) and len(files) == 1 else set()
    known = [*dict.fromkeys(dump.format for dump in DUMPS)]
    refuse("table of lengths", TraceError, path=path, files=files, keys=sorted(keys), known=known)
    frame, meta, row_name = read_table(first, kind)
    notes[:0] = meta.notes
    names = {str(c) for c in frame.columns}
    if not columns and "response_tokens" in names and (counts := names & _COUNTS):
        raise TraceError(f"{first}: a histogram, by its column {min(counts)!r}: give a row for each response")
    told = "response_tokens" in columns or (wanted is None and "response_tokens" in names)
    if not told and (table := layouts.table_of(names, first, wanted)):
        frame, row_name = read_known(table, frame, first, row_name, columns, notes)
    for ours, theirs in columns.items():
        if theirs not in frame.columns:
            hint = _hint(theirs, [str(c) for c in frame.columns], "it has")
            raise TraceError(f"{first}: no column {theirs!r} (asked for as {ours}); {hint}")
        if ours != theirs and ours in frame.columns:
            frame = frame.drop(columns=ours)
        frame = frame.rename(columns={theirs: ours})
    return frame, meta, row_name


def _counted(frame: pd.DataFrame, path: Path, notes: list[str]) -> pd.DataFrame:
    """Lists of tokens as their lengths, lists that name a prompt as texts; other lists say nothing here and go.

    Raises `TraceError` with the options to give if the response's tokens are in such a list.
    """
    maps = [str(name) for name in frame if frame[name].map(lambda one: isinstance(one, Mapping)).any()]
    if "response_tokens" not in frame and maps:
        leaves = [leaf for name in maps for leaf in _leaves(name, frame[name].dropna().iloc[0])]
        near = [leaf for leaf in leaves if re.search("(response|completion|output)_tokens$", leaf)]
        raise TraceError(
            f"{path}: {', '.join(maps)} hold mappings; write out what is in them first, as with "
            f"jq -c '{{response_tokens: .{(near or leaves)[0]}}}' {path.name}"
        )
    others = [str(name) for name in frame if name != "turns"]
    lists = [name for name in others if frame[name].map(lambda one: isinstance(one, list | np.ndarray)).all()]
    if "response_tokens" not in frame and lists:
        options = []
        for ours, words in (("response_tokens", "response|completion|output"), ("prompt_tokens", "prompt")):
            fits = (name for name in lists if re.search(f"({words}).*(id|token)", name))
            options += [f"--column {ours}={name}" for name in itertools.islice(fits, 1)]
        if options and "response_tokens" in options[0]:
            raise TraceError(f"{path}: {', '.join(lists)} hold lists; to count their tokens give {' '.join(options)}")
    for name in lists:
        if name.endswith("_tokens") and name in BY_NAME:
            frame = frame.assign(**{name: frame[name].map(len)})
            notes.append(f"{name}: the number of elements of a list")
        elif name == "prompt_id":
            frame = frame.assign(prompt_id=frame[name].map(lambda one: str(list(one))))
        else:
            frame = frame.drop(columns=name)
    return frame


def _leaves(name: str, value: object) -> list[str]:
    """What lies in nested mappings, by the path to it."""
    if not isinstance(value, Mapping) or not value:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]


def read_known(
    table: Table, frame: pd.DataFrame, path: Path, row_name: RowName, columns: dict[str, str], notes: list[str]
) -> tuple[pd.DataFrame, RowName]:
    """`frame` with the columns of rlsim's schema that `table` names; `columns` (the caller's mapping) goes first.

    Adds the mapping that goes with the layout to `columns`, and what is assumed to `notes`.
    """
    notes.append(table.note)
    if "arrival_s" not in columns:
        theirs = table.columns["arrival_s"]
        frame = frame.assign(**{theirs: _arrival(frame, theirs, table.arrival, path, row_name)})
    for ours, theirs in table.columns.items():
        columns.setdefault(ours, theirs)
    if table.task and "task" not in columns:
        first, second = (frame[name].map(str) for name in table.task)
        frame = frame.assign(task=first + " " + second)
        frame = frame.drop(columns=[c for c in table.task if c not in columns.values()])
    if table.fails:
        empty = floats(frame[columns["response_tokens"]]) == 0
        if empty.any():
            notes.append(f"{int(empty.sum()):,} requests without a response (failed) are left out")
            kept = np.flatnonzero(~empty)
            named, frame = row_name, frame[~empty].reset_index(drop=True)
            row_name = lambda i: named(int(kept[i]))  # noqa: E731
    return frame.drop(columns=[c for c in table.drop if c in frame and c not in columns.values()]), row_name


def _arrival(frame: pd.DataFrame, column: str, kind: str, path: Path, row_name: RowName) -> Any:
    """Seconds from the start of the recording: of a clock's time, of seconds after any `first`, or of ms."""
    given = frame[column]
    if kind == "clock":
        at = pd.to_datetime(given, format="ISO8601", utc=True, errors="coerce")
        bad, expected = (at.isna() & given.notna()).to_numpy(), "should be a time such as 2023-11-16 18:17:03.9799600"
    else:
        values = pd.Series(floats(given))
        bad, expected = ~np.isfinite(values) & given.notna().to_numpy(), "is not a number"
    if bad.any():
        row = int(np.argmax(bad))
        raise TraceError(f"{path}: {row_name(row)}: {column} {expected} (got {given.iloc[row]!r})")
    if kind == "clock":
        return (at - at.min()).dt.total_seconds()
    return values - values.min() if kind == "first" else values * 1e-3
