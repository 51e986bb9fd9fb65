"""Generation of one step over time: active sequences, sequences per replica, GPUs by TP degree, switches."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.experiment.result import Result
from rlsim.results.report.chosen_run import Choice
from rlsim.results.report.page import Block, CaseSetup, Section, Text, figure
from rlsim.results.report.style import ENGINE, TP_SHADES, WIDTH, chart, part

Floats = npt.NDArray[np.float64]
MOMENTS = 300
_ENGINE_KINDS = ("decode", "prefill", "mixed")
_PANEL = WIDTH - 110  # px of a panel without its labels


class Generation(NamedTuple):
    """One system's generation of one step; all times are seconds since it began."""

    system: str
    duration_s: float
    sequences: pd.DataFrame  # at_s, active, replicas, batch (active sequences per active replica)
    tp: pd.DataFrame  # at_s, tp, gpus
    switches: pd.DataFrame  # at_s, node, from_tp, to_tp, pause_s


def generation(result: Result, choice: Choice, system: str, moments: int = MOMENTS) -> Generation | None:
    """What a system's generation looked like at `moments` evenly spread moments; None if the step generated nothing."""
    calls = choice.step_rows(result.calls, system)
    calls = calls[calls["kind"] == "generate"]
    if calls.empty:
        return None
    began, ended = float(calls["start_at"].min()), float(calls["end_at"].max())
    if ended <= began:
        return None
    # Of all steps: where a rollout never stops, responses of other steps are generated beside this step's.
    stays = choice.rows(result.stays, system)
    stays = stays[stays["call"].isin(calls["call"])]  # not those of judges
    spans = choice.rows(result.spans, system)
    spans = spans[spans["kind"].isin(_ENGINE_KINDS)]
    at = np.linspace(began, ended, moments)
    active = active_sequences(stays, at)
    replicas = active_replicas(spans, at)
    batch = np.divide(active, replicas, out=np.full(len(at), np.nan), where=replicas > 0)
    sequences = pd.DataFrame({"at_s": at - began, "active": active, "replicas": replicas, "batch": batch})
    switches = choice.step_rows(result.switches, system)
    pause = switches[["weights_s", "kv_s", "graph_s", "control_s"]].sum(axis=1)
    switches = switches[["node", "from_tp", "to_tp"]].assign(at_s=switches["at"] - began, pause_s=pause)
    tp = gpus_by_tp(spans, at).assign(at_s=lambda frame: frame["at_s"] - began)
    return Generation(system, ended - began, sequences, tp, switches.reset_index(drop=True))


def active_sequences(stays: pd.DataFrame, at: Floats) -> npt.NDArray[np.int64]:
    """Sequences in prefill or decoding at each moment: admitted at a replica that they have not left.

    One that waits, was preempted, is on its way to another replica, or was aborted does not count.
    """
    admitted = stays[stays["admitted_at"].notna()]
    return covering(admitted["admitted_at"], admitted["left_at"], at)


def active_replicas(spans: pd.DataFrame, at: Floats) -> npt.NDArray[np.int64]:
    """Replicas that iterate at each moment; one on several runs of GPUs counts once."""
    once = spans.drop_duplicates(["label", "start_at", "end_at"])
    return covering(once["start_at"], once["end_at"], at)


def gpus_by_tp(spans: pd.DataFrame, at: Floats) -> pd.DataFrame:
    """GPUs that iterate at each TP degree and moment: columns at_s (as `at`), tp, gpus."""
    frames = []
    for tp, mine in spans.groupby("tp"):
        count = covering(mine["start_at"], mine["end_at"], at, mine["gpus"])
        frames.append(pd.DataFrame({"at_s": at, "tp": int(str(tp)), "gpus": count}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"at_s": [], "tp": [], "gpus": []})


def covering(
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


def generation_chart(shown: Generation, until_s: float, most: int, gpus: int) -> Any:
    """Three panels over the same seconds: active sequences, sequences per replica, GPUs by TP; switches as rules.

    The axes end at `until_s` seconds, `most` active sequences and all `gpus`, so that systems can be compared.
    """
    pairs = shown.switches["from_tp"].astype(str) + "→" + shown.switches["to_tp"].astype(str)
    over_time = {"until_s": until_s, "width": _PANEL, "switches": shown.switches.assign(text=pairs)}
    active = {"column": "active", "y_title": "active sequences", "colour": ENGINE["decode"], "height": 130}
    batch = {"column": "batch", "y_title": "per replica", "colour": "#009E73", "height": 100}
    look = {"frame": shown.sequences, "title": ..., "x_title": None, "extent": 48, "ticks": 4, "stroke": 1.8}
    degrees = sorted({int(tp) for tp in shown.tp["tp"]})
    shades = {f"TP {tp}": TP_SHADES[min(tp.bit_length() - 1, len(TP_SHADES) - 1)] for tp in degrees}
    layouts = {"frame": shown.tp.assign(degree="TP " + shown.tp["tp"].astype(str)), "shades": shades, "gpus": gpus}
    panels = [
        part("sequences", y_scale={"domain": [0, most], "nice": True}, **active, **look, **over_time),
        part("sequences", y_scale={"nice": True}, **batch, **look, **over_time),
        part("layouts", **layouts, **over_time),
    ]
    what = f"Generation under {shown.system}: active sequences, batch, TP"
    return chart("panels", panels=panels, spacing=8, colours="independent", description=what)


def generation_section(result: Result, choice: Choice, setup: CaseSetup) -> Section:
    """Active sequences, batch and TP of the chosen step over time, with each switch."""
    blocks: list[Block] = [Text(choice.text)]
    found = {system: generation(result, choice, system) for system in choice.systems}
    until = max((shown.duration_s for shown in found.values() if shown), default=0.0)
    most = max((int(shown.sequences["active"].max()) for shown in found.values() if shown), default=0)
    for number, (system, shown) in enumerate(found.items(), 1):
        if shown is None:
            blocks.append(Text(f"{system} generated nothing in this step."))
            continue
        degrees = Counter(zip(shown.switches["from_tp"], shown.switches["to_tp"], strict=True))
        changes = ", ".join(f"{before}→{after} ×{times}" for (before, after), times in degrees.most_common())
        told = {"switches": len(shown.switches), "changes": changes, "moments": MOMENTS, "systems": len(found)}
        told |= {"system": system, "round": choice.round(result, system)}
        drawn = generation_chart(shown, until, most, setup.gpus)
        blocks.append(figure("generation", drawn, f"generation-{number}", **told))
    return Section("generation", "Generation over time", tuple(blocks))
