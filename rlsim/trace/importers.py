"""Reads other programs' traces into rlsim's schema: renamed columns, Mooncake, Vidur, histograms and digitised CDFs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.errors import TraceError
from rlsim.trace.files import absorb_source, read_table
from rlsim.trace.schema import BY_NAME, COLUMNS, Trace, check_names, make_trace

RowName = Callable[[int], str]
KINDS = ("parquet", "csv", "jsonl")


@dataclass(frozen=True)
class Layout:
    """Another program's columns: those that must be there, how they map, and what has to be said about it."""

    name: str
    needs: tuple[str, ...]
    columns: Mapping[str, str]
    note: str
    arrival_scale: float = 1.0


LAYOUTS: tuple[Layout, ...] = (
    Layout("mooncake", ("timestamp", "input_length", "output_length"),
           {"arrival_s": "timestamp", "prompt_tokens": "input_length", "response_tokens": "output_length"},
           "Mooncake layout: timestamps in ms; hash_ids (shared prefixes) are left out", 1e-3),
    Layout("vidur", ("num_prefill_tokens", "num_decode_tokens"),
           {"arrival_s": "arrived_at", "prompt_tokens": "num_prefill_tokens", "response_tokens": "num_decode_tokens"},
           "Vidur layout: arrived_at in seconds"),
    Layout("vidur", ("num_total_tokens", "pd_ratio"), {"arrival_s": "arrived_at"},
           "Vidur layout: lengths worked out from num_total_tokens and pd_ratio (prompt tokens per response token)"),
    Layout("azure", ("ContextTokens", "GeneratedTokens"),
           {"prompt_tokens": "ContextTokens", "response_tokens": "GeneratedTokens"},
           "Azure LLM inference layout; TIMESTAMP is left out"),
)  # fmt: skip
_COUNTS = ("expected_requests", "count", "counts", "requests", "frequency")
FORMATS = (*KINDS, *dict.fromkeys(layout.name for layout in LAYOUTS), "histogram", "cdf")


def import_trace(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the name of the command's option
    columns: Mapping[str, str] | None = None,
    cap_tokens: int | None = None,
    name: str | None = None,
    source: str = "",
    rows: int = 10_000,
) -> Trace:
    """The trace in a file of any known layout, in rlsim's schema.

    `columns` maps a column of the schema to the file's, such as {"response_tokens": "output_len"}. `format` is one of
    `FORMATS`; by default the file's name tells Parquet, CSV or JSON Lines and its columns tell the layout. Rows without
    a prompt id are prompts of their own, and samples are numbered as they come. A histogram (response_tokens, count)
    or a CDF (length, cdf) becomes `rows` equally likely lengths. `cap_tokens` is the cap the lengths were sampled
    under. What was assumed stands in the trace's notes. Raises `TraceError` with file and row.
    """
    path, columns = Path(path), dict(columns or {})
    if format is not None and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(FORMATS)}"
        raise TraceError(f"{path}: unknown format {format!r}; {hint}")
    frame, meta, row_name = read_table(path, format if format in KINDS else _kind_for(path, format))
    notes: list[str] = list(meta.notes)
    frame, row_name = _known_layout(frame, path, format, columns, row_name, notes, rows)
    frame = _renamed(frame, columns, path)
    if cap_tokens is not None or name or source:
        meta = meta.model_copy(update={"cap_tokens": cap_tokens or meta.cap_tokens, "name": name or meta.name,
                                       "source": source or meta.source})  # fmt: skip
    frame, meta = absorb_source(frame, meta)
    check_names(list(frame.columns), str(path), optional=("prompt_id", "sample_id"))
    frame = _numbered(frame, notes)
    return make_trace(frame, meta.model_copy(update={"notes": tuple(notes)}), where=str(path), row_name=row_name)


