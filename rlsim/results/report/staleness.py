"""Throughput against staleness: what each system pays for its speed, and how many prompts wait to be trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.experiment.result import Result
from rlsim.experiment.steadiness import comparable
from rlsim.experiment.summary import half_interval, means
from rlsim.results.report.generation import covering
from rlsim.results.report.page import Block, CaseSetup, Figure, Section
from rlsim.results.report.style import SERIES, WIDTH, chart, part

_HEIGHT, _LINE = 360, 15  # px: of the plot, of a line of text
_SAME = 0.005  # throughputs that differ by no more than this share are equal, as is such a difference of staleness
_MOMENTS = 400
_MOST_QUEUES = 8
_BEST, _BEATEN = "no other is faster and no staler", "another is faster and no staler"
_LATE = "not comparable: not steady"
_PANEL: Mapping[str, Any] = {
    "width": WIDTH - 80, "height": 56, "column": "prompts", "y_title": "prompts", "colour": SERIES[0], "stroke": 1.2,
    "extent": 40, "ticks": 3, "switches": (),
}  # fmt: skip
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
    low = max(low, 0.0)
    down = _HEIGHT / (high - low)
    heights = ((high - frame["rate"]) * down).tolist()
    places = np.array(spread(heights))
    frame = frame.assign(
        label_at=frame["staleness"] + 9 * most / (WIDTH - 70),
        label_rate=high - places / down,
        moved=abs(places - heights) > _LINE,
        kind=np.where(frame["best"], _BEST, np.where(frame["comparable"], _BEATEN, _LATE)),
    )
    best = frame[frame["best"]].sort_values(["staleness", "rate"])
    looks = {kind: colour for kind, colour in _COLOURS.items() if kind in set(frame["kind"])}
    known = {"low": low, "high": high, "most": most, "height": _HEIGHT}
    return chart("frontier", frame=frame, best=best, looks=looks, colours=[*_COLOURS.values()], **known)


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
    most = max(int(rows["prompts"].max()), 1)
    panels = [
        part(
            "sequences",
            frame=rows[rows["system"] == system],
            title=system,
            x_title="time since the run began (s)" if system == systems[-1] else None,
            y_scale={"domain": [0, most], "nice": True},
            until_s=float(rows["at_s"].max()),
            **_PANEL,
        )
        for system in systems
    ]
    what = "Prompts that wait to be trained on, over time"
    return chart("panels", panels=panels, spacing=6, colours=..., description=what)


def staleness_section(result: Result, setups: list[CaseSetup]) -> Section | None:
    """Throughput against staleness, and queues over time, case by case; None where no system trains on stale data."""
    blocks: list[Block] = []
    seeds = result.manifest["seeds"]
    for setup in setups:
        frame = frontier(result, setup.case)
        if (frame["staleness"] > 0).any():
            blocks.append(setup.figure("frontier", frontier_chart(frame), seeds=len(seeds)))
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
    told = {"seed": seed, "moments": _MOMENTS, "more": ", ".join(systems[_MOST_QUEUES:])}
    return [setup.figure("queue", queue_chart(pd.concat(queues)), **told)]
