"""Generation of one step over time: active sequences, sequences per replica, GPUs by TP degree, switches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

if TYPE_CHECKING:
    from rlsim.experiment.result import Result
    from rlsim.report.choice import Choice

Floats = npt.NDArray[np.float64]
MOMENTS = 300
_ENGINE_KINDS = ("decode", "prefill", "mixed")


class Generation(NamedTuple):
    """One system's generation of one step; all times are seconds since it began."""

    system: str
    duration_s: float
    sequences: pd.DataFrame  # at_s, active, replicas, batch (active sequences per active replica)
    tp: pd.DataFrame  # at_s, tp, gpus
    switches: pd.DataFrame  # at_s, node, from_tp, to_tp, pause_s


def generation(result: Result, choice: Choice, system: str, moments: int = MOMENTS) -> Generation | None:
    """What a system's generation looked like at `moments` evenly spread moments; None if the step generated nothing."""
    calls = _step(choice.rows(result.calls, system), choice.step)
    calls = calls[calls["kind"] == "generate"]
    if calls.empty:
        return None
    began, ended = float(calls["start_at"].min()), float(calls["end_at"].max())
    if ended <= began:
        return None
    stays = _step(choice.rows(result.stays, system), choice.step)
    stays = stays[stays["call"].isin(calls["call"])]  # not those of judges
    spans = _step(choice.rows(result.spans, system), choice.step)
    spans = spans[spans["kind"].isin(_ENGINE_KINDS)]
    at = np.linspace(began, ended, moments)
    active = active_sequences(stays, at)
    replicas = active_replicas(spans, at)
    batch = np.divide(active, replicas, out=np.full(len(at), np.nan), where=replicas > 0)
    sequences = pd.DataFrame({"at_s": at - began, "active": active, "replicas": replicas, "batch": batch})
    switches = _step(choice.rows(result.switches, system), choice.step)
    pause = switches[["weights_s", "kv_s", "graph_s", "control_s"]].sum(axis=1)
    switches = switches[["node", "from_tp", "to_tp"]].assign(at_s=switches["at"] - began, pause_s=pause)
    tp = gpus_by_tp(spans, at).assign(at_s=lambda frame: frame["at_s"] - began)
    return Generation(system, ended - began, sequences, tp, switches.reset_index(drop=True))


def active_sequences(stays: pd.DataFrame, at: Floats) -> npt.NDArray[np.int64]:
    """Sequences in prefill or decoding at each moment: admitted at a replica that they have not left.

    One that waits, was preempted, is on its way to another replica, or was aborted does not count.
    """
    admitted = stays[stays["admitted_at"].notna()]
    return _covering(admitted["admitted_at"], admitted["left_at"], at)


def active_replicas(spans: pd.DataFrame, at: Floats) -> npt.NDArray[np.int64]:
    """Replicas that iterate at each moment; one on several runs of GPUs counts once."""
    once = spans.drop_duplicates(["label", "start_at", "end_at"])
    return _covering(once["start_at"], once["end_at"], at)


def gpus_by_tp(spans: pd.DataFrame, at: Floats) -> pd.DataFrame:
    """GPUs that iterate at each TP degree and moment: columns at_s (as `at`), tp, gpus."""
    frames = []
    for tp, mine in spans.groupby("tp"):
        count = _covering(mine["start_at"], mine["end_at"], at, mine["gpus"])
        frames.append(pd.DataFrame({"at_s": at, "tp": int(str(tp)), "gpus": count}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"at_s": [], "tp": [], "gpus": []})


def switch_labels(switches: pd.DataFrame, character_s: float) -> pd.DataFrame:
    """Labels (at_s, text) that do not overlap, each from its switch to the right; `character_s`: width of a character.

    `switches` has columns at_s and text, what the switch was. One that would begin within the label before it is
    counted there.
    """
    labels: list[tuple[float, list[str]]] = []
    for row in switches.sort_values("at_s").to_dict("records"):
        if labels and row["at_s"] < labels[-1][0] + (len(_counted(labels[-1][1])) + 1) * character_s:
            labels[-1][1].append(row["text"])
        else:
            labels.append((row["at_s"], [row["text"]]))
    return pd.DataFrame([{"at_s": at_s, "text": _counted(texts)} for at_s, texts in labels])


def _counted(texts: list[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    return f"{texts[0]} ×{len(texts)}" if len(set(texts)) == 1 else f"{len(texts)} switches"


def _covering(
    start: pd.Series[float], end: pd.Series[float], at: Floats, weight: pd.Series[int] | None = None
) -> npt.NDArray[np.int64]:
    """Weight of the intervals [start, end) that hold each moment."""
    weights = np.ones(len(start), dtype=np.int64)
    if weight is not None:
        weights = np.asarray(weight, dtype=np.int64)
    return np.asarray(_weight_before(start, weights, at) - _weight_before(end, weights, at), dtype=np.int64)


def _weight_before(edge: pd.Series[float], weights: npt.NDArray[np.int64], at: Floats) -> npt.NDArray[np.int64]:
    """Weight of the edges that lie at or before each moment."""
    order = np.argsort(edge.to_numpy(), kind="stable")
    total = np.concatenate([[0], np.cumsum(weights[order])])
    return np.asarray(total[np.searchsorted(edge.to_numpy()[order], at, side="right")], dtype=np.int64)


def _step(table: pd.DataFrame, step: int) -> pd.DataFrame:
    return table[table["step"] == step]
