"""The tables of an advice as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from rlsim.advise.advice import SECTIONS
from rlsim.advise.conclusions import waits_for_kv
from rlsim.advise.idle import CAUSES, tail_of
from rlsim.formats import APART, Columns, Row, column, is_missing, number, rate, share, with_interval, written

#: Columns that hold words.
WORDS = ("system", "system (* fastest)", "call", "why not", "offload", "")


#: With more GPUs than these, those of a node are shown together.
MOST_GPUS = 16
#: The headings and the rows of a frame's table.
Shown = Callable[[pd.DataFrame], tuple[list[str], list[list[str]]]]


class Text(NamedTuple):
    """A table: what it is called and shows, its headings, its rows, and the columns that hold words."""

    name: str
    title: str
    caption: str
    headings: list[str]
    rows: list[list[str]]

    @property
    def words(self) -> frozenset[int]:
        """Numbers of the columns whose cells are words."""
        return frozenset(number for number, heading in enumerate(self.headings) if heading in WORDS)


def texts(tables: Mapping[str, pd.DataFrame]) -> Iterator[Text]:
    """The tables of an `Advice` that have rows, in the order of reading."""
    for name, title, caption in SECTIONS:
        if name in _SHOWN and len(tables[name]):
            yield Text(name, title, caption, *_SHOWN[name](tables[name]))


def _rows(columns: Columns) -> Shown:
    """A table whose rows are those of the frame."""
    return lambda frame: (list(columns), written(columns, frame.to_dict("records")))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _why_not(row: Row) -> str:
    if row["waits"] and not row["why_not"]:
        return f"responses wait for {'KV' if waits_for_kv(row) else 'max_num_seqs'}"
    return str(row["why_not"])


_MEMORY: Columns = {
    "TP": column("tp"),
    "fits": column("fits", _yes),
    "weights": column("weights_gb", number, 1),
    "working": column("activations_gb", number, 1),
    "beside": column("resident_gb", number, 1),
    "KV": column("kv_gb", number, 1),
    "KV tokens": column("kv_tokens", number, 0),
    "full seq.": column("full_sequences", number, 0),
    "mean seq.": column("mean_sequences", number, 0),
    "to hold": column("sequences", number, 0),
    "why not": _why_not,
}
_MEMORY_CALLS: Columns = {
    "call": lambda row: f"{row['call']} ({row['model']})",
    "fits": column("fits", _yes),
    "kept": column("kept_gb", number, 1),
    "while it runs": column("working_gb", number, 1),
    "in all": column("total_gb", number, 1),
    "GPU has": column("gpu_gb", number, 1),
}
_WAITS: Columns = {
    "call": lambda row: row["waits_for"] or "(nothing runs)",
    "share": column("share", share, 1),
}


def _idle(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    groups = frame["gpu"] * min(MOST_GPUS, len(frame)) // len(frame)  # of neighbours
    parts = [("-".join(map(str, sorted({*part["gpu"].iloc[[0, -1]]}))), part) for _, part in frame.groupby(groups)]
    rows = [
        [name, *(share(value, 1) for value in (*part[["idle", *CAUSES]].mean(), tail_of(part)))]
        for name, part in (*parts, ("all", frame))
    ]
    return ["GPU", "idle", *(cause.replace("_", " ") for cause in CAUSES), "tail"], rows


#: Of systems where staleness is allowed.
_RELAXED: Columns = {"stale": column("staleness_mean", number), "stale p95": column("staleness_p95", number), **APART}


def _ranking(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    def marks(row: Row) -> str:
        also = frame[frame["same_as"] == row["system"]]["system"]
        said = {
            "≈ best": row["rank"] > 1 and row["with_best"] and row["comparable"],
            f"staleness {row['staleness']}": row["staleness"],
            "not comparable yet": not row["comparable"],
            f"same: {', '.join(also)}": len(also),
        }
        return "; ".join(text for text, holds in said.items() if holds)

    columns: Columns = {
        "system": lambda row: f"{row['system']} ({row['tuned']})" if row["tuned"] else str(row["system"]),
        "responses/s": column("responses_per_s", rate),
        "speedup": lambda row: with_interval(row, "speedup"),
        "by tokens": column("token_speedup", number),
        "step s": column("step_time_s", number, 1),
        "idle": column("idle", share, 1),
        "tail": column("tail", share),
        **(_RELAXED if "staleness_p95" in frame else {}),
        "": marks,
    }
    return _rows(columns)(frame[frame["same_as"] == ""])


def _with(key: str) -> Callable[[Row], str]:
    """The throughput on fewer or more GPUs, how many these are, and how stale that is if it is staler."""

    def shown(row: Row) -> str:
        if is_missing(row[f"with_{key}"]):
            return "–"
        stale = row[f"stale_{key}"]
        staler = f", stale {stale:.0f}" if stale > row["staleness_max"] else ""
        return f"{rate(row[f'with_{key}'])} ({row[key]:.0f}{staler})"

    return shown


_SPLITS: Columns = {
    "system": column("system"),
    "TP": column("tp"),
    "GPUs that generate": column("rollout_gpus"),
    "responses/s": column("responses_per_s", rate),
    "with fewer": _with("fewer"),
    "with more": _with("more"),
    "stale": column("staleness_mean", number),
    "stale max": column("staleness_max", number, 0),
    **APART,
    "tried": lambda row: f"{row['tried']} of {row['feasible']}",
}


def _count(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.0f}"


_PLAN: Columns = {
    "system": column("system"),
    "call": column("call"),
    "GPUs": column("gpus"),
    "TP": column("tp", _count),
    "PP": column("pp", _count),
    "DP": column("dp", _count),
    "micro-batches": column("micro_batches", _count),
    "ZeRO": column("zero_stage", _count),
    "offload": lambda row: "yes" if row["offload"] is True else "",
    "engine's memory": lambda row: "" if pd.isna(row["memory_share"]) else share(row["memory_share"], 1),
}
_SCALING: Columns = {
    "GPUs": column("gpus"),
    "system (* fastest)": lambda row: f"{row['system']}{' *' if row['best'] else ''}",
    "step s": column("step_time_s", number, 1),
    "responses/s": column("responses_per_s", rate),
    "GPU-s": column("gpu_s_per_step", number, 0),
    "over half as many": lambda row: with_interval(row, "doubling"),
    "marginal": column("marginal", share, 1),
    "pays": lambda row: "" if row["pays"] is None else _yes(row["pays"]),
}
_SHOWN: dict[str, Shown] = {
    "memory": _rows(_MEMORY),
    "memory_calls": _rows(_MEMORY_CALLS),
    "idle": _idle,
    "idle_waits": _rows(_WAITS),
    "ranking": _ranking,
    "screened": _ranking,
    "splits": _rows(_SPLITS),
    "plan": _rows(_PLAN),
    "scaling": _rows(_SCALING),
}
