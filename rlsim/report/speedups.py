"""Which system is fastest: verdicts, speedups seed by seed, their charts and the table of means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from rlsim.experiment.backlog import comparable
from rlsim.experiment.result import Result
from rlsim.experiment.summary import means
from rlsim.formats import Columns, column, number, rate, relaxed, share, with_choice, with_half, with_interval, written
from rlsim.report.page import Block, Figure, Section, Table, Text
from rlsim.report.setups import CaseSetup
from rlsim.report.style import GREY, GRID, INK, WIDTH, bar_height, by_name, data, finished, label_angle, speedup_scale

#: Colour and shape of each verdict; shape too, for those who print in grey.
VERDICTS = {
    "faster": ("#0072B2", "triangle-right"),
    "not told apart": ("#7A7A7A", "circle"),
    "equal": ("#7A7A7A", "square"),
    "slower": ("#D55E00", "triangle-left"),
    "not comparable yet": ("#7A7A7A", "cross"),
    "baseline": ("#000000", "diamond"),
}
_COLUMNS = (
    "Means of the steady steps. responses/s: trained on, per second of step time; speedup and by tokens: responses and "
    "tokens (prompts counted) trained on per second, over the baseline's. ± is half the 95% interval of a mean over "
    "seeds. tokens/s: trained on, prompts counted. idle: share of GPU time. tail: share of busy GPU time that decodes "
    "at less than half of the full batch's throughput. wasted: share of the generated tokens that is not trained on. "
    "switches: changes of a node's TP, a step. bound: lower bound of generation over generation time; 100% is the best "
    "possible."
)


def verdict(speedup: float, *intervals: tuple[float, float]) -> str:
    """`faster` or `slower` than the baseline, `equal` in every seed, `not told apart` where an interval includes 1.

    Of the seeds and of the calibration's errors, those that are there: without any (one seed, no draws) the speedup
    alone decides. `no speedup` where there is none.
    """
    if pd.isna(speedup):
        return "no speedup"
    ends = [end for interval in intervals for end in interval if not pd.isna(end)] or [speedup]
    if min(ends) == max(ends) == 1:
        return "equal"
    return "faster" if min(ends) > 1 else "slower" if max(ends) < 1 else "not told apart"


def intervals(row: Mapping[Any, Any]) -> dict[str, tuple[float, float]]:
    """The intervals of a summary row's speedup, NaN where missing: over seeds, over the calibration's errors."""
    return {
        "seeds": (row["speedup_low"], row["speedup_high"]),
        "calibration": (row["speedup_model_low"], row["speedup_model_high"]),
    }


def verdicts(summary: pd.DataFrame, baseline: str) -> dict[str, str]:
    """The `verdict` on each system of one case's summary.

    It is `not comparable yet` where the system or the baseline put off, or came back to, too many prompts.
    """
    late = set(summary["system"][~comparable(summary["held_back"])])
    found = {baseline: "baseline"}
    for row in summary.to_dict("records"):
        told = verdict(row["speedup"], *intervals(row).values())
        found.setdefault(row["system"], "not comparable yet" if {row["system"], baseline} & late else told)
    return found


def speedups(summary: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One row per system of one case's summary: system, speedup, low, high (NaN with one seed), verdict."""
    rows = summary[["system", "speedup", "speedup_low", "speedup_high"]]
    rows = rows.rename(columns={"speedup_low": "low", "speedup_high": "high"}).dropna(subset=["speedup"])
    return rows.assign(verdict=rows["system"].map(verdicts(summary, baseline)))


def seed_speedups(result: Result, case: str) -> pd.DataFrame:
    """One row per system and seed of a case: system, seed, speedup (trained responses per second over baseline's)."""
    rates = means(result.steps[result.steps["case"] == case], ["system", "seed"])["responses_per_s"]
    baseline = result.manifest["baseline"]
    if baseline not in rates.index.get_level_values("system"):
        return pd.DataFrame({"system": [], "seed": [], "speedup": []})
    frame = rates.reset_index()
    speedup = frame["responses_per_s"] / frame["seed"].map(rates.loc[baseline])
    return frame.assign(speedup=speedup)[["system", "seed", "speedup"]]


