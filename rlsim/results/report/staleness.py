"""Throughput against staleness: what each system pays for its speed, and how many prompts wait to be trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from rlsim.experiment.result import Result
from rlsim.experiment.steadiness import comparable
from rlsim.experiment.summary import half_interval, means
from rlsim.results.report.generation import covering
from rlsim.results.report.page import Block, Figure, Section
from rlsim.results.report.setups import CaseSetup
from rlsim.results.report.style import GREY, INK, SERIES, WIDTH, along, by_name, data, exactly, finished

_HEIGHT, _LINE = 360, 15  # px: of the plot, of a line of text
_SAME = 0.005  # throughputs that differ by no more than this share are equal, as is such a difference of staleness
_MOMENTS = 400
_MOST_QUEUES = 8
_BEST, _BEATEN = "no other is faster and no staler", "another is faster and no staler"
_LATE = "not comparable: not steady"
_COLOURS = {_BEST: SERIES[0], _BEATEN: "#7A7A7A", _LATE: "#C4C4C4"}


def frontier(result: Result, case: str) -> pd.DataFrame:
    """One row per system of a case, over its steady steps: system, staleness, rate, low, high, best, comparable.

    `rate` is responses trained on per second, `low` and `high` its 95% interval over seeds (NaN with one); `best` says
    that no other system is faster and no staler, or less stale and no slower (by more than half a percent, or 0.005),
    of those that are `comparable` (`rlsim.experiment.steadiness`).
    """
    steps = result.steps[result.steps["case"] == case]
    by_seed = means(steps, ["system", "seed"])["responses_per_s"]
    found = means(steps, ["system"])[["staleness_mean", "responses_per_s"]].reset_index()
    found.columns = pd.Index(["system", "staleness", "rate"])
    half = np.array([half_interval(by_seed.loc[system].tolist()) for system in found["system"]])
    found = found.assign(low=found["rate"] - half, high=found["rate"] + half)
    summary = result.summary()
    summary = summary[summary["case"] == case].set_index("system").loc[found["system"]]
    found = found.assign(comparable=comparable(summary).to_numpy())
    rivals = found[found["comparable"]]
    return found.assign(best=[bool(row["comparable"]) and not beaten(rivals, row) for _, row in found.iterrows()])


def beaten(systems: pd.DataFrame, one: pd.Series[Any]) -> bool:
    """Whether a system is faster and no staler than this one, or less stale and no slower."""
    ahead, older = systems["rate"] / float(one["rate"]) - 1, systems["staleness"] - float(one["staleness"])
    faster, fresher = (ahead > _SAME) & (older <= _SAME), (ahead >= -_SAME) & (older < -_SAME)
    return bool((faster | fresher).any())


def frontier_chart(frame: pd.DataFrame) -> Any:
    """A labelled point for each system (columns of `frontier`), with its interval; a line through the best ones."""
    ends = [float(value) for name in ("rate", "low", "high") for value in frame[name].dropna()]
    low, high = min(ends) - 0.08 * (max(ends) - min(ends)), max(ends) + 0.12 * (max(ends) - min(ends))
    if high <= low:
        low, high = 0.0, 2 * max(ends)
    most = max(float(frame["staleness"].max()), 0.1) * 1.22
    x_scale, y_scale = alt.Scale(domain=[0, most], nice=False), alt.Scale(domain=[max(low, 0.0), high], nice=False)
    across, down = (WIDTH - 70) / most, _HEIGHT / (high - max(low, 0.0))
    heights = ((high - frame["rate"]) * down).tolist()
    places = np.array(spread(heights))
    rows = frame.assign(
        label_at=frame["staleness"] + 9 / across,
        label_rate=high - places / down,
        moved=abs(places - heights) > _LINE,
        kind=np.where(frame["best"], _BEST, np.where(frame["comparable"], _BEATEN, _LATE)),
    )
    x = alt.X("staleness:Q", title="mean staleness of the responses trained on (weight updates)", scale=x_scale)
    y = alt.Y("rate:Q", title="responses trained on per second", scale=y_scale)
    hue = by_name(alt.Color, "kind", {kind: c for kind, c in _COLOURS.items() if kind in set(rows["kind"])})
    told = ["system:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("staleness", "rate", "low", "high"))]
    base = alt.Chart(data(rows))
    front = alt.Chart(data(rows[rows["best"]].sort_values(["staleness", "rate"]))).mark_line(
        color=_COLOURS[_BEST], interpolate="step-after", strokeDash=[5, 3], strokeWidth=1.3, opacity=0.7
    )
    to_label = base.mark_rule(color=GREY, strokeWidth=0.8).transform_filter("datum.moved")
    to_label = to_label.encode(x=x, y=y, x2="label_at:Q", y2=alt.Y2("label_rate:Q"))
    bars = base.mark_rule(strokeWidth=2.2).encode(x=x, y=alt.Y("low:Q", scale=y_scale), y2="high:Q", color=hue)
    bars = bars.transform_filter("isValid(datum.low)")
    dots = base.mark_point(size=80, filled=True, opacity=1).encode(x=x, y=y, color=hue, tooltip=told)
    texts = base.mark_text(align="left", dx=2, fontSize=12, color=INK).encode(
        x=alt.X("label_at:Q", scale=x_scale), y=alt.Y("label_rate:Q", scale=y_scale), text="system:N"
    )
    chart = alt.layer(front.encode(x=x, y=y), to_label, bars, dots, texts).properties(height=_HEIGHT)
    return finished(chart, description="Throughput of each system against the staleness of what it trains on")


def spread(heights: Sequence[float]) -> list[float]:
    """The heights (px) of labels of these points: a little above each, and none nearer than a line to another."""
    found, lowest = dict[int, float](), -math.inf
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        found[i] = lowest = max(heights[i] - _LINE / 2, lowest + _LINE)
    return [found[i] for i in range(len(heights))]


def continuous(result: Result, case: str) -> list[str]:
    """The systems of a case that generate without end: of what a step trains on, some was begun before its turn."""
    named = ["system", "seed", "step"]
    calls = result.calls[(result.calls["case"] == case) & (result.calls["kind"] == "generate")]
    begins = calls.rename(columns={"start_at": "begins_at"})[[*named, "begins_at"]]
    rows = result.responses[(result.responses["case"] == case) & ~result.responses["resumed"]]
    early = rows.merge(begins, on=named).query("trained and start_at < begins_at")
    return [system for system in result.manifest["systems"][case] if system in set(early["system"])]


def queue_lengths(result: Result, case: str, system: str, seed: int, at: Any) -> pd.DataFrame:
    """Prompts that are complete and not taken by a step, at each of these moments (s): columns at_s, prompts, system.

    A step takes a prompt when it is ready, or when the step begins to take prompts if that is later.
    """

    def mine(table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["case"] == case) & (table["system"] == system) & (table["seed"] == seed)]

    calls, rows = mine(result.calls), mine(result.responses)
    rows = rows[rows["trained"] | rows["paused"]]
    taken_by = rows["step"].map(calls[calls["kind"] == "generate"].set_index("step")["end_at"])
    late = rows["trained"] & (rows["scored_at"] > taken_by)  # scores of a whole batch come after it is taken
    scored_at = rows["scored_at"].mask(late)
    ready_at = pd.concat([rows["finish_at"], scored_at], axis=1).max(axis=1).where(rows["finish_at"].notna(), np.inf)
    prompts = rows.assign(ready_at=ready_at).groupby(["step", "position"], as_index=False)
    found = prompts.agg(ready_at=("ready_at", "max"), trained=("trained", "all"))
    begins = calls[calls["kind"] == "sync"].groupby("step")["end_at"].max()
    begins.index += 1
    left_at = found["ready_at"].clip(lower=found["step"].map(begins).fillna(0.0)).where(found["trained"], np.inf)
    return pd.DataFrame({"at_s": at, "prompts": covering(found["ready_at"], left_at, at), "system": system})


def queue_chart(rows: pd.DataFrame) -> Any:
    """A panel for each system: the prompts that wait (columns at_s, prompts, system), on the same axes."""
    systems = list(dict.fromkeys(rows["system"]))
    x_scale = exactly(0, float(rows["at_s"].max()))
    y_scale = alt.Scale(domain=[0, max(int(rows["prompts"].max()), 1)], nice=True)
    panels = []
    for system in systems:
        last = system == systems[-1]
        title = "time since the run began (s)" if last else None
        x = along(alt.X, "at_s", title, x_scale, labels=last, format=",~f", tickCount=10)
        y = along(alt.Y, "prompts", "prompts", y_scale, minExtent=40, format=",~f", tickCount=3)
        base = alt.Chart(data(rows[rows["system"] == system]), title=system).encode(x=x, y=y)
        area = base.mark_area(interpolate="step-after", color=SERIES[0], opacity=0.18)
        line = base.mark_line(interpolate="step-after", color=SERIES[0], strokeWidth=1.2)
        panels.append(alt.layer(area, line).properties(width=WIDTH - 80, height=56))
    chart = alt.vconcat(*panels, spacing=6)
    return finished(chart, description="Prompts that wait to be trained on, over time", fit=False)


def staleness_section(result: Result, setups: list[CaseSetup]) -> Section | None:
    """Throughput against staleness, and queues over time, case by case; None where no system trains on stale data."""
    blocks: list[Block] = []
    seeds = result.manifest["seeds"]
    for setup in setups:
        frame = frontier(result, setup.case)
        if (frame["staleness"] > 0).any():
            caption = (
                "Up is faster, left is less stale: mean staleness is the weight updates between a response's oldest "
                "token and the weights that it trains. Blue: no other system here is faster and no staler; the dashed "
                "line is the most that any reaches with so much staleness or less. What staleness does to learning is "
                "not simulated. "
            )
            caption += "Bars: 95% intervals over seeds." if len(seeds) > 1 else "One seed was run: no intervals."
            blocks.append(setup.figure("frontier", "Throughput against staleness", frontier_chart(frame), caption))
        blocks += _queues(result, setup, seeds[0])
    return Section("staleness", "What staleness buys", tuple(blocks)) if blocks else None


def _queues(result: Result, setup: CaseSetup, seed: int) -> list[Figure]:
    """The chart of one case's queues under one seed; none where no system generates without end."""
    systems = continuous(result, setup.case)
    if not systems:
        return []
    shown = systems[:_MOST_QUEUES]
    steps = result.steps[(result.steps["case"] == setup.case) & (result.steps["seed"] == seed)]
    until_s = steps.groupby("system")["step_time_s"].sum()
    queues = [
        queue_lengths(result, setup.case, name, seed, np.linspace(0.0, until_s[name], _MOMENTS + 1)) for name in shown
    ]
    caption = (
        "Prompts all of whose responses are complete and that no step has taken yet, for systems that generate without "
        f"end; seed {seed}, {_MOMENTS} moments of each run. It falls when a step takes its batch: where it falls to "
        "zero the step waits for more, where it keeps rising generation is faster than training, and prompts get "
        "staler while they wait."
    )
    if len(shown) < len(systems):
        caption += f" Left out: {', '.join(systems[_MOST_QUEUES:])}."
    return [setup.figure("queue", "Prompts that wait to be trained on", queue_chart(pd.concat(queues)), caption)]
