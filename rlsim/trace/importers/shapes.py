"""Distributions instead of responses: histograms and digitised CDFs, taken at equally likely points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from rlsim.errors import TraceError
from rlsim.trace.importers.tables import RowName, plain_numbers

COUNTS = ("expected_requests", "count", "counts", "requests", "frequency")


def made_row(index: int) -> str:
    """How a row that no file holds is called."""
    return f"made-up row {index + 1}"


def from_histogram(frame: pd.DataFrame, path: Path, rows: int, row_name: RowName, notes: list[str]) -> pd.DataFrame:
    """`rows` equally likely lengths of a histogram with columns response_tokens and one of `COUNTS`."""
    counts = next(c for c in COUNTS if c in frame.columns)
    weight = plain_numbers(frame, counts, path, row_name)
    length = plain_numbers(frame, "response_tokens", path, row_name)
    if len(frame) == 0 or weight.sum() <= 0:
        raise TraceError(f"{path}: the histogram holds no responses")
    order = np.argsort(length, kind="stable")
    cumulative = np.cumsum(weight[order]) / weight.sum()
    places = np.searchsorted(cumulative, (np.arange(rows) + 0.5) / rows)
    notes.append(f"a histogram of {weight.sum():.0f} responses, taken at {rows} equally likely points")
    return pd.DataFrame({"response_tokens": length[order][np.minimum(places, len(order) - 1)]})


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
