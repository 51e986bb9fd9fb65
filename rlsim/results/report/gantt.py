"""The chosen step over time. Who held which GPU when, in few enough marks to draw: by GPU on small clusters, by groups
of nodes on large ones. Generation: active sequences, sequences per replica, GPUs by TP degree, switches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.experiment.frames import gpu_seconds
from rlsim.experiment.result import Result
from rlsim.results.report.chosen_run import Choice
from rlsim.results.report.page import Block, CaseSetup, Text, figure
from rlsim.results.report.shares import exclusive
from rlsim.results.report.style import ENGINE, TP_SHADES, WIDTH, chart, kind_colours, part

Floats = npt.NDArray[np.float64]
MOST_GPUS = 32  # drawn one by one
MOST_ROWS = 16  # of groups of nodes
MOST_MARKS = 3000
_BINS = 160
MARKS = ("start_s", "end_s", "low", "high", "kind", "what")
_LEVELS = 200  # a row's height is drawn in so many steps
_MARGIN = 0.06  # of a row's height, above and below
_BESIDE = 0.35  # of a row's height: work beside other work on the same GPUs


class Gantt(NamedTuple):
    """Rectangles of one step; row r of the chart reaches from r to r + 1."""

    marks: pd.DataFrame  # start_s, end_s (since the step began), low, high (rows), kind, what
    rows: tuple[str, ...]
    duration_s: float
    resolution_s: float  # 0: exact; else gaps shorter than this are not drawn, or the width of a bin
    grouped: bool  # rows are groups of GPUs, and heights within a row shares of them
    beside: bool  # some work, drawn as strips, ran beside other work


def gantt(result: Result, choice: Choice, system: str, gpus: int, gpus_per_node: int) -> Gantt:
    """All work in the chosen step's window, from the end of the step before to its own end."""
    steps = choice.rows(result.steps, system).sort_values("step")
    ends = steps["step_time_s"].cumsum().to_numpy()
    began = float(ends[choice.step] - steps["step_time_s"].iloc[choice.step])
    duration = float(ends[choice.step] - began)
    spans = choice.rows(result.spans, system)
    spans = spans[(spans["end_at"] > began) & (spans["start_at"] < began + duration)]
    if gpus <= MOST_GPUS:
        marks, resolution = merged(_within(spans, began, duration), duration)
        names = tuple(f"GPU {gpu}" for gpu in range(gpus))
        return Gantt(_by_gpu(marks), names, duration, resolution, grouped=False, beside=bool(marks["shared"].any()))
    alone = _within(exclusive(spans), began, duration)
    edges, names = _groups(gpus, gpus_per_node)
    bins = _BINS
    while len(marks := by_group(alone, edges, duration, bins)) > MOST_MARKS and bins > 10:
        bins //= 2
    return Gantt(marks, names, duration, duration / bins, grouped=True, beside=False)


def _within(spans: pd.DataFrame, began: float, duration: float) -> pd.DataFrame:
    start_s, end_s = (spans[column] - began for column in ("start_at", "end_at"))
    return spans.assign(start_s=start_s.clip(lower=0), end_s=end_s.clip(upper=duration))


def merged(spans: pd.DataFrame, duration_s: float, most: int = MOST_MARKS) -> tuple[pd.DataFrame, float]:
    """Neighbouring spans of one kind on the same GPUs as one, and the gap that was bridged for it (0: none but 0).

    Gaps are bridged only as far as needed to stay within `most` marks.
    """
    keys = ["gpu", "gpus", "kind", "tp", "shared"]
    ordered = spans.sort_values([*keys, "start_s"])
    new_key = (ordered[keys] != ordered[keys].shift()).any(axis=1).to_numpy(dtype=bool, na_value=True)
    gap = (ordered["start_s"] - ordered["end_s"].shift()).to_numpy()
    bridged = 0.0
    while True:
        first = new_key | (gap > max(bridged, 1e-9 * duration_s))
        if first.sum() <= most or bridged > duration_s:
            break
        bridged = bridged * 2 if bridged else duration_s / 4000
    grouped = ordered.groupby(np.cumsum(first), sort=False)
    result = grouped.agg({**dict.fromkeys([*keys, "label"], "first"), "start_s": "min", "end_s": "max"})
    return result.reset_index(drop=True), bridged


def _by_gpu(spans: pd.DataFrame) -> pd.DataFrame:
    low = spans["gpu"].astype(float)
    high = low + spans["gpus"]
    low = low.where(~spans["shared"], high - _BESIDE)
    last = spans["gpu"] + spans["gpus"] - 1
    where = "GPU " + spans["gpu"].astype(str) + ("–" + last.astype(str)).where(last > spans["gpu"], "")
    what = where + ", TP " + spans["tp"].astype(str)
    frame = spans.assign(low=low + _MARGIN, high=high - _MARGIN, what=what)
    return frame.sort_values(["shared", "start_s"])[list(MARKS)]