def _kind_for(path: Path, layout: str | None) -> str | None:
    """The kind of file that a layout is usual in, where the name does not tell."""
    if layout is None or path.name.lower().endswith((".parquet", ".pq", ".csv", ".gz", ".jsonl", ".ndjson")):
        return None
    return "jsonl" if layout == "mooncake" else "csv"


def _renamed(frame: pd.DataFrame, columns: Mapping[str, str], path: Path) -> pd.DataFrame:
    for ours, theirs in columns.items():
        if ours not in BY_NAME:
            near = difflib.get_close_matches(ours, list(BY_NAME), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(BY_NAME)}"
            raise TraceError(f"--column {ours}={theirs}: rlsim's schema has no column {ours!r}; {hint}")
        if theirs not in frame.columns:
            known = [str(c) for c in frame.columns]
            near = difflib.get_close_matches(theirs, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known)}"
            raise TraceError(f"{path}: no column {theirs!r} (asked for as {ours}); {hint}")
        if ours != theirs and ours in frame.columns:
            frame = frame.drop(columns=ours)
        frame = frame.rename(columns={theirs: ours})
    return frame


def _known_layout(
    frame: pd.DataFrame, path: Path, wanted: str | None, columns: dict[str, str], row_name: RowName,
    notes: list[str], rows: int,
) -> tuple[pd.DataFrame, RowName]:  # fmt: skip
    """Recognises the layout by its columns and fills in the mapping that goes with it (the caller's comes first)."""
    names = {str(c) for c in frame.columns}
    if "response_tokens" in columns or (wanted is None and "response_tokens" in names and not names & set(_COUNTS)):
        return frame, row_name
    if wanted in (None, "histogram") and "response_tokens" in names and names & set(_COUNTS):
        return _from_histogram(frame, path, rows, row_name, notes), _made_row
    if wanted in (None, "cdf") and {"length", "cdf"} <= names:
        return _from_cdf(frame, path, rows, row_name, notes), _made_row
    found = [la for la in LAYOUTS if set(la.needs) <= names and wanted in (None, la.name)]
    if found:
        layout = found[0]
        notes.append(layout.note)
        if "pd_ratio" in layout.needs:
            frame = _split_totals(frame, path, row_name)
        scaled = columns.get("arrival_s") is None and layout.columns.get("arrival_s") in names
        for ours, theirs in layout.columns.items():
            if theirs in names:
                columns.setdefault(ours, theirs)
        if scaled:
            arrival = layout.columns["arrival_s"]
            frame = frame.assign(**{arrival: pd.to_numeric(frame[arrival], errors="coerce") * layout.arrival_scale})
        drop = {"hash_ids", "num_total_tokens", "pd_ratio"} & names
        return frame.drop(columns=list(drop)), row_name
    if wanted is None or wanted in KINDS:
        _refuse_near_layout(names, path)
        return frame, row_name
    known = {la.name: la.needs for la in reversed(LAYOUTS)}
    needs = (known | {"histogram": ("response_tokens", "count"), "cdf": ("length", "cdf")})[wanted]
    raise TraceError(f"{path}: not in the {wanted} layout, which needs {', '.join(needs)}{_nearest(needs, names)}")


def _nearest(needs: Sequence[str], names: set[str]) -> str:
    hints = []
    for need in needs:
        near = difflib.get_close_matches(need, sorted(names - set(needs)), n=1, cutoff=0.7)
        if need not in names and near:
            hints.append(f"{near[0]!r} should be {need!r}")
    return f"; {' and '.join(hints)}" if hints else f", and the file has {', '.join(sorted(names))}"


def _refuse_near_layout(names: set[str], path: Path) -> None:
    """A file that would be a known layout but for a misspelt column is refused with the right name."""
    for layout in LAYOUTS:
        missing = [n for n in layout.needs if n not in names]
        if len(missing) == 1 and len(layout.needs) > 1:
            near = difflib.get_close_matches(missing[0], sorted(names - set(layout.needs)), n=1, cutoff=0.7)
            if near:
                like = f"{path}: looks like the {layout.name} layout"
                raise TraceError(f"{like}, but {near[0]!r} should be {missing[0]!r}")


