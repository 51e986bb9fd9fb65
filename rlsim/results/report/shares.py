"""What a batch takes part by part, where the GPU-seconds went, and where the time of trajectories goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from rlsim.base.formats import Table, written
from rlsim.experiment.frames import uncovered
from rlsim.experiment.parts import PARTS_OF_A_STEP
from rlsim.experiment.result import Result
from rlsim.experiment.summary import means
from rlsim.results.report.page import Block, CaseSetup
from rlsim.results.report.style import BUBBLE, GREY, PARTS, SERIES, TAIL, WAITING, chart, kind_colours
from rlsim.sim.recorder import Span

RUN = ["case", "system", "seed"]
_PART_COLUMNS = (*PARTS_OF_A_STEP, "waiting_time_s")  # of the summary, in the order of `PARTS`
_WAITING = 1e-6  # of a step: less is rounding


def batch_parts(summary: pd.DataFrame, batch: int) -> pd.DataFrame:
    """One row per system and part of its time, in seconds: system, part, time_s.

    The parts add up to the time in which a system trains on `batch` responses: the mean step time, if that is what a
    step trains on. `waiting` is the time in which no call of any step ran; the part is there only where there is any.
    """
    rows = []
    for row in summary.to_dict("records"):
        scale = batch / row["trained"]
        times = {part: scale * float(row[column]) for part, column in zip(PARTS, _PART_COLUMNS, strict=True)}
        if row["waiting_time_s"] <= _WAITING * row["step_time_s"]:
            del times[WAITING]
        rows += [{"system": row["system"], "part": part, "time_s": time} for part, time in times.items()]
    return pd.DataFrame(rows)


def gpu_shares(result: Result, gpus: Mapping[str, int]) -> pd.DataFrame:
    """One row per case, system and kind of work, the bubble among them: case, system, kind, share (of GPU-seconds).

    `gpus` is the number of GPUs by case. The shares of a system add up to 1 over the steady steps of all seeds; time on
    shared GPUs counts only where they do nothing else, as in `bubble_fraction`. Decoding in the tail is a kind of its
    own.
    """
    steps = result.steps.assign(end_at=result.steps.groupby(RUN)["step_time_s"].cumsum())
    steps = steps.assign(start_at=steps["end_at"] - steps["step_time_s"])[steps["steady"]]
    window = steps.groupby(RUN, sort=False, as_index=False).agg(first_at=("start_at", "min"), last_at=("end_at", "max"))
    spans = exclusive(result.spans).merge(window, on=RUN)
    held_s = (spans[["end_at", "last_at"]].min(axis=1) - spans[["start_at", "first_at"]].max(axis=1)).clip(lower=0)
    kinds = spans.assign(gpu_s=held_s * spans["gpus"]).groupby(["case", "system", "kind"], sort=False, as_index=False)
    busy = kinds["gpu_s"].sum()
    found = means(steps, ["case", "system"])[["bubble_fraction", "tail_fraction"]]
    found["time_s"] = steps.groupby(["case", "system"], sort=False)["step_time_s"].sum()
    rows = []
    for case, system, bubble, tail, time_s in found.reset_index().itertuples(index=False):
        mine = busy[(busy["case"] == case) & (busy["system"] == system)]
        shares = dict(zip(mine["kind"], mine["gpu_s"] / (gpus[case] * time_s), strict=True))
        if tail:
            shares[TAIL] = tail * (1.0 - bubble)
            shares["decode"] = max(shares["decode"] - shares[TAIL], 0.0)
        shares[BUBBLE] = max(1.0 - sum(shares.values()), 0.0)
        rows += [{"case": case, "system": system, "kind": kind, "share": value} for kind, value in shares.items()]
    return pd.DataFrame(rows)


def exclusive(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans, those on shared GPUs cut down to the time in which their GPUs did nothing else."""
    if not spans["shared"].any():
        return spans
    held = [tuple(range(first, first + count)) for first, count in zip(spans["gpu"], spans["gpus"], strict=True)]
    runs = spans.assign(gpus=pd.Series(held, spans.index)).groupby(RUN, sort=False)
    cut = {
        run: pd.DataFrame(uncovered([Span(*row) for row in rows[[*Span._fields]].itertuples(index=False)]))
        for run, rows in runs
    }
    found = pd.concat(cut, names=RUN).reset_index(RUN)
    return found.assign(gpu=found["gpus"].str[0], gpus=found["gpus"].str.len())


def stacked(bars: pd.DataFrame, ends: pd.DataFrame, colours: Mapping[str, str], **known: Any) -> Any:
    """Bars of columns system, kind, value, stacked in the order of `colours`; a text at the end of each."""
    shown = {kind: colour for kind, colour in colours.items() if kind in set(bars["kind"])}
    bars = bars.assign(order=bars["kind"].map({name: i for i, name in enumerate(shown)}))
    systems = list(dict.fromkeys(bars["system"]))
    return chart("stacked", bars=bars, ends=ends, colours=shown, systems=systems, **{"share": False, **known})


def step_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """What a batch takes, part by part, case by case."""
    summary = result.summary()
    for setup in setups:
        parts = batch_parts(summary[summary["case"] == setup.case], setup.batch)
        bars = parts.rename(columns={"part": "kind", "time_s": "value"})
        ends = bars.groupby("system", sort=False)["value"].sum().rename("at").reset_index()
        drawn = stacked(
            bars,
            ends.assign(label=ends["at"].map("{:,.1f} s".format)),
            PARTS,
            title=f"mean time to train on {setup.batch:,} responses (s)",
            description=f"Mean time in which each system trains on {setup.batch:,} responses, by part",
        )
        waiting = WAITING in set(parts["part"])
        yield setup.figure("step", drawn, batch=setup.batch, waiting=waiting)
        wide = parts.pivot_table(index="system", columns="part", values="time_s", sort=False).fillna(0)
        wide = wide[[part for part in PARTS if part in wide]]
        title = setup.named("Parts of a batch's time in numbers (seconds)")
        yield _in_numbers(title, wide.assign(batch=wide.sum(axis=1)), "{:.2f}")


