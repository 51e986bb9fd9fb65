"""The tables of an advice as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from rlsim.base.formats import APART, Columns, Row, column, number, rate, relaxed, share, written
from rlsim.results.advise.advice import SECTIONS
from rlsim.results.advise.conclusions import waits_for_kv
from rlsim.results.advise.idle import CAUSES, tail_of
from rlsim.results.comparison.verdict import judge

#: Columns that hold words.
WORDS = ("system", "call", "why not", "verdict")


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


def _ranking(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    verdict = judge(frame, next(iter(frame[frame["verdict"] == "baseline"]["system"]), ""))

    def named(row: Row) -> str:
        also = frame[frame["same_as"] == row["system"]]["system"]
        name = f"{row['system']} ({row['tuned']})" if row["tuned"] else str(row["system"])
        return " = ".join([name, *also])

    columns: Columns = {
        "system": named,
        "responses/s": column("responses_per_s", rate),
        "speedup": column("speedup", number),
        "by tokens": column("token_speedup", number),
        "95% interval": lambda row: verdict[row["system"]].interval,
        "verdict": column("verdict"),
        "step s": column("step_time_s", number, 1),
        "idle": column("bubble_fraction", share, 1),
        "tail": column("tail_fraction", share),
        **relaxed(frame),
    }
    return _rows(columns)(frame[frame["same_as"] == ""])


_SPLITS: Columns = {
    "system": column("system"),
    "TP": column("tp"),
    "GPUs that generate": column("rollout_gpus"),
    "responses/s": column("responses_per_s", rate),
    "stale": column("staleness_mean", number),
    "stale max": column("staleness_max", number, 0),
    **APART,
    "tried": lambda row: f"{row['tried']} of {row['feasible']}",
}
_SHOWN: dict[str, Shown] = {
    "memory": _rows(_MEMORY),
    "memory_calls": _rows(_MEMORY_CALLS),
    "idle": _idle,
    "idle_waits": _rows(_WAITS),
    "ranking": _ranking,
    "screened": _ranking,
    "splits": _rows(_SPLITS),
}
