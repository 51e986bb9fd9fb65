"""Which system is fastest: verdicts, speedups seed by seed, their charts and the table of means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from rlsim.base.formats import (
    Columns,
    column,
    number,
    rate,
    relaxed,
    share,
    with_choice,
    with_half,
    with_model,
    written,
)
from rlsim.experiment.columns import ACTED
from rlsim.experiment.result import Result
from rlsim.experiment.summary import means
from rlsim.results.comparison.verdict import RATES, Verdict, judge, outcome
from rlsim.results.report.page import Block, Figure, Section, Table, Text
from rlsim.results.report.setups import CaseSetup
from rlsim.results.report.style import (
    GREY,
    GRID,
    INK,
    LABEL_LIMIT,
    WIDTH,
    along,
    bar_height,
    by_name,
    data,
    finished,
    label_angle,
)

#: Colour and shape of each verdict; shape too, for those who print in grey.
VERDICTS: dict[str, tuple[str, str]] = {
    "faster": ("#0072B2", "triangle-right"),
    "not told apart": ("#7A7A7A", "circle"),
    "as fast": ("#7A7A7A", "square"),
    "slower": ("#D55E00", "triangle-left"),
    "not comparable": ("#7A7A7A", "cross"),
    "baseline": ("#000000", "diamond"),
}
#: What the columns of the table of means are, by their headings.
_MEANINGS = {
    "responses/s": "trained on, per second of step time",
    "speedup": "responses trained on per second, over the baseline's",
    "by tokens": "the same of tokens, prompts counted",
    "95% interval": "of the speedup, or by tokens where systems train on other lengths; over seeds and, where these "
    "were drawn, over the calibration's errors; it decides the verdict",
    "step (s)": "± is half the 95% interval of a mean, by how far its own steps differ in all seeds; brackets: the "
    "95% interval over the calibration's errors, where they were drawn",
    "tokens/s": "trained on, prompts counted",
    "idle": "share of GPU time",
    "tail": "share of busy GPU time that decodes at less than half of the full batch's throughput",
    "wasted": "share of the generated tokens that is not trained on",
    "switches": "changes of a node's TP, a step",
    "moved": "responses moved from one replica to another, a step",
    "released": "replicas given up before the end of generation, a step",
    "aborted": "responses dropped unfinished, a step",
    "bound": "lower bound of generation over generation time; 100% is the best possible",
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


def speedup_chart(verdict: Verdict, by_seed: pd.DataFrame) -> Any:
    """A dot and the interval that decides per system, in the colour of the verdict; a tick per seed behind them."""
    frame = speedups(verdict)
    order = frame["system"].tolist()
    title = f"{verdict.unit} trained on per second, over those of {verdict.baseline} (times)"
    chart = _intervals(frame, title, by_seed).properties(height=bar_height(len(order)))
    return finished(chart, description=f"Speedup of each system over {verdict.baseline}, with 95% intervals")


def ratios_chart(frame: pd.DataFrame, title: str, told: list[str]) -> Any:
    """A panel for each kind of ratio: its dots and intervals, in the colour of what they say.

    `frame` has columns `panel`, `system` (a row's name), `unsteady`, `speedup`, `low` and `high`; `title` stands above
    all, and what is `told` below it.
    """
    frame = frame.assign(verdict=[outcome(*figures) for figures in frame[["speedup", "low", "high"]].to_numpy()])
    frame.loc[frame["unsteady"], "verdict"] = "not comparable"
    frame = frame[frame["verdict"].isin(VERDICTS)]
    rows, panels = frame["system"].nunique(), frame["panel"].unique().tolist()
    each = _intervals(frame, "times").properties(width=(WIDTH - LABEL_LIMIT) // len(panels), height=bar_height(rows))
    header = alt.Header(title=None, labelColor=INK, labelFontSize=12)
    chart = each.facet(alt.Column("panel:N", sort=panels, header=header), spacing=12)
    chart.title = alt.TitleParams(title, subtitle=told, anchor="start", offset=12)
    return finished(chart, description=title, fit=False)


def _intervals(frame: pd.DataFrame, title: str, by_seed: pd.DataFrame | None = None) -> Any:
    """Dots and intervals in the colours of verdicts, with a tick per seed behind them if there are several."""
    y = alt.Y("system:N", sort=list(dict.fromkeys(frame["system"])), title=None, axis=alt.Axis(grid=True))
    scale = alt.Scale(zero=False, nice=True, padding=12)
    x = along(alt.X, "speedup", title, scale, tickCount=10 if by_seed is not None else 4)
    present = {name: look for name, look in VERDICTS.items() if name in set(frame["verdict"])}
    colours, shapes = ({name: look[i] for name, look in present.items()} for i in (0, 1))
    hue, shape = by_name(alt.Color, "verdict", colours), by_name(alt.Shape, "verdict", shapes)
    figures = [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("speedup", "low", "high")]
    told = ["system:N", *figures, "verdict:N"]
    base = alt.Chart(data(frame))
    one = base.transform_calculate(one="1").mark_rule(color=INK, strokeDash=[4, 3]).encode(x="one:Q")
    behind = []
    if by_seed is not None and by_seed["seed"].nunique() > 1:
        ticks = alt.Chart(data(by_seed)).mark_tick(color=GREY, opacity=0.7, thickness=1.2, height=11)
        behind = [ticks.encode(x=x, y=y)]
    bars = base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=y, color=hue)
    bars = bars.transform_filter("isValid(datum.low)")
    dots = base.mark_point(size=95, filled=True, opacity=1).encode(x=x, y=y, color=hue, shape=shape, tooltip=told)
    return alt.layer(one, *behind, *([bars] if frame["low"].notna().any() else []), dots)


def cases_chart(verdicts: Mapping[str, Verdict], baseline: str) -> Any:
    """Speedup of each system (rows) in each case (columns): the number, and the verdict as colour."""
    rows = pd.concat([speedups(verdict).assign(case=case) for case, verdict in verdicts.items()])
    rows = rows.assign(text=rows["speedup"].map("{:.2f}".format))[["case", "system", "verdict", "text"]]
    systems, cases = (list(dict.fromkeys(rows[c])) for c in ("system", "case"))
    colours = {name: look[0] for name, look in VERDICTS.items() if name in set(rows["verdict"])}
    x = alt.X("case:N", sort=cases, title=None, axis=alt.Axis(orient="top", labelAngle=label_angle(cases, WIDTH - 160)))
    y = alt.Y("system:N", sort=systems, title=None)
    base = alt.Chart(data(rows)).encode(x=x, y=y)
    cells = base.mark_rect(stroke=GRID, opacity=0.35).encode(color=by_name(alt.Color, "verdict", colours))
    texts = base.mark_text(color=INK, fontSize=12).encode(text="text:N")
    chart = (cells + texts).properties(height=max(len(systems), 2) * 24)
    return finished(chart, description=f"Speedup over {baseline} of each system in each case")


def speedup_section(result: Result, setups: list[CaseSetup]) -> Section:
    """Table and chart of the speedup over the baseline, case by case."""
    summary, baseline = result.summary(), str(result.manifest["baseline"])
    seeds = len(result.manifest["seeds"])
    blocks: list[Block] = []
    by_case = {setup.case: judge(summary[summary["case"] == setup.case], baseline) for setup in setups}
    if len(setups) > 1 and summary["speedup"].notna().any():
        caption = (
            f"What the system trains on per second over that of {baseline}, in each case; colour: the verdict, by the "
            "intervals in the tables below."
        )
        blocks.append(Figure("cases", "Speedup in every case", cases_chart(by_case, baseline), caption))
    for setup in setups:
        rows, verdict = summary[summary["case"] == setup.case], by_case[setup.case]
        if len(speedups(verdict)) > 1:
            chart = speedup_chart(verdict, seed_speedups(result, setup.case, verdict.unit))
            caption = _speedup_caption(verdict, seeds)
            blocks.append(setup.figure("speedups", f"Speedup over {baseline}", chart, caption))
        blocks.append(_comparison_table(rows, verdict, result, setup))
    shown = {heading for block in blocks if isinstance(block, Table) for heading in block.headings}
    said = ". ".join(f"{heading}: {meaning}" for heading, meaning in _MEANINGS.items() if heading in shown)
    blocks.append(Text(f"Means of the steady steps. {said}."))
    return Section("speedups", "Which system is fastest", tuple(blocks))


def _speedup_caption(verdict: Verdict, seeds: int) -> str:
    text = f"Right of the dashed line a system trains on more {verdict.unit} per second than {verdict.baseline}"
    text += ", by tokens as some train on other lengths. " if verdict.unit == "tokens" else ". "
    over = next((row.over for row in verdict.rows if row.over), "")
    if not over:
        return text + "One seed was run: no interval says how far another one would differ."
    return text + (
        f"Dot: geometric mean over {seeds} seeds, paired on the same responses; bar: its 95% interval over {over}; "
        "thin ticks: single seeds. Colours follow the bar: one that crosses the line leaves open which is faster."
    )


def _comparison_table(rows: pd.DataFrame, verdict: Verdict, result: Result, setup: CaseSetup) -> Table:
    tuned = result.manifest["tuned"].get(setup.case, {})
    wasted = (rows["wasted_fraction"] > 0).any()
    columns: Columns = {
        "system": lambda row: with_choice(str(row["system"]), tuned),
        "responses/s": column("responses_per_s", rate),
        "speedup": column("speedup", number, 3),
        "by tokens": column("token_speedup", number, 3),
        "95% interval": lambda row: verdict[row["system"]].interval,
        "verdict": lambda row: verdict[row["system"]].outcome,
        "step (s)": lambda row: with_model(row, "step_time_s"),
        "generation (s)": lambda row: with_half(row, "gen_time_s"),
        "tokens/s": column("tokens_per_s", number, 0),
        "idle": column("bubble_fraction", share, 1),
        "tail": column("tail_fraction", share, 1),
        **({"wasted": column("wasted_fraction", share, 1)} if wasted else {}),
        **{name: column(name, number, 1) for name in ACTED if (rows[name] > 0).any()},
        "bound": column("bound_share", share),
        **relaxed(rows),
    }
    texts = written(columns, rows.to_dict("records"))
    return Table(setup.named("Means over steps and seeds"), tuple(columns), texts, words=frozenset({5}))
