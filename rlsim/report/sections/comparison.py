"""Which system is fastest, what a step consists of, where the GPU time went, how long the responses are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlsim.formats import is_missing, number, rate, share, with_interval
from rlsim.report.charts.comparison import batch_parts_chart, cases_chart, gpu_time_chart, speedup_chart
from rlsim.report.charts.lengths import lengths_chart
from rlsim.report.frames.comparison import batch_parts, gpu_shares, seed_speedups, speedups
from rlsim.report.frames.lengths import trained_lengths
from rlsim.report.page import Block, Figure, Section, Table, Text
from rlsim.report.palette import PARTS, TAIL, WAITING, kind_colours

if TYPE_CHECKING:
    from rlsim.experiment.result import Result
    from rlsim.report.setups import CaseSetup


_COLUMNS = (
    "Means of the steady steps. responses/s: trained on, per second of step time; speedup and by tokens: responses and "
    "tokens (prompts counted) trained on per second, over the baseline's. ± is half the 95% interval of a mean over "
    "seeds. tokens/s: trained on, prompts counted. idle: share of GPU time. tail: share of busy GPU time that decodes "
    "at less than half of the full batch's throughput. wasted: share of the generated tokens that is not trained on. "
    "switches: changes of a node's TP, a step. bound: lower bound of generation over generation time; 100% is the best "
    "possible."
)


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
            title = setup.named(f"Speedup over {baseline}")
            blocks.append(Figure(setup.figure("speedups"), title, chart, _speedup_caption(baseline, seeds)))
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
    wasted = ["wasted"] if (rows["wasted_fraction"] > 0).any() else []
    headings = ["system", "responses/s", "speedup (95%)", "by tokens", "step (s)", "generation (s)"]
    headings += ["tokens/s", "idle", "tail", *wasted, "switches", "bound"]
    texts = []
    for row in rows.to_dict("records"):
        name = str(row["system"])
        speedup = "baseline" if name == baseline else with_interval(row, "speedup", 3)
        cells = [f"{name} ({tuned[name]})" if name in tuned else name, rate(row["responses_per_s"]), speedup]
        cells += [number(row["token_speedup"], 3)]
        cells += [_with_half(row, "step_time_s"), _with_half(row, "gen_time_s"), number(row["tokens_per_s"], 0)]
        cells += [share(row["bubble_fraction"], 1), share(row["tail_fraction"], 1)]
        cells += [share(row["wasted_fraction"], 1) for _ in wasted]
        texts.append([*cells, number(row["switches"], 1), share(row["bound_share"])])
    return Table(setup.named("Means over steps and seeds"), tuple(headings), texts)


def step_section(result: Result, setups: list[CaseSetup]) -> Section:
    """What a batch takes, part by part, case by case."""
    summary = result.summary()
    blocks: list[Block] = []
    for setup in setups:
        parts = batch_parts(summary[summary["case"] == setup.case], setup.batch)
        caption = (
            f"Mean over seeds and steady steps, for the {setup.batch:,} responses of a whole batch. This is the step "
            "time; for systems that train on another number of responses it is scaled to a whole batch. Each second "
            "counts once, in the order of the legend: first generation that the step waited for, its own or that of "
            "another step that holds back GPUs or weights."
        )
        if WAITING in set(parts["part"]):
            caption += " Waiting: no call of any step ran."
        chart = batch_parts_chart(parts, setup.batch)
        blocks.append(Figure(setup.figure("step"), setup.named("Mean time of a batch"), chart, caption))
        present = [part for part in PARTS if part in set(parts["part"])]
        wide = parts.pivot_table(index="system", columns="part", values="time_s", sort=False)[present]
        rows = [[str(name), *(f"{v:.2f}" for v in row), f"{row.sum():.2f}"] for name, row in wide.fillna(0).iterrows()]
        headings = ("system", *present, "batch")
        blocks.append(Table(setup.named("Parts of a batch's time in numbers (seconds)"), headings, rows, folded=True))
    return Section("step", "What a step consists of", tuple(blocks))


def gpu_section(result: Result, setups: list[CaseSetup]) -> Section:
    """Shares of the GPU-seconds by kind of work, the bubble included, case by case."""
    shares = gpu_shares(result, {setup.case: setup.gpus for setup in setups})
    colours = kind_colours({*result.spans["kind"], TAIL}, result.calls)
    blocks: list[Block] = []
    for setup in setups:
        mine = shares[shares["case"] == setup.case]
        caption = (
            f"All seconds of all {setup.gpus:,} GPUs, over all seeds and steady steps, make 100%. Idle (bubble) is "
            "time in which nothing runs on a GPU. Decode in the tail: it decodes at less than half of the throughput "
            "that it reached with its full batch in the same step."
        )
        chart = gpu_time_chart(mine, colours)
        blocks.append(Figure(setup.figure("gpu-time"), setup.named("GPU-seconds by kind of work"), chart, caption))
        present = [kind for kind in colours if kind in set(mine["kind"])]
        wide = mine.pivot_table(index="system", columns="kind", values="share", sort=False)[present].fillna(0)
        rows = [[str(name), *(f"{value:.1%}" for value in row)] for name, row in wide.iterrows()]
        blocks.append(Table(setup.named("Shares in numbers"), ("system", *present), rows, folded=True))
    return Section("gpu-time", "Where the GPU time went", tuple(blocks))


def lengths_section(result: Result, setups: list[CaseSetup]) -> Section:
    """The response lengths that were trained on, against the cap."""
    blocks: list[Block] = []
    for setup in setups:
        groups = trained_lengths(result, setup.case)
        if not groups:
            blocks.append(Text(setup.named("No response was trained on")))
            continue
        caption = (
            "Height of the line at a length: share of the responses that steady steps trained on that are "
            "at least that long. "
            f"The dashed line is the cap of {setup.cap_tokens:,} tokens; the dot on it is the share that reached it. "
        )
        if len(groups) == 1:
            caption += f"All systems trained on the same {len(groups[0].tokens):,} responses."
        else:
            caption += "Systems trained on different responses, as they choose or drop some; the dot is of "
            caption += f"{groups[0].systems[0]}."
        chart = lengths_chart(groups, setup.cap_tokens)
        blocks.append(Figure(setup.figure("lengths"), setup.named("Response lengths"), chart, caption))
        rows = [
            [
                ", ".join(group.systems),
                f"{len(group.tokens):,}",
                f"{group.tokens.mean():,.0f}",
                *(f"{pd.Series(group.tokens).quantile(q):,.0f}" for q in (0.5, 0.9, 0.99)),
                f"{group.tokens[-1]:,}",
                f"{group.share_at(setup.cap_tokens):.2%}",
            ]
            for group in groups
        ]
        headings = ("system", "responses", "mean", "median", "p90", "p99", "longest", "at the cap")
        blocks.append(Table(setup.named("Lengths in numbers (tokens)"), headings, rows, folded=True))
    return Section("lengths", "How long the responses are", tuple(blocks))


def _with_half(row: Mapping[Hashable, Any], column: str) -> str:
    half = row[f"{column}_half"]
    return number(row[column], 1) + ("" if is_missing(half) else f" ±{half:.1f}")
