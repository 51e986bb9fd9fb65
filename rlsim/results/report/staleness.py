"""Throughput against staleness: what each system pays for its speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.experiment.result import Result
from rlsim.experiment.steadiness import comparable
from rlsim.experiment.summary import half_interval, means
from rlsim.results.report.page import Block, CaseSetup, Section
from rlsim.results.report.style import SERIES, WIDTH, chart

_HEIGHT, _LINE = 360, 15  # px: of the plot, of a line of text
_SAME = 0.005  # throughputs that differ by no more than this share are equal, as is such a difference of staleness
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


def staleness_section(result: Result, setups: list[CaseSetup]) -> Section | None:
    """Throughput against staleness, case by case; None where no system trains on stale data."""
    blocks: list[Block] = []
    for setup in setups:
        frame = frontier(result, setup.case)
        if (frame["staleness"] > 0).any():
            blocks.append(setup.figure("frontier", frontier_chart(frame), seeds=len(result.manifest["seeds"])))
    return Section("staleness", "What staleness buys", tuple(blocks)) if blocks else None
