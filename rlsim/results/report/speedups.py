"""Which system is fastest: verdicts, speedups seed by seed, their charts and the table of means; and what each pays for
its speed: throughput against staleness."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.formats import Table, columns_of, written
from rlsim.experiment.result import Result
from rlsim.experiment.steadiness import comparable
from rlsim.experiment.summary import half_interval, means
from rlsim.experiment.verdict import RATES, Verdict, judge, outcome
from rlsim.results.report.page import Block, CaseSetup, Text, figure
from rlsim.results.report.style import SERIES, WIDTH, chart

#: Colour and shape of each verdict; shape too, for those who print in grey.
VERDICTS: dict[str, tuple[str, str]] = {
    "faster": ("#0072B2", "triangle-right"),
    "not told apart": ("#7A7A7A", "circle"),
    "as fast": ("#7A7A7A", "square"),
    "slower": ("#D55E00", "triangle-left"),
    "not comparable": ("#7A7A7A", "cross"),
    "baseline": ("#000000", "diamond"),
}


def speedups(verdict: Verdict) -> pd.DataFrame:
    """One row per system that has a ratio, the best first: system, speedup, low, high (NaN where missing), verdict."""
    rows = [(row.system, row.ratio, row.low, row.high, row.outcome) for row in verdict.rows if row.outcome in VERDICTS]
    return pd.DataFrame(rows, columns=["system", "speedup", "low", "high", "verdict"])


def seed_speedups(result: Result, case: str, unit: str = "responses") -> pd.DataFrame:
    """One row per system and seed of a case: system, seed, speedup (what is trained on per second over baseline's)."""
    rates = means(result.steps[result.steps["case"] == case], ["system", "seed"])[RATES[unit]]
    baseline = result.manifest["baseline"]
    if baseline not in rates.index.get_level_values("system"):
        return pd.DataFrame({"system": [], "seed": [], "speedup": []})
    frame = rates.rename("speedup").reset_index()
    return frame.assign(speedup=frame["speedup"] / frame["seed"].map(rates.loc[baseline]))


def ratios_chart(frame: pd.DataFrame, title: str, told: list[str]) -> Any:
    """A panel for each kind of ratio: its dots and intervals, in the colour of what they say.

    `frame` has columns `panel`, `system` (a row's name), `unsteady`, `speedup`, `low` and `high`; `title` stands above
    all, and what is `told` below it.
    """
    frame = frame.assign(verdict=[outcome(*figures) for figures in frame[["speedup", "low", "high"]].to_numpy()])
    frame.loc[frame["unsteady"], "verdict"] = "not comparable"
    frame = frame[frame["verdict"].isin(VERDICTS)]
    layers = _intervals(frame, None, title="times")["layer"]
    panels, systems = frame["panel"].unique().tolist(), frame["system"].unique()
    return chart("ratios", frame=frame, layers=layers, panels=panels, systems=systems, heading=title, told=told)


def _intervals(frame: pd.DataFrame, by_seed: pd.DataFrame | None, **known: Any) -> Any:
    """Dots and intervals in the colours of verdicts, with a tick per seed behind them if there are several."""
    systems = list(dict.fromkeys(frame["system"]))
    colours, shapes = ({name: look[i] for name, look in _looks(frame).items()} for i in (0, 1))
    known = {"description": "", **known, "systems": systems, "colours": colours, "shapes": shapes}
    return chart("intervals", frame=frame, by_seed=by_seed, **known)


def _looks(frame: pd.DataFrame) -> dict[str, tuple[str, str]]:
    return {name: look for name, look in VERDICTS.items() if name in set(frame["verdict"])}


def cases_chart(verdicts: Mapping[str, Verdict], baseline: str) -> Any:
    """Speedup of each system (rows) in each case (columns): the number, and the verdict as colour."""
    frame = pd.concat([speedups(verdict).assign(case=case) for case, verdict in verdicts.items()])
    frame = frame.assign(text=frame["speedup"].map("{:.2f}".format))[["case", "system", "verdict", "text"]]
    systems, names = (list(dict.fromkeys(frame[c])) for c in ("system", "case"))
    colours = {name: look[0] for name, look in _looks(frame).items()}
    return chart("cases", frame=frame, systems=systems, names=names, colours=colours, baseline=baseline)


def speedup_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """Table and chart of the speedup over the baseline, case by case."""
    summary, baseline = result.summary(), str(result.manifest["baseline"])
    seeds, headings = len(result.manifest["seeds"]), set[str]()
    by_case = {setup.case: judge(summary[summary["case"] == setup.case], baseline) for setup in setups}
    if len(setups) > 1 and summary["speedup"].notna().any():
        yield figure("cases", cases_chart(by_case, baseline), baseline=baseline)
    for setup in setups:
        rows, verdict = summary[summary["case"] == setup.case], by_case[setup.case]
        if len(speedups(verdict)) > 1:
            drawn = _intervals(
                speedups(verdict),
                seed_speedups(result, setup.case, verdict.unit),
                title=f"{verdict.unit} trained on per second, over those of {baseline} (times)",
                description=f"Speedup of each system over {baseline}, with 95% intervals",
            )
            over = next((row.over for row in verdict.rows if row.over), "")
            other = ", by tokens as some train on other lengths" * (verdict.unit == "tokens")
            yield setup.figure("speedups", drawn, verdict=verdict, seeds=seeds, over=over, other=other)
        tuned = result.manifest["tuned"].get(setup.case, {})
        columns = written("report", rows, tuned=tuned, verdict=verdict)
        yield Table.of(setup.named("Means over steps and seeds"), columns, 5)
        headings |= {*columns}
    meanings = {column.heading: column.meaning for column in columns_of("report") if column.meaning}
    said = ". ".join(f"{heading}: {meaning}" for heading, meaning in meanings.items() if heading in headings)
    yield Text(f"Means of the steady steps. {said}.")


_HEIGHT, _LINE = 360, 15  # px: of the plot, of a line of text
_SAME = 0.005  # throughputs that differ by no more than this share are equal, as is such a difference of staleness
_BEST, _BEATEN = "no other is faster and no staler", "another is faster and no staler"
_LATE = "not comparable: not steady"
_COLOURS = {_BEST: SERIES[0], _BEATEN: "#7A7A7A", _LATE: "#C4C4C4"}


def frontier(result: Result, case: str) -> pd.DataFrame:
    """One row per system of a case, over its steady steps: system, staleness, rate, low, high, unit, comparable, best.

    `rate` is what is trained on per second in the `unit` of the verdict, `low` and `high` its 95% interval over seeds
    (NaN with one); `best` says that no other system is faster and no staler, or less stale and no slower (by more than
    half a percent, or 0.005), of those that are `comparable` (`rlsim.experiment.steadiness`).
    """
    steps, summary = result.steps[result.steps["case"] == case], result.summary()
    summary = summary[summary["case"] == case]
    unit = judge(summary, str(result.manifest["baseline"])).unit
    by_seed = means(steps, ["system", "seed"])[RATES[unit]]
    found = means(steps, ["system"])[["staleness_mean", RATES[unit]]].reset_index()
    found.columns = pd.Index(["system", "staleness", "rate"])
    half = np.array([half_interval(by_seed.loc[system].tolist()) for system in found["system"]])
    found = found.assign(low=found["rate"] - half, high=found["rate"] + half)
    summary = summary.set_index("system").loc[found["system"]]
    found = found.assign(unit=unit, comparable=comparable(summary).to_numpy())
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
    known = {"low": low, "high": high, "most": most, "height": _HEIGHT, "unit": frame["unit"].iloc[0]}
    return chart("frontier", frame=frame, best=best, looks=looks, colours=[*_COLOURS.values()], **known)


def spread(heights: Sequence[float]) -> list[float]:
    """The heights (px) of labels of these points: a little above each, and none nearer than a line to another."""
    found, lowest = dict[int, float](), -math.inf
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        found[i] = lowest = max(heights[i] - _LINE / 2, lowest + _LINE)
    return [found[i] for i in range(len(heights))]


def staleness_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """Throughput against staleness, case by case; nothing where no system trains on stale data."""
    for setup in setups:
        frame = frontier(result, setup.case)
        if (frame["staleness"] > 0).any():
            yield setup.figure("frontier", frontier_chart(frame), seeds=len(result.manifest["seeds"]))