def gpu_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """Shares of the GPU-seconds by kind of work, the bubble included, case by case."""
    shares = gpu_shares(result, {setup.case: setup.gpus for setup in setups})
    colours = kind_colours({*result.spans["kind"], TAIL}, result.calls)
    for setup in setups:
        mine = shares[shares["case"] == setup.case]
        idle = mine[mine["kind"] == BUBBLE]
        ends = pd.DataFrame({"system": idle["system"], "at": 1.0, "label": idle["share"].map("{:.1%} idle".format)})
        drawn = stacked(
            mine[["system", "kind", "share"]].rename(columns={"share": "value"}),
            ends,
            colours,
            share=True,
            title="share of all GPU-seconds",
            description="Share of the GPU-seconds of each system by kind of work",
        )
        yield setup.figure("gpu-time", drawn, gpus=setup.gpus)
        wide = mine.pivot_table(index="system", columns="kind", values="share", sort=False).fillna(0)
        wide = wide[[kind for kind in colours if kind in wide]]
        yield _in_numbers(setup.named("Shares in numbers"), wide, "{:.1%}")


def _in_numbers(title: str, wide: pd.DataFrame, form: str) -> Table:
    rows = [[str(system), *map(form.format, values)] for system, values in wide.iterrows()]
    return Table(title, ("system", *wide), rows, folded=True)


_ONE = [*RUN, "step", "response"]
#: Parts of a trajectory's time (s), in the order in which they are drawn.
TRAJECTORY = ("waiting at replicas", "prefill", "decode", "tools", "queues for tools", "held up otherwise")
_COLOURS = dict(zip(TRAJECTORY, (*SERIES[:5], GREY), strict=True))


def trajectory_times(result: Result, case: str) -> pd.DataFrame:
    """One row per system: mean seconds of a trajectory that steady steps trained on, by part, and what tools cost.

    `tool_calls` and `observed` (share of tokens) of a trajectory; `found`, the share of the contexts to prefill that
    was in the cache; `away_tokens`, the mean context of all trajectories that are at their tools at a time.
    """
    steps = result.steps[(result.steps["case"] == case) & result.steps["steady"]]
    steady = steps[[*RUN, "step"]]
    rows = result.responses[(result.responses["case"] == case) & result.responses["trained"]].merge(steady)
    generating = result.calls.loc[result.calls["kind"] == "generate", "call"].unique()
    stays = result.stays[(result.stays["case"] == case) & result.stays["call"].isin(generating)].merge(steady)
    stays = stays.sort_values([*_ONE, "arrived_at", "left_at"])
    away_s = stays.groupby(_ONE)["arrived_at"].shift(-1) - stays["left_at"]
    stays = stays.assign(
        waiting=stays["admitted_at"].fillna(stays["left_at"]) - stays["arrived_at"],
        prefill=stays["decoding_at"].fillna(stays["left_at"]) - stays["admitted_at"],
        decode=stays["left_at"] - stays["decoding_at"],
        away=(away_s * stays["end_tokens"]).where(stays["left"] == "tool"),
        context=stays["start_tokens"].where(stays["admitted_at"].notna()),
    )
    held = stays.groupby(_ONE)[["waiting", "prefill", "decode"]].sum().reset_index()
    whole = rows.merge(held, on=_ONE)
    parts = whole[["waiting", "prefill", "decode", "tool_s", "tool_wait_s"]].set_axis([*TRAJECTORY[:5]], axis=1)
    rest = (whole["finish_at"] - whole["start_at"] - parts.sum(axis=1)).clip(lower=0.0)
    found = parts.assign(**{TRAJECTORY[5]: rest, "system": whole["system"]}).groupby("system", sort=False).mean()
    by_system = whole.groupby("system", sort=False)
    totals, time_s = stays.groupby("system")[["away", "context"]].sum(), steps.groupby("system")["step_time_s"].sum()
    return found.assign(
        tool_calls=by_system["tool_calls"].mean(),
        observed=by_system["observed_tokens"].sum() / by_system["response_tokens"].sum(),
        found=steps.groupby("system")["prefix_hit_tokens"].sum() / totals["context"],
        away_tokens=totals["away"] / time_s,
    )


def trajectory_blocks(result: Result, setups: list[CaseSetup]) -> Iterator[Block]:
    """Where the time of trajectories goes, case by case; nothing where no response calls a tool."""
    for setup in setups if result.responses["tool_calls"].any() else ():
        times = trajectory_times(result, setup.case)
        rows = times.rename_axis("system").reset_index()
        long = rows[["system", *TRAJECTORY]].melt("system", var_name="kind", value_name="value")
        ends = pd.DataFrame({"system": times.index, "at": times[[*TRAJECTORY]].sum(axis=1)})
        ends = ends.assign(label=ends["at"].map("{:,.1f} s".format))
        shown = {part: _COLOURS[part] for part in TRAJECTORY if times[part].max() > 1e-3 * ends["at"].max()}
        drawn = stacked(
            long[long["kind"].isin(shown)],
            ends,
            shown,
            title="mean time of a trajectory (s)",
            description="Mean time of a trajectory under each system, by what it does",
        )
        yield setup.figure("trajectories", drawn)
        yield Table.of(setup.named("A trajectory in numbers (seconds, means)"), written("trajectories", rows))
