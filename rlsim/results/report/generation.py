"""Generation of one step over time: active sequences, sequences per replica, GPUs by TP degree, switches."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.experiment.result import Result
from rlsim.results.report.choice import Choice
from rlsim.results.report.page import Block, Figure, Section, Text
from rlsim.results.report.setups import CaseSetup
from rlsim.results.report.style import ENGINE, SWITCH, TP_SHADES, WIDTH, along, by_name, data, exactly, finished

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
    scale = exactly(0, until_s)
    rules = _switches(shown.switches, scale)
    active = _sequences(shown.sequences, "active", "active sequences", ENGINE["decode"], [0, most], scale)
    batch = _sequences(shown.sequences, "batch", "per replica", "#009E73", alt.Undefined, scale)
    panels = ((active, rules, 130), (batch, rules, 100), (_layouts(shown.tp, gpus, scale), rules, 110))
    stacked = [alt.layer(one, *over).properties(width=_PANEL, height=height) for one, over, height in panels]
    chart = alt.vconcat(*stacked, spacing=8).resolve_scale(color="independent")
    return finished(chart, description=f"Generation under {shown.system}: active sequences, batch, TP", fit=False)


def _seconds(title: str | None, scale: Any) -> Any:
    """The axis of time; without a title, without labels."""
    return along(alt.X, "at_s", title, scale, labels=title is not None, format=",~f", tickCount=10)


def _sequences(frame: pd.DataFrame, column: str, title: str, colour: str, domain: Any, scale: Any) -> Any:
    y = along(alt.Y, column, title, alt.Scale(domain=domain, nice=True), minExtent=48, format=",~f", tickCount=4)
    base = alt.Chart(data(frame)).encode(x=_seconds(None, scale), y=y)
    area = base.mark_area(interpolate="step-after", color=colour, opacity=0.18)
    return area + base.mark_line(interpolate="step-after", color=colour, strokeWidth=1.8)


def _layouts(frame: pd.DataFrame, gpus: int, scale: Any) -> Any:
    """GPUs at work by TP degree, stacked."""
    degrees = sorted({int(tp) for tp in frame["tp"]})
    shades = {f"TP {tp}": TP_SHADES[min(tp.bit_length() - 1, len(TP_SHADES) - 1)] for tp in degrees}
    rows = data(frame.assign(degree="TP " + frame["tp"].astype(str)))
    area = alt.Chart(rows).mark_area(interpolate="step-after", stroke="#FFFFFF", strokeWidth=0.4)
    height = along(alt.Y, "gpus", "GPUs by TP degree", exactly(0, gpus), minExtent=48, tickCount=4, format=",~f")
    return area.encode(
        x=_seconds("time since generation began (s)", scale),
        y=height.stack("zero"),
        color=by_name(alt.Color, "degree", shades),
        order="tp:Q",
    )


def _switches(switches: pd.DataFrame, scale: Any) -> list[Any]:
    """A rule for every switch; none without switches."""
    if switches.empty:
        return []
    rows = switches.assign(text=switches["from_tp"].astype(str) + "→" + switches["to_tp"].astype(str))
    at, pause = (alt.Tooltip(f"{name}_s:Q", format=".2f", title=f"{name} (s)") for name in ("at", "pause"))
    rules = alt.Chart(data(rows)).mark_rule(color=SWITCH, strokeWidth=1.4, strokeDash=[4, 2])
    told = [at, "node:N", alt.Tooltip("text:N", title="TP"), pause]
    return [rules.encode(x=alt.X("at_s:Q", scale=scale), tooltip=told)]


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
        count = len(shown.switches)
        caption = (
            "Top: sequences in prefill or decoding. Middle: these, divided by the replicas at work. "
            "Bottom: GPUs at work, by TP degree (times PP, if a plan pipelines generation); white is idle or paused. "
            f"{MOMENTS} moments are drawn. "
        )
        caption += "All systems have the same time axis. " if len(found) > 1 else ""
        degrees = Counter(zip(shown.switches["from_tp"], shown.switches["to_tp"], strict=True))
        changes = ", ".join(f"{before}→{after} ×{times}" for (before, after), times in degrees.most_common())
        caption += f"Dashed: {count} change{'s' if count > 1 else ''} of a node's TP ({changes})." if count else ""
        caption += "" if count else "No node changed its TP."
        title = choice.titled(f"Generation under {system}", result, system)
        blocks.append(Figure(f"generation-{number}", title, generation_chart(shown, until, most, setup.gpus), caption))
    return Section("generation", "Generation over time", tuple(blocks))