def _groups(gpus: int, gpus_per_node: int) -> tuple[list[int], tuple[str, ...]]:
    """First GPU of each group of nodes (and the end), and the groups' names; no more than MOST_ROWS groups."""
    nodes = -(-gpus // gpus_per_node)
    each = -(-nodes // MOST_ROWS)
    first = list(range(0, nodes, each))
    last = [min(node + each, nodes) - 1 for node in first]
    names = tuple(f"node {a}" if a == b else f"nodes {a}–{b}" for a, b in zip(first, last, strict=True))
    return [*(node * gpus_per_node for node in first), gpus], names


def by_group(spans: pd.DataFrame, edges: list[int], duration_s: float, bins: int) -> pd.DataFrame:
    """Rectangles whose height within a row is the share of its GPUs that did a kind of work, in each of `bins` bins.

    `edges`: first GPU of every row, and the end. Neighbouring bins of equal shares are one rectangle.
    """
    times = np.linspace(0.0, duration_s, bins + 1)
    kinds = list(dict.fromkeys(spans["kind"]))
    frames = []
    for row, (first, end) in enumerate(itertools.pairwise(edges)):
        here = np.minimum(spans["gpu"] + spans["gpus"], end) - np.maximum(spans["gpu"], first)
        mine = spans.assign(held=here)[here > 0]
        base = np.zeros(bins)
        for kind in kinds:
            own = mine[mine["kind"] == kind]
            share = gpu_seconds(own[["start_s", "end_s", "held"]].to_numpy(float), times)
            share /= (end - first) * duration_s / bins
            frames.append(_stretches(times, base, base + share, row).assign(kind=kind))
            base = base + share
    marks = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=MARKS)
    return marks[list(MARKS)]


def _stretches(times: Floats, base: Floats, top: Floats, row: int) -> pd.DataFrame:
    """Rectangles from `base` to `top` (shares of a row's height) over the bins between `times`."""
    levels = np.rint(np.stack([base, top]) * _LEVELS)
    first = np.flatnonzero(np.append(True, (np.diff(levels) != 0).any(axis=0)))
    kept = first[levels[1, first] > levels[0, first]]
    after = np.append(first[1:], len(base))[np.isin(first, kept)]
    low, high = (row + _MARGIN + (1 - 2 * _MARGIN) * levels[i, kept] / _LEVELS for i in (0, 1))
    what = [f"{share:.0%} of the row's GPUs" for share in (levels[1, kept] - levels[0, kept]) / _LEVELS]
    return pd.DataFrame(
        {"start_s": times[kept], "end_s": times[after], "low": low, "high": high, "what": pd.Series(what, dtype=str)}
    )


def timeline_blocks(result: Result, choice: Choice, setup: CaseSetup) -> Iterator[Block]:
    """GPU timeline of the chosen step, one chart per system."""
    yield Text(choice.text)
    colours = kind_colours(set(result.spans["kind"]), result.calls)
    found = {system: gantt(result, choice, system, setup.gpus, setup.gpus_per_node) for system in choice.systems}
    until = max(shown.duration_s for shown in found.values())
    for number, (system, shown) in enumerate(found.items(), 1):
        present = {kind: colour for kind, colour in colours.items() if kind in set(shown.marks["kind"])}
        known = {"names": shown.rows, "middles": [row + 0.5 for row in range(len(shown.rows))], "until_s": until}
        drawn = chart("timeline", marks=shown.marks, system=system, colours=present, **known)
        told = {"system": system, "shown": shown, "round": choice.round(result, system)}
        yield figure("timeline", drawn, f"timeline-{number}", **told)


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


def covering(start: pd.Series[float], end: pd.Series[float], at: Floats, weight: Any = 1) -> npt.NDArray[np.int64]:
    """Weight of the intervals [start, end) that hold each moment."""
    weights = np.broadcast_to(np.asarray(weight, np.int64), len(start))
    edges, change = np.concatenate([start, end]), np.concatenate([weights, -weights])
    order = np.argsort(edges, kind="stable")
    total = np.append(0, np.cumsum(change[order]))
    return np.asarray(total[np.searchsorted(edges[order], at, side="right")], np.int64)


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


def generation_blocks(result: Result, choice: Choice, setup: CaseSetup) -> Iterator[Block]:
    """Active sequences, batch and TP of the chosen step over time, with each switch."""
    yield Text(choice.text)
    found = {system: generation(result, choice, system) for system in choice.systems}
    until = max((shown.duration_s for shown in found.values() if shown), default=0.0)
    most = max((int(shown.sequences["active"].max()) for shown in found.values() if shown), default=0)
    for number, (system, shown) in enumerate(found.items(), 1):
        if shown is None:
            yield Text(f"{system} generated nothing in this step.")
            continue
        degrees = Counter(zip(shown.switches["from_tp"], shown.switches["to_tp"], strict=True))
        changes = ", ".join(f"{before}→{after} ×{times}" for (before, after), times in degrees.most_common())
        told = {"switches": len(shown.switches), "changes": changes, "moments": MOMENTS, "systems": len(found)}
        told |= {"system": system, "round": choice.round(result, system)}
        drawn = generation_chart(shown, until, most, setup.gpus)
        yield figure("generation", drawn, f"generation-{number}", **told)
