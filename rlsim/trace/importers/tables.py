"""Tables of requests of another program, one column per length. A `Table` is a row of data/layouts.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.tables import floats
from rlsim.errors import TraceError

RowName = Callable[[int], str]


@dataclass(frozen=True)
class Table:
    """Another program's columns, with the keys of its row in data/layouts.yaml."""

    format: str
    needs: tuple[str, ...]
    columns: Mapping[str, str]
    note: str
    arrival: str
    drop: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    fails: bool = False


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
