"""Which steps of a run means count, and whether the throughput of these would last.

A run counts the steps after its own fill, in whole periods. Whether they are steady is tested on what happened in them:
by the balance of tokens (Little's law: what is begun and not yet trained on must not grow), and by the drift of
throughput and staleness from their first half to their second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.base.refusals import refuse
from rlsim.sim.outcome import Outcome
from rlsim.trace import StepSampler

#: The run is filled when so much of what was begun in its first step has been trained on or dropped, by tokens.
FILLED = 0.99
#: So many times as many steps are counted as filling took: the longest responses begin and end among them.
COUNTED = 2
#: Shares of the tokens trained on by which those outstanding may change, and that may be dropped as too stale.
MOST_HELD_BACK = 0.03
#: The drift of tokens/s (as a share) and of the mean staleness (in updates) from half to half, where it is larger than
#: `CERTAIN` standard errors.
MOST_DRIFT, MOST_AGING, CERTAIN = 0.05, 0.1, 3.0
#: So many blocks, whose means tell the error of a run's, last as long as filling: most responses begin and end in one.
BLOCK = 4
#: Columns of `steps` that the tests need besides those of means.
TESTED = ("filled", "outstanding_tokens", "dropped_tokens")
#: No advice on steps says more than so many times those of the run.
MOST_TIMES = 10


class Flow(NamedTuple):
    """Tokens of the prompts in one run, all as if their responses were generated to the end."""

    outstanding: NDArray[np.float64]  # begun, and not yet trained on or dropped, at the end of each step
    dropped: NDArray[np.float64]  # in each step, as too stale
    fill: (
        int  # the step that trains on the last of what was begun in the first (`FILLED`); as many as there are if none
    )

    @classmethod
    def of(cls, outcome: Outcome, sampler: StepSampler) -> Flow:
        """The flow of a run."""
        steps, launches = len(outcome.step_ends), [one.launches for one in outcome.rollouts]

        def column(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(one, name) for one in outcome.responses])

        step = np.repeat(np.arange(steps), [len(one) for one in outcome.responses])
        whole, paused = sampler.whole_tokens(column("row")), column("paused")
        begun = np.minimum(np.searchsorted(outcome.step_ends, column("started_at"), side="right"), step)
        positions, prompt = np.unique(column("position"), return_inverse=True)
        first, last = np.full(len(positions), steps), np.zeros(len(positions), np.int64)
        np.minimum.at(first, prompt, begun)
        np.maximum.at(last, prompt, step)

        def at_last(rows: NDArray[np.bool_]) -> NDArray[np.int64]:
            return np.bincount(prompt[rows & (step == last[prompt])], minlength=len(positions))

        tokens = np.bincount(prompt, whole) / np.bincount(prompt) * sampler.responses
        trained, goes_on = at_last(column("trained")) > 0, at_last(paused) > 0
        drops, stale, back = np.array([(one.dropped, one.stale, one.put_back) for one in launches]).T
        complete = (at_last(column("finished")) >= sampler.responses) | (back[last] == 0)
        lost = at_last(column("aborted")) == at_last(step >= 0)  # all of its sandboxes, say
        dropped = ~trained & ~goes_on & ((drops[last] > 0) & complete | lost & (back[last] == 0))
        left = np.where(trained | dropped, last, steps)
        entered, gone = (np.bincount(at, tokens, steps + 1)[:steps] for at in (first, left))
        too_old = np.bincount(last[dropped], tokens[dropped], steps) * stale / np.maximum(drops, 1)
        ended = (begun == 0) & ~paused
        of_first = np.bincount(step[ended], whole[ended], steps).cumsum()
        never = tokens[(first == 0) & (left == steps) & goes_on].sum()
        fill = int(np.searchsorted(of_first, FILLED * (of_first[-1] + never)))
        return cls((entered - gone).cumsum(), too_old, fill)


class Window(NamedTuple):
    """The steps that means of one system count, by its own lag."""

    lag: int  # steps that may run beside another: the last ones drain the pipeline
    warmup: int | None  # first steps that do not count, if the user says so
    least_tokens: int = 0  # only steps count whose longest response has so many

    def check(self, steps: int) -> None:
        """Raises `ConfigError` if the warm-up leaves nothing to measure."""
        refuse("window", warmup=self.warmup, steps=steps, lag=self.lag, needed=self.lag + 1)

    def blocks(self, rounds: Sequence[str], fill: int) -> NDArray[np.int64]:
        """The block of counted steps that each step is in, from 0, and -1 of steps that do not count.

        Whole periods count, or all steps if there are too few; `rounds`: the kind of each step's round. A period is a
        cycle of rounds of several kinds; else steps that may run beside another end in bursts, which come again every
        `lag` + 1 steps. A block is as few periods as last the `BLOCK`-th part of the fill.
        """
        steps = len(rounds)
        start, stop = self.warmup, steps - self.lag
        if start is None:
            start = min(max(fill, self.lag), steps // 2)
        edges = [*range(start, stop + 1, self.lag + 1)]
        if len(set(rounds)) > 1:
            kind = rounds[0]
            edges = [
                at
                for at in range(start, stop + 1)
                if (at == 0 or rounds[at - 1] != kind) and (at == steps or rounds[at] == kind)
            ]
        if len(edges) < 2:
            edges = [self.warmup or 0, steps]
        first, *inner, end = edges
        starts = [first]
        for at in inner:
            if min(at - starts[-1], end - at) >= fill / BLOCK:
                starts.append(at)
        step = np.arange(steps)
        return np.where(step < end, np.searchsorted(starts, step, side="right") - 1, -1)


def held_back(steps: pd.DataFrame) -> float:
    """By how much the outstanding tokens of one system grow over its steady steps, as a share of those trained on.

    All seeds together, below 0 where they fall; larger by the share of those dropped as too stale. The two add up in
    size, whatever the sign of the first: neither makes up for the other.
    """
    grown = trained = dropped = 0.0
    for _, own in steps.groupby("seed"):
        steady = own[own["steady"]].sort_values("step")
        if steady.empty:
            continue
        before = own.loc[own["step"] == steady["step"].iloc[0] - 1, "outstanding_tokens"]
        grown += float(steady["outstanding_tokens"].iloc[-1]) - float(before.sum())
        trained, dropped = trained + float(steady["tokens"].sum()), dropped + float(steady["dropped_tokens"].sum())
    return math.copysign(abs(grown) + dropped, grown) / max(trained, 1.0)


def unsteady(steps: pd.DataFrame) -> str:
    """Why the throughput of one system's steady steps would not last, and what to do; empty if it would.

    A system that begins nothing in one step to train on it in another is steady by itself.
    """
    if not steps["outstanding_tokens"].any() and not steps["dropped_tokens"].any():
        return ""
    why, needed = next(_faults(steps), ("", 0.0))
    if not needed:
        return why
    total = len(steps) // steps["seed"].nunique()
    return f"{why}; take {math.ceil(min(max(needed, total + 1), MOST_TIMES * total))} workflow.steps or more"


def _faults(steps: pd.DataFrame) -> Iterator[tuple[str, float]]:
    """What is not steady, in the order of these tests, and how many steps would be needed; 0 if more are no help."""
    seeds = [own.sort_values("step") for _, own in steps.groupby("seed") if own["steady"].any()]
    counted = [own[own["steady"]] for own in seeds]
    fills = [int((~own["filled"]).sum()) for own in seeds]
    filled, total, length = max(fills), len(seeds[0]), min(map(len, counted))
    trained = sum(float(own["tokens"].sum()) for own in counted)
    if (dropped := sum(float(own["dropped_tokens"].sum()) for own in counted) / trained) > MOST_HELD_BACK:
        why = f"prompts dropped as too stale hold {dropped:.0%} of the tokens trained on, in mostly long responses"
        yield f"{why}. Allow more staleness, or have steps wait for them (stale: wait)", 0.0
    if abs(grown := held_back(steps.assign(dropped_tokens=0))) > MOST_HELD_BACK:
        how = "more" if grown > 0 else "fewer"
        why = f"{how} tokens are begun than trained on in the counted steps ({abs(grown):.0%} of these)"
        yield why, filled + length * abs(grown) / MOST_HELD_BACK
    if any(own["step"].iloc[0] < fill for own, fill in zip(counted, fills, strict=True)) or length < COUNTED * filled:
        count = f"{filled} step{'s' * (filled > 1)}"
        why = f"it fills for {count}, and {length} are counted, not {COUNTED} times as many after that"
        yield why, (COUNTED + 2) * filled
    rates = [_drift(own["tokens"], own["step_time_s"]) for own in counted]
    ages = [_drift(own["staleness_mean"] * own["trained"], own["trained"]) for own in counted]
    for what, most, drifts, scaled in (
        ("tokens/s change by {:+.0%}", MOST_DRIFT, rates, True),
        ("mean staleness changes by {:+.2f} updates", MOST_AGING, ages, False),
    ):
        changes = [change / (whole if scaled else 1.0) for whole, change, _ in drifts]
        errors = [error / (whole if scaled else 1.0) for whole, _, error in drifts]
        change, error = float(np.mean(changes)), math.hypot(*errors) / len(errors)
        if abs(change) > max(most, CERTAIN * error):
            yield f"its {what.format(change)} from the first half of the counted steps to the second", 2.0 * total


def _drift(above: pd.Series[Any], below: pd.Series[Any]) -> tuple[float, float, float]:
    """A ratio of sums over steps, how it changes from their first half to the second, and the standard error of that.

    Nothing changes in fewer than four steps.
    """
    over, under = above.to_numpy(float), below.to_numpy(float)
    whole, half = over.sum() / under.sum(), len(over) // 2
    if half < 2:
        return whole, 0.0, 0.0
    halves = [(over[at], under[at], over[at].sum() / under[at].sum()) for at in (slice(half), slice(-half, None))]
    spreads = [float(np.std(own - ratio * of, ddof=1)) / of.mean() for own, of, ratio in halves]
    return whole, halves[1][2] - halves[0][2], math.hypot(*spreads) / math.sqrt(half)


def steady_notes(steps: pd.DataFrame) -> Iterator[str]:
    """Which steps the means of each system count where that is not all, and which systems are not steady."""
    total = steps["step"].max() + 1
    windows: dict[tuple[int, ...], list[str]] = {}
    late: dict[str, list[str]] = {}
    for system, own in steps.groupby("system", sort=False):
        counted = own.loc[own["steady"]].groupby("seed")["step"].agg(["size", "min", "max"])
        ends = counted["size"].min(), counted["size"].max(), counted["min"].min(), counted["max"].max()
        if ends[0] < total:
            windows.setdefault(tuple(map(int, ends)), []).append(str(system))
        if why := unsteady(own):
            late.setdefault(why, []).append(str(system))
    for (fewest, most, first, last), systems in windows.items():
        of = f" of {', '.join(systems)}" if len(systems) < steps["system"].nunique() else ""
        count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        yield f"means{of} are of {count} of {total} steps, numbers {first} to {last} counted from 0"
    for why, systems in late.items():
        yield f"{', '.join(systems)}: not steady, so not compared: {why}"


def comparable(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether the throughputs of these rows of a summary can be compared: of systems that are steady."""
    return rows["unsteady"].fillna("").eq("")
