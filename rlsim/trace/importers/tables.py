"""Tables of another program: requests with one column per length (Mooncake, Vidur, Azure, BurstGPT), and distributions.

Columns were read from Azure/AzurePublicDataset at b469a11 (`AzureLLMInferenceDataset2023.md`, `…2024.md`,
`AzureLMMInferenceDataset2025.md` and their notebooks), HPMLL/BurstGPT at e92f533 (`README.md`; `BurstGPT_1.csv` has no
Session ID and no Elapsed time, releases since 1.2 have), kvcache-ai/Mooncake and microsoft/vidur. Histograms and
digitised CDFs are taken at equally likely points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base.tables import floats
from rlsim.errors import TraceError

RowName = Callable[[int], str]
#: Columns that may hold the number of responses of a histogram's bin.
COUNTS = ("expected_requests", "count", "counts", "requests", "frequency")


@dataclass(frozen=True)
class Table:
    """Another program's columns: those that must be there, how they map, and what has to be said about it.

    `arrival` says how its time of arrival is written; `task` are two columns that become the task; `drop` are left out
    without a further note; `empty_note` tells of rows of no response, which are left out.
    """

    name: str
    needs: tuple[str, ...]
    columns: Mapping[str, str]
    note: str
    arrival: str = "s"
    task: tuple[str, str] | None = None
    drop: tuple[str, ...] = ()
    empty_note: str = ""


_EMPTY = "{n} requests without a response (failed) are left out"
TABLES: tuple[Table, ...] = (
    Table("mooncake", ("timestamp", "input_length", "output_length"),
          {"arrival_s": "timestamp", "prompt_tokens": "input_length", "response_tokens": "output_length"},
          "Mooncake layout: timestamps in ms; hash_ids (shared prefixes) are left out", "ms", drop=("hash_ids",)),
    Table("vidur", ("num_prefill_tokens", "num_decode_tokens"),
          {"arrival_s": "arrived_at", "prompt_tokens": "num_prefill_tokens", "response_tokens": "num_decode_tokens"},
          "Vidur layout: arrived_at in seconds", drop=("num_total_tokens", "pd_ratio")),
    Table("vidur", ("num_total_tokens", "pd_ratio"), {"arrival_s": "arrived_at"},
          "Vidur layout: lengths worked out from num_total_tokens and pd_ratio (prompt tokens per response token)",
          drop=("num_total_tokens", "pd_ratio")),
    Table("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
          {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "response_tokens": "GeneratedTokens"},
          "Azure LLM inference layout: arrival from the first TIMESTAMP on", "clock", drop=("NumImages",),
          empty_note=_EMPTY),
    Table("burstgpt", ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"),
          {"arrival_s": "Timestamp", "prompt_tokens": "Request tokens", "response_tokens": "Response tokens"},
          "BurstGPT layout: arrival from the first Timestamp on; Model and Log Type are the task; Session ID and "
          "Elapsed time are left out: each request of a conversation is a prompt of its own",
          "first", ("Model", "Log Type"),
          ("Session ID", "Elapsed time", "Total tokens"), _EMPTY),
)  # fmt: skip


def read_known(
    table: Table, frame: pd.DataFrame, path: Path, row_name: RowName, columns: dict[str, str], notes: list[str]
) -> tuple[pd.DataFrame, RowName]:
    """`frame` with the columns of rlsim's schema that `table` names; `columns` (the caller's mapping) goes first.

    Adds the mapping that goes with the layout to `columns`, and what is assumed to `notes`.
    """
    notes.append(table.note)
    names = {str(c) for c in frame.columns}
    if "pd_ratio" in table.needs:
        frame = _split_totals(frame, path, row_name)
    theirs = table.columns.get("arrival_s", "")
    if "arrival_s" not in columns and theirs in names:
        frame = frame.assign(**{theirs: _arrival(frame, theirs, table.arrival, path, row_name)})
    for ours, name in table.columns.items():
        if name in names:
            columns.setdefault(ours, name)
    if table.task and "task" not in columns:
        first, second = (frame[name].map(str) for name in table.task)
        frame = frame.assign(task=first + " " + second)
        frame = frame.drop(columns=[c for c in table.task if c not in columns.values()])
    if table.empty_note and columns.get("response_tokens") in names:
        empty = floats(frame[columns["response_tokens"]]) == 0
        if empty.any():
            notes.append(table.empty_note.format(n=f"{int(empty.sum()):,}"))
            kept = np.flatnonzero(~empty)
            named, frame = row_name, frame[~empty].reset_index(drop=True)
            row_name = lambda i: named(int(kept[i]))  # noqa: E731
    return frame.drop(columns=[c for c in table.drop if c in frame and c not in columns.values()]), row_name


def _arrival(frame: pd.DataFrame, column: str, kind: str, path: Path, row_name: RowName) -> Any:
    """Seconds from the start of the recording."""
    if kind == "clock":
        try:
            at = pd.to_datetime(frame[column], format="ISO8601", utc=True)
        except (ValueError, TypeError):
            at = pd.to_datetime(frame[column], format="ISO8601", utc=True, errors="coerce")
            row = int(np.argmax(at.isna()))
            got = frame[column].iloc[row]
            raise TraceError(
                f"{path}: {row_name(row)}: {column} should be a time such as 2023-11-16 18:17:03.9799600 (got {got!r})"
            ) from None
        return (at - at.min()).dt.total_seconds()
    values = pd.Series(floats(frame[column]))
    bad = (values.isna() | np.isinf(values)).to_numpy() & frame[column].notna().to_numpy()
    if bad.any():
        row = int(np.argmax(bad))
        raise TraceError(f"{path}: {row_name(row)}: {column} is not a number (got {frame[column].iloc[row]!r})")
    if kind == "first":
        return values - values.min()
    return values * (1e-3 if kind == "ms" else 1.0)


def _split_totals(frame: pd.DataFrame, path: Path, row_name: RowName) -> pd.DataFrame:
    total = plain_numbers(frame, "num_total_tokens", path, row_name)
    ratio = plain_numbers(frame, "pd_ratio", path, row_name)
    response = np.maximum(np.rint(total / (1 + ratio)), 1)
    prompt = np.maximum(total - response, 1)
    return frame.assign(prompt_tokens=prompt, response_tokens=response)


def plain_numbers(frame: pd.DataFrame, column: str, path: Path, row_name: RowName) -> Any:
    """A column as floats. Raises `TraceError` with the row for anything but finite numbers of 0 or more."""
    values = floats(frame[column])
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        row = int(np.argmax(bad))
        got = frame[column].iloc[row]
        raise TraceError(f"{path}: {row_name(row)}: {column} is not a finite number, 0 or more (got {got})")
    return values


def made_row(index: int) -> str:
    """The name in messages of a row that was computed rather than read from a file."""
    return f"made-up row {index + 1}"


def from_histogram(frame: pd.DataFrame, path: Path, rows: int, row_name: RowName, notes: list[str]) -> pd.DataFrame:
    """`rows` equally likely lengths of a histogram with columns response_tokens and one of `COUNTS`."""
    counts = next(c for c in COUNTS if c in frame.columns)
    weight = plain_numbers(frame, counts, path, row_name)
    length = plain_numbers(frame, "response_tokens", path, row_name)
    if len(frame) == 0 or weight.sum() <= 0:
        raise TraceError(f"{path}: the histogram holds no responses")
    notes.append(f"a histogram of {weight.sum():.0f} responses, taken at {rows} equally likely points")
    return pd.DataFrame({"response_tokens": length[equally_likely(weight, np.argsort(length, kind="stable"), rows)]})


def equally_likely(weight: npt.NDArray[np.float64], order: npt.NDArray[np.intp], rows: int) -> npt.NDArray[np.intp]:
    """Indices of `rows` equally likely points of a distribution with these weights, whose values have this order."""
    cumulative = np.cumsum(weight[order]) / weight.sum()
    places = np.searchsorted(cumulative, (np.arange(rows) + 0.5) / rows)
    return np.asarray(order[np.minimum(places, len(order) - 1)])


def from_cdf(frame: pd.DataFrame, path: Path, rows: int, row_name: RowName, notes: list[str]) -> pd.DataFrame:
    """`rows` equally likely lengths of each task's CDF, with columns length, cdf and task if there are several."""
    length, share = (plain_numbers(frame, c, path, row_name) for c in ("length", "cdf"))
    if len(frame) == 0:
        raise TraceError(f"{path}: the CDF holds no points")
    if (share > 1).any():
        row = int(np.argmax(share > 1))
        raise TraceError(f"{path}: {row_name(row)}: cdf is above 1 (got {share[row]:g}); give shares, not percent")
    named = frame["task"] if "task" in frame else [""] * len(frame)
    tasks = np.array(["" if pd.isna(task) else str(task) for task in named], dtype=object)
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
