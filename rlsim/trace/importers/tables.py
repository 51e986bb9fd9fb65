"""Tables of requests with one column per length: Mooncake, Vidur, Azure and BurstGPT.

Columns were read from Azure/AzurePublicDataset at b469a11 (`AzureLLMInferenceDataset2023.md`, `…2024.md`,
`AzureLMMInferenceDataset2025.md` and their notebooks), HPMLL/BurstGPT at e92f533 (`README.md`; `BurstGPT_1.csv` has no
Session ID and no Elapsed time, releases since 1.2 have), kvcache-ai/Mooncake and microsoft/vidur.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.errors import TraceError
from rlsim.tables import floats

RowName = Callable[[int], str]


@dataclass(frozen=True)
class Table:
    """Another program's columns: those that must be there, how they map, and what has to be said about it.

    `arrival` says how its time of arrival is written; `task` are columns that become the task; `drop` are left out
    without a further note; `empty_note` tells of rows of no response, which are left out.
    """

    name: str
    needs: tuple[str, ...]
    columns: Mapping[str, str]
    note: str
    arrival: str = "s"
    task: tuple[str, ...] = ()
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
        missing = [name for name in table.task if name not in names]
        if not missing:
            task: Any = frame[table.task[0]].map(str)
            for name in table.task[1:]:
                task = task + " " + frame[name].map(str)
            frame = frame.assign(task=task)
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
