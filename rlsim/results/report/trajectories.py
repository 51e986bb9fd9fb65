"""Where the time of trajectories goes: at replicas, in tools, in queues for what tools run on."""

from __future__ import annotations

import pandas as pd

from rlsim.experiment.result import Result
from rlsim.results.report.page import Block, Section, Table
from rlsim.results.report.setups import CaseSetup
from rlsim.results.report.shares import RUN, stacked
from rlsim.results.report.style import GREY, SERIES

_ONE = [*RUN, "step", "response"]
#: Parts of a trajectory's time (s), in the order in which they are drawn.
PARTS = ("waiting at replicas", "prefill", "decode", "tools", "queues for tools", "held up otherwise")
_COLOURS = dict(zip(PARTS, (*SERIES[:5], GREY), strict=True))


def trajectory_times(result: Result, case: str) -> pd.DataFrame:
    """One row per system: mean seconds of a trajectory that steady steps trained on, by `PARTS`, and what tools cost.

    `tool_calls` and `observed` (share of tokens) of a trajectory; `found`, the share of the contexts to prefill that
    was in the cache; `away_tokens`, the mean context of all trajectories that are at their tools at a time.
    """
    steps = result.steps[(result.steps["case"] == case) & result.steps["steady"]]
    steady = steps[[*RUN, "step"]]
    rows = result.responses[(result.responses["case"] == case) & result.responses["trained"]].merge(steady)
    stays = result.stays[(result.stays["case"] == case) & (result.stays["call"] == "generate")].merge(steady)
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
    parts = whole[["waiting", "prefill", "decode", "tool_s", "tool_wait_s"]].set_axis([*PARTS[:5]], axis=1)
    rest = (whole["finish_at"] - whole["start_at"] - parts.sum(axis=1)).clip(lower=0.0)
    found = parts.assign(**{PARTS[5]: rest, "system": whole["system"]}).groupby("system", sort=False).mean()
    by_system = whole.groupby("system", sort=False)
    totals, time_s = stays.groupby("system")[["away", "context"]].sum(), steps.groupby("system")["step_time_s"].sum()
    return found.assign(
        tool_calls=by_system["tool_calls"].mean(),
        observed=by_system["observed_tokens"].sum() / by_system["response_tokens"].sum(),
        found=steps.groupby("system")["prefix_hit_tokens"].sum() / totals["context"],
        away_tokens=totals["away"] / time_s,
    )


def trajectories_section(result: Result, setups: list[CaseSetup]) -> Section | None:
    """Where the time of trajectories goes, case by case; None where no response calls a tool."""
    if not result.responses["tool_calls"].any():
        return None
    blocks: list[Block] = []
    for setup in setups:
        times = trajectory_times(result, setup.case)
        long = times[[*PARTS]].rename_axis("system").reset_index().melt("system", var_name="kind", value_name="value")
        ends = pd.DataFrame({"system": times.index, "at": times[[*PARTS]].sum(axis=1)})
        ends = ends.assign(label=ends["at"].map("{:,.1f} s".format))
        shown = {part: _COLOURS[part] for part in PARTS if times[part].max() > 1e-3 * ends["at"].max()}
        drawn = stacked(
            long[long["kind"].isin(shown)],
            ends,
            shown,
            title="mean time of a trajectory (s)",
            description="Mean time of a trajectory under each system, by what it does",
        )
        blocks.append(setup.figure("trajectories", drawn))
        headings = (
            "system", "tool calls", "tokens that tools returned", *PARTS[:5], "context found in the cache",
            "contexts at tools (mean tokens)",
        )  # fmt: skip
        cells = [
            [str(system), f"{row['tool_calls']:.1f}", f"{row['observed']:.1%}"]
            + [f"{row[part]:.1f}" for part in PARTS[:5]]
            + [f"{row['found']:.1%}", f"{row['away_tokens']:,.0f}"]
            for system, row in times.iterrows()
        ]
        blocks.append(Table(setup.named("A trajectory in numbers (seconds, means)"), headings, cells))
    return Section("trajectories", "Where the time of trajectories goes", tuple(blocks))