def _split_totals(frame: pd.DataFrame, path: Path, row_name: RowName) -> pd.DataFrame:
    total = _plain_numbers(frame, "num_total_tokens", path, row_name)
    ratio = _plain_numbers(frame, "pd_ratio", path, row_name)
    response = np.maximum(np.rint(total / (1 + ratio)), 1)
    prompt = np.maximum(total - response, 1)
    return frame.assign(prompt_tokens=prompt, response_tokens=response)


def _plain_numbers(frame: pd.DataFrame, column: str, path: Path, row_name: RowName) -> Any:
    values = pd.to_numeric(frame[column], errors="coerce").to_numpy(np.float64, na_value=np.nan)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        row = int(np.argmax(bad))
        got = frame[column].iloc[row]
        raise TraceError(f"{path}: {row_name(row)}: {column} is not a finite number, 0 or more (got {got})")
    return values


def _made_row(index: int) -> str:
    return f"made-up row {index + 1}"


def _from_histogram(frame: pd.DataFrame, path: Path, rows: int, row_name: RowName, notes: list[str]) -> pd.DataFrame:
    counts = next(c for c in _COUNTS if c in frame.columns)
    weight = _plain_numbers(frame, counts, path, row_name)
    length = _plain_numbers(frame, "response_tokens", path, row_name)
    if len(frame) == 0 or weight.sum() <= 0:
        raise TraceError(f"{path}: the histogram holds no responses")
    order = np.argsort(length, kind="stable")
    cumulative = np.cumsum(weight[order]) / weight.sum()
    places = np.searchsorted(cumulative, (np.arange(rows) + 0.5) / rows)
    notes.append(f"a histogram of {weight.sum():.0f} responses, taken at {rows} equally likely points")
    return pd.DataFrame({"response_tokens": length[order][np.minimum(places, len(order) - 1)]})


def _from_cdf(frame: pd.DataFrame, path: Path, rows: int, row_name: RowName, notes: list[str]) -> pd.DataFrame:
    length, share = (_plain_numbers(frame, c, path, row_name) for c in ("length", "cdf"))
    if len(frame) == 0:
        raise TraceError(f"{path}: the CDF holds no points")
    if (share > 1).any():
        row = int(np.argmax(share > 1))
        raise TraceError(f"{path}: {row_name(row)}: cdf is above 1 (got {share[row]:g}); give shares, not percent")
    tasks = frame["task"].astype(str).to_numpy() if "task" in frame else np.full(len(frame), "")
    parts = []
    for task in dict.fromkeys(tasks):
        order = np.flatnonzero(tasks == task)
        order = order[np.lexsort((share[order], length[order]))]
        x, y = np.maximum(length[order], 1), np.maximum.accumulate(share[order])
        at = (np.arange(rows) + 0.5) / rows
        beyond = at > y[-1]
        lengths = np.where(beyond, x[-1], np.rint(np.interp(at, y, x)))
        part = pd.DataFrame({"response_tokens": lengths, "capped": beyond})
        parts.append(part.assign(task=task) if "task" in frame else part)
        notes.append(
            f"a CDF{f' of {task}' if task else ''}, taken at {rows} equally likely points; the {beyond.mean():.2%} "
            f"beyond its last point are marked as cut at {x[-1]:.0f} tokens"
        )
    return pd.concat(parts, ignore_index=True)


def _numbered(frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    if "prompt_id" not in frame:
        notes.append("no prompt id: every response is taken as a prompt of its own")
        frame = frame.assign(prompt_id=np.arange(len(frame)))
    if "sample_id" not in frame:
        keys = [frame[k].map(str) for k in ("prompt_id", "epoch") if k in frame]
        frame = frame.assign(sample_id=frame.groupby(keys, sort=False).cumcount())
    return frame


__all__ = ["COLUMNS", "FORMATS", "KINDS", "LAYOUTS", "Layout", "import_trace"]