def speedup_chart(frame: pd.DataFrame, by_seed: pd.DataFrame, baseline: str) -> Any:
    """A dot and interval per system (columns system, speedup, low, high, verdict), a tick per seed behind them."""
    order = frame["system"].tolist()
    y = alt.Y("system:N", sort=order, title=None, axis=alt.Axis(grid=True))
    scale = alt.Scale(zero=False, nice=True, padding=12)
    x = alt.X(
        "speedup:Q",
        title=f"responses trained on per second, over those of {baseline} (times)",
        scale=scale,
        axis=alt.Axis(tickCount=10),
    )
    present = [name for name in VERDICTS if name in set(frame["verdict"])]
    colours, shapes = ({name: VERDICTS[name][i] for name in present} for i in (0, 1))
    hue, shape = by_name(alt.Color, "verdict", colours), by_name(alt.Shape, "verdict", shapes)
    figures = [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("speedup", "low", "high")]
    told = ["system:N", *figures, "verdict:N"]
    base = alt.Chart(data(frame))
    one = alt.Chart(pd.DataFrame({"speedup": [1.0]})).mark_rule(color=INK, strokeDash=[4, 3]).encode(x=x)
    ticks = alt.Chart(data(by_seed)).mark_tick(color=GREY, opacity=0.7, thickness=1.2, height=11).encode(x=x, y=y)
    bars = base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=y, color=hue)
    bars = bars.transform_filter("isValid(datum.low)")
    dots = base.mark_point(size=95, filled=True, opacity=1).encode(x=x, y=y, color=hue, shape=shape, tooltip=told)
    layers = (one, ticks, bars, dots) if by_seed["seed"].nunique() > 1 else (one, dots)
    chart = alt.layer(*layers).properties(height=bar_height(len(order)))
    return finished(chart, description=f"Speedup of each system over {baseline}, with 95% intervals")


def cases_chart(summary: pd.DataFrame, baseline: str) -> Any:
    """Speedup of each system (rows) in each case (columns): number and colour."""
    rows = summary.dropna(subset=["speedup"]).assign(text=lambda s: s["speedup"].map("{:.2f}".format))
    rows = rows[["case", "system", "speedup", "text"]]
    systems, cases = (list(dict.fromkeys(rows[c])) for c in ("system", "case"))
    colour = alt.Color("speedup:Q", title="speedup", scale=speedup_scale(rows["speedup"])[0], legend=None)
    x = alt.X("case:N", sort=cases, title=None, axis=alt.Axis(orient="top", labelAngle=label_angle(cases, WIDTH - 160)))
    y = alt.Y("system:N", sort=systems, title=None)
    base = alt.Chart(data(rows)).encode(x=x, y=y)
    cells = base.mark_rect(stroke=GRID).encode(color=colour)
    texts = base.mark_text(color=INK, fontSize=12).encode(text="text:N")
    chart = (cells + texts).properties(height=max(len(systems), 2) * 24)
    return finished(chart, description=f"Speedup over {baseline} of each system in each case")


def speedup_section(result: Result, setups: list[CaseSetup]) -> Section:
    """Table and chart of the speedup over the baseline, case by case."""
    summary, baseline = result.summary(), str(result.manifest["baseline"])
    seeds = len(result.manifest["seeds"])
    blocks: list[Block] = []
    if len(setups) > 1 and summary["speedup"].notna().any():
        caption = (
            f"Responses that the system trains on per second over those of {baseline}, in each case: above 1 (blue) is "
            "faster, below 1 (orange) slower. Intervals stand in the tables below."
        )
        blocks.append(Figure("cases", "Speedup in every case", cases_chart(summary, baseline), caption))
    for setup in setups:
        rows = summary[summary["case"] == setup.case]
        compared = speedups(rows, baseline)
        if len(compared) > 1:
            chart = speedup_chart(compared, seed_speedups(result, setup.case), baseline)
            caption = _speedup_caption(baseline, seeds)
            blocks.append(setup.figure("speedups", f"Speedup over {baseline}", chart, caption))
        blocks.append(_comparison_table(rows, result, setup))
    blocks.append(Text(_COLUMNS))
    return Section("speedups", "Which system is fastest", tuple(blocks))


def _speedup_caption(baseline: str, seeds: int) -> str:
    text = f"Right of the dashed line a system trains on more responses per second than {baseline}. "
    if seeds == 1:
        return text + "One seed was run: no interval says how far another one would differ."
    return text + (
        f"Dot: geometric mean over {seeds} seeds, paired on the same responses; bar: its 95% interval (Student's t); "
        "thin ticks: single seeds. A bar that crosses the line leaves open which one is faster."
    )


def _comparison_table(rows: pd.DataFrame, result: Result, setup: CaseSetup) -> Table:
    baseline = str(result.manifest["baseline"])
    tuned = result.manifest["tuned"].get(setup.case, {})
    wasted = (rows["wasted_fraction"] > 0).any()
    columns: Columns = {
        "system": lambda row: with_choice(str(row["system"]), tuned),
        "responses/s": column("responses_per_s", rate),
        "speedup (95%)": lambda row: "baseline" if row["system"] == baseline else with_interval(row, "speedup", 3),
        "by tokens": column("token_speedup", number, 3),
        "step (s)": lambda row: with_half(row, "step_time_s"),
        "generation (s)": lambda row: with_half(row, "gen_time_s"),
        "tokens/s": column("tokens_per_s", number, 0),
        "idle": column("bubble_fraction", share, 1),
        "tail": column("tail_fraction", share, 1),
        **({"wasted": column("wasted_fraction", share, 1)} if wasted else {}),
        "switches": column("switches", number, 1),
        "bound": column("bound_share", share),
        **relaxed(rows),
    }
    texts = written(columns, rows.to_dict("records"))
    return Table(setup.named("Means over steps and seeds"), tuple(columns), texts)
