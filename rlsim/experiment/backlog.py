"""Prompts that a system puts off or drops as too stale: it trains on other lengths than one that trains on all.

While the number of those that are put off grows or falls, a throughput is not yet what it would stay.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

#: Where the backlog changes by a larger share of the prompts trained on, a throughput says little: what is put off is
#: the longest responses.
MOST_HELD_BACK = 0.05


def backlog(steps: pd.DataFrame, responses: int) -> tuple[float, float]:
    """Prompts put off from the first to the last steady step of one system, mean over seeds, and their share.

    The share is of the prompts trained on in these steps, of `responses` responses each. Both are below 0 where the
    system comes back to more prompts than it puts off.
    """
    grown = trained = 0.0
    seeds = steps.groupby("seed")
    for _, own in seeds:
        steady = own[own["steady"]].sort_values("step")
        before = own.loc[own["step"] == steady["step"].iloc[0] - 1, "waiting"]
        grown += float(steady["waiting"].iloc[-1]) - float(before.sum())
        trained += float(steady["trained"].sum()) / responses
    return grown / seeds.ngroups, grown / max(trained, 1.0)


def held_back(steps: pd.DataFrame, responses: int) -> float:
    """The share of `backlog`, larger by that of prompts dropped as too stale in the same steps of one system.

    The two add up in size, whatever the sign of the first: neither makes up for the other.
    """
    share = backlog(steps, responses)[1]
    return math.copysign(abs(share) + dropped_stale(steps, responses), share)


def dropped_stale(steps: pd.DataFrame, responses: int) -> float:
    """Prompts dropped as too stale in one system's steady steps, as a share of those trained on."""
    if "dropped_stale" not in steps:  # results of a version that did not count them
        return 0.0
    steady = steps[steps["steady"]]
    return float(steady["dropped_stale"].sum()) / max(float(steady["trained"].sum()) / responses, 1.0)


def stale_note(systems: str, share: float) -> str:
    """What it means for the throughput of some systems that they drop so many (`dropped_stale`)."""
    return (
        f"{systems}: prompts were dropped as too stale, as many as {share:.0%} of those trained on; they hold the "
        "longest responses, so the throughput is too high. Allow more staleness, or have steps wait for them (stale: "
        "wait)."
    )


def comparable(shares: pd.Series[float]) -> pd.Series[bool]:
    """Whether throughputs can be compared, by the shares of `held_back`."""
    return shares.abs() <= MOST_HELD_BACK


def waits_complete(steps: pd.DataFrame) -> bool:
    """Whether the prompts that wait under one system are complete, as in a rollout for all steps: none is put off."""
    return not steps[["put_back", "paused", "resumed"]].to_numpy().any()


def backlog_note(systems: str, prompts: float, share: float, complete: bool) -> str:
    """What the `backlog` of some systems means for their throughput; `complete`: see `waits_complete`."""
    more, why, high = {
        (True, False): ("more", "they hold the longest responses", "high"),
        (False, False): ("fewer", "the longest responses of earlier steps are trained on as well", "low"),
        (True, True): ("more", "they are complete, more than these steps train on", "low"),
        (False, True): ("fewer", "what earlier steps had complete is trained on as well", "high"),
    }[prompts > 0, complete]
    count = f"{abs(prompts):,.1f}".removesuffix(".0")
    wait = "prompt waits" if count == "1" else "prompts wait"
    return (
        f"{systems}: {count} {more} {wait} after the last counted step than before the first ({abs(share):.0%} of "
        f"those trained on); {why}, so the throughput is too {high}. Run more workflow.steps; with short and long "
        "rounds, count whole cycles of them."
    )
