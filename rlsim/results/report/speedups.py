"""Which system is fastest: verdicts, speedups seed by seed, their charts and the table of means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rlsim.base.formats import columns_of, written
from rlsim.experiment.result import Result
from rlsim.experiment.summary import means
from rlsim.results.comparison.verdict import RATES, Verdict, judge, outcome
from rlsim.results.report.page import Block, CaseSetup, Section, Table, Text, figure
from rlsim.results.report.style import chart

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


def speedup_section(result: Result, setups: list[CaseSetup]) -> Section:
    """Table and chart of the speedup over the baseline, case by case."""
    summary, baseline = result.summary(), str(result.manifest["baseline"])
    seeds = len(result.manifest["seeds"])
    blocks: list[Block] = []
    by_case = {setup.case: judge(summary[summary["case"] == setup.case], baseline) for setup in setups}
    if len(setups) > 1 and summary["speedup"].notna().any():
        blocks.append(figure("cases", cases_chart(by_case, baseline), baseline=baseline))
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
            blocks.append(setup.figure("speedups", drawn, verdict=verdict, seeds=seeds, over=over, other=other))
        tuned = result.manifest["tuned"].get(setup.case, {})
        columns = written("report", rows, tuned=tuned, verdict=verdict)
        blocks.append(Table.of(setup.named("Means over steps and seeds"), columns, 5))
    shown = {heading for block in blocks if isinstance(block, Table) for heading in block.headings}
    meanings = {column.heading: column.meaning for column in columns_of("report") if column.meaning}
    said = ". ".join(f"{heading}: {meaning}" for heading, meaning in meanings.items() if heading in shown)
    blocks.append(Text(f"Means of the steady steps. {said}."))
    return Section("speedups", "Which system is fastest", tuple(blocks))
