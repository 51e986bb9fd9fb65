"""The tables of an advice as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from rlsim.advise.advice import SECTIONS
from rlsim.advise.conclusions import waits_for_kv
from rlsim.advise.idle import CAUSES, tail_of
from rlsim.formats import is_missing, number, rate, share, with_interval

#: Columns that hold words.
WORDS = ("system", "system (* fastest)", "call", "why not", "offload", "")

#: Columns that systems have where staleness is allowed.
RELAXED = ("stale", "stale p95", "rollout idle", "trainer idle")

#: With more GPUs than these, those of a node are shown together.
MOST_GPUS = 16


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


def _memory(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    columns = [
        "TP",
        "fits",
        "weights",
        "working",
        "beside",
        "KV",
        "KV tokens",
        "full seq.",
        "mean seq.",
        "to hold",
        "why not",
    ]
    rows = []
    for row in frame.to_dict("records"):
        gb = [number(row[f"{part}_gb"], 1) for part in ("weights", "activations", "resident", "kv")]
        counts = [number(row[key], 0) for key in ("kv_tokens", "full_sequences", "mean_sequences", "sequences")]
        why = str(row["why_not"])
        if row["waits"]:
            why = why or f"responses wait for {'KV' if waits_for_kv(row) else 'max_num_seqs'}"
        rows.append([str(row["tp"]), "yes" if row["fits"] else "no", *gb, *counts, why])
    return columns, rows


def _memory_calls(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            f"{row['call']} ({row['model']})",
            "yes" if row["fits"] else "no",
            *(number(row[f"{part}_gb"], 1) for part in ("kept", "working", "total", "gpu")),
        ]
        for row in frame.to_dict("records")
    ]
    return ["call", "fits", "kept", "while it runs", "in all", "GPU has"], rows


def _idle(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    groups = frame["gpu"] * min(MOST_GPUS, len(frame)) // len(frame)  # of neighbours
    parts = [("-".join(map(str, sorted({*part["gpu"].iloc[[0, -1]]}))), part) for _, part in frame.groupby(groups)]
    rows = [
        [name, *(share(value, 1) for value in (*part[["idle", *CAUSES]].mean(), tail_of(part)))]
        for name, part in (*parts, ("all", frame))
    ]
    return ["GPU", "idle", *(cause.replace("_", " ") for cause in CAUSES), "tail"], rows


def _waits(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [[row["waits_for"] or "(nothing runs)", share(row["share"], 1)] for row in frame.to_dict("records")]
    return ["call", "share"], rows


def _ranking(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows, relaxed = [], "staleness_p95" in frame
    for row in frame.to_dict("records"):
        if row["same_as"]:
            continue
        also = frame[frame["same_as"] == row["system"]]["system"].tolist()
        system = f"{row['system']} ({row['tuned']})" if row["tuned"] else str(row["system"])
        marks = []
        if row["rank"] > 1 and row["with_best"] and row["comparable"]:
            marks.append("≈ best")
        if row["staleness"]:
            marks.append(f"staleness {row['staleness']}")
        if not row["comparable"]:
            marks.append("not comparable yet")
        marks += [f"same: {', '.join(also)}"] if also else []
        rows.append(
            [
                system,
                rate(row["responses_per_s"]),
                with_interval(row, "speedup"),
                number(row["token_speedup"]),
                number(row["step_time_s"], 1),
                share(row["idle"], 1),
                share(row["tail"]),
                *(_relaxed(row) if relaxed else ()),
                "; ".join(marks),
            ]
        )
    columns = ["system", "responses/s", "speedup", "by tokens", "step s", "idle", "tail"]
    return [*columns, *(RELAXED if relaxed else ()), ""], rows


def _relaxed(row: Mapping[Any, Any]) -> list[str]:
    stale = [number(row[key]) for key in ("staleness_mean", "staleness_p95")]
    return [*stale, *(share(row[key]) for key in ("rollout_idle", "trainer_idle"))]


def _neighbour(row: Mapping[Any, Any], key: str) -> str:
    """The throughput on fewer or more GPUs, how many these are, and how stale that is if it is staler."""
    stale = row[f"stale_{key}"]
    staler = f", stale {stale:.0f}" if stale > row["staleness_max"] else ""
    return f"{rate(row[f'with_{key}'])} ({row[key]:.0f}{staler})"


def _splits(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = []
    for row in frame.to_dict("records"):
        beside = ["–" if is_missing(row[f"with_{key}"]) else _neighbour(row, key) for key in ("fewer", "more")]
        rows.append(
            [
                str(row["system"]),
                str(row["tp"]),
                str(row["rollout_gpus"]),
                rate(row["responses_per_s"]),
                *beside,
                number(row["staleness_mean"]),
                number(row["staleness_max"], 0),
                *(share(row[key]) for key in ("rollout_idle", "trainer_idle")),
                f"{row['tried']} of {row['feasible']}",
            ]
        )
    columns = ["system", "TP", "GPUs that generate", "responses/s", "with fewer", "with more", "stale", "stale max"]
    return [*columns, *RELAXED[2:], "tried"], rows


def _plan(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    columns = {
        "gpus": "GPUs",
        "tp": "TP",
        "pp": "PP",
        "dp": "DP",
        "micro_batches": "micro-batches",
        "zero_stage": "ZeRO",
    }
    rows = []
    for row in frame.to_dict("records"):
        counts = ["–" if pd.isna(row[key]) else f"{row[key]:.0f}" for key in list(columns)[1:]]
        kept = "" if pd.isna(row["memory_share"]) else share(row["memory_share"], 1)
        offload = "yes" if row["offload"] is True else ""
        rows.append([str(row["system"]), str(row["call"]), str(row["gpus"]), *counts, offload, kept])
    return ["system", "call", *columns.values(), "offload", "engine's memory"], rows


def _scaling(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            str(row["gpus"]),
            str(row["system"]) + (" *" if row["best"] else ""),
            number(row["step_time_s"], 1),
            rate(row["responses_per_s"]),
            number(row["gpu_s_per_step"], 0),
            with_interval(row, "doubling"),
            share(row["marginal"], 1),
            "" if row["pays"] is None else "yes" if row["pays"] else "no",
        ]
        for row in frame.to_dict("records")
    ]
    return [
        "GPUs",
        "system (* fastest)",
        "step s",
        "responses/s",
        "GPU-s",
        "over half as many",
        "marginal",
        "pays",
    ], rows


_SHOWN: dict[str, Callable[[pd.DataFrame], tuple[list[str], list[list[str]]]]] = {
    "memory": _memory,
    "memory_calls": _memory_calls,
    "idle": _idle,
    "idle_waits": _waits,
    "ranking": _ranking,
    "screened": _ranking,
    "splits": _splits,
    "plan": _plan,
    "scaling": _scaling,
}
