"""Continuous generation against queueing theory: both sides' capacities, staleness, batches in a queue.

A decode step takes one second whatever runs beside it, and a prefill nothing more than that: a response of n tokens
takes n seconds. So generation is a station of as many servers as prompts may be under way, the trainer one that serves
B at a time, and what is measured has a closed form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from open_workloads import OpenWorkload, Rule
from reference import RefEngine
from test_asynchronous import run
from workloads import LinearStep, StubCosts

from rlsim.policies.continuous import BoundedStaleness
from rlsim.sim.continuous import Continuous, Update
from rlsim.sim.outcome import Outcome
from rlsim.sim.run import simulate

UNBOUNDED = 1000  # updates
Floats = NDArray[np.float64]
ENGINE = RefEngine(1, 10**6, 10**6, True, 0)  # page, sequences and tokens of an iteration, chunked, watermark
COSTS = StubCosts({1: LinearStep(a=1.0)}, {1: 10**9})


@dataclass(frozen=True)
class Prompts:
    """What became of the prompts that were trained on, one entry each, in the order in which they were launched."""

    started_at: Floats
    ready_at: Floats
    taken_at: Floats
    tokens: Floats
    step: NDArray[np.int64]
    staleness: NDArray[np.int64]


@dataclass(frozen=True)
class Played:
    """A run of prompts of one response each."""

    outcome: Outcome
    batch: int

    @property
    def taken_at(self) -> Floats:
        """Of each step: when it had its batch."""
        return np.array([call.end_at for call in self.outcome.calls if call.call == "generate"])

    @property
    def ends_at(self) -> Floats:
        """Of each step: when its update was over."""
        return np.array(self.outcome.step_ends)

    def step_s(self, first: int, last: int) -> float:
        """Mean time of these steps."""
        return float(self.ends_at[last] - self.ends_at[first]) / (last - first)

    def prompts(self) -> Prompts:
        """Those that were trained on."""
        columns = []
        for step, responses in enumerate(self.outcome.responses):
            kept = responses.trained
            taken = np.full(kept.sum(), self.taken_at[step])
            started, finished = responses.started_at[kept], responses.finished_at[kept]
            tokens, stale = responses.generated_tokens[kept], step - responses.version[kept]
            columns.append((responses.position[kept], started, finished, taken, tokens, stale))
        position, started, finished, taken, tokens, stale = map(np.concatenate, zip(*columns, strict=True))
        steps = np.repeat(np.arange(len(columns)), self.batch)
        order = np.argsort(position)
        return Prompts(
            started[order], finished[order], taken[order], tokens[order].astype(float), steps[order], stale[order]
        )


def play(
    lengths: Sequence[int], rule: Continuous, batch: int, train_s: float, steps: int, sync_s: float = 0.0
) -> Played:
    """Prompts of these lengths, over and over again; an update takes `sync_s`, in which nothing is generated."""
    work = OpenWorkload(
        sizes=tuple(((1, int(length)),) for length in lengths),
        prompts=batch,
        rule=rule,  # type: ignore[arg-type]
        train_s=(train_s,) * steps,
        sync_s=(sync_s,) * steps,
        costs=COSTS,
        engine=ENGINE,
    )
    return Played(simulate(work.simulation()), batch)


def bounded(eta: float = UNBOUNDED, concurrent: int | None = None) -> BoundedStaleness:
    """Prompts in the order in which they become ready; new weights cost what is under way nothing but their time."""
    return BoundedStaleness(eta=eta, concurrent=concurrent, order="ready", updated_kv="keep")


def in_system(most: int) -> Rule:
    """So many prompts run or wait, always."""
    return Rule("under_way", most, weights=Update("interrupt", "keep"))


def exponential(mean: float, count: int, seed: int) -> list[int]:
    """Lengths without memory: geometric ones (tokens)."""
    return np.random.default_rng(seed).geometric(1 / mean, count).tolist()


# ------------------------------------------------------------------------------------------------------- throughput


@pytest.mark.parametrize(
    ("concurrent", "batch", "train_s", "sync_s"),
    [(4, 4, 10, 0.0), (4, 4, 30, 3.0), (8, 4, 12, 3.0), (2, 4, 37, 3.0), (6, 4, 5, 3.0), (1, 3, 59, 0.0)],
)
def test_throughput_is_that_of_the_slower_side(concurrent: int, batch: int, train_s: float, sync_s: float) -> None:
    """20 s a response: generation gives a batch every B · 20 / C s, training takes T; both stand still in an update."""
    steps, period = 80, math.lcm(concurrent, batch) // batch
    played = play([20], bounded(concurrent=concurrent), batch, train_s, steps, sync_s)
    expected = max(batch * 20 / concurrent, train_s) + sync_s
    assert played.step_s(steps // 2, steps // 2 + 6 * period) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("train_s", "sync_s"), [(3.0, 2.0), (10.0, 0.0), (60.0, 2.0)])
def test_throughput_under_a_bound_of_staleness(train_s: float, sync_s: float) -> None:
    """Batch k is launched with update k − η, so η + 1 steps take the time L of a response and one training, or more."""
    steps, length = 120, 50
    found = {}
    for eta in (0, 1, 2, 4, 8, 16, UNBOUNDED):
        played = play([length], bounded(eta), 4, train_s, steps, sync_s)
        period = min(eta, 20) + 1
        found[eta] = played.step_s(60, 60 + 2 * period)
        expected = max(train_s, (length + train_s) / (eta + 1)) + sync_s
        assert found[eta] == pytest.approx(expected, rel=1e-12), f"eta {eta}"
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found[UNBOUNDED] == pytest.approx(train_s + sync_s, rel=1e-12)


def test_generation_that_never_stops_is_no_faster_than_its_bound() -> None:
    """Few prompts of a long tail: the longest responses take many steps, which says nothing of one of them."""
    lengths, workflow = {"path": "rollpacker-math", "cap": "2K"}, {"prompts": 2, "steps": 60, "reference": True}
    found = run({"areal": {"tp": 1, "rollout_gpus": 4, "eta": 8}}, trace=lengths, workflow=workflow)
    assert 0 < found.summary()["bound_share"].item() < 1


# ---------------------------------------------------------------------------------------------- tables of a run


def test_what_waits_in_the_tables_of_a_run() -> None:
    """`waiting` of `steps` counts the prompts that are ready and not taken in `responses`."""
    found = run({"areal": {"tp": 1, "rollout_gpus": 4, "eta": 3}}, workflow={"steps": 20})
    steps, responses = found.steps.set_index("step"), found.responses
    taken_at = found.calls.query("kind == 'generate'").set_index("step")["end_at"]
    groups = responses.groupby(["step", "position"]).agg(
        ready_at=("scored_at", "max"), trained=("trained", "all"), all_done=("scored_at", lambda at: at.notna().all())
    )
    groups = groups.reset_index()
    end = groups["step"].map(taken_at).where(groups["trained"], np.inf).to_numpy()
    ready = groups["ready_at"].where(groups["all_done"], np.inf).to_numpy()
    assert (ready[groups["trained"]] <= end[groups["trained"]] * (1 + 1e-12)).all()
    for step, at in taken_at.items():
        assert ((ready <= at) & (end > at)).sum() == steps.loc[step, "waiting"], f"step {step}"


# -------------------------------------------------------------------------------------------------------- staleness


@pytest.mark.parametrize(("eta", "train_s"), [(0, 3.0), (1, 60.0), (5, 3.0), (5, 60.0)])
def test_staleness_is_the_bound_where_all_that_it_allows_is_launched(eta: int, train_s: float) -> None:
    """Prompts of batch k begin with update k − η, however long they take, and are taken in that order."""
    staleness = play([50], bounded(eta), 4, train_s, 20).prompts().staleness
    assert staleness.tolist() == [min(step, eta) for step in range(20) for _ in range(4)]


@pytest.mark.parametrize(("most", "batch", "train_s"), [(4, 4, 11.0), (8, 4, 2.0), (12, 3, 90.0), (40, 8, 11.0)])
def test_staleness_is_what_is_in_the_system_over_a_batch(most: int, batch: int, train_s: float) -> None:
    """Constant service, N prompts running or waiting: one begins when another is taken, behind N − B others."""
    staleness = play([50], in_system(most), batch, train_s, 40).prompts().staleness.reshape(40, batch)
    assert (staleness[most // batch + 1 :] == most // batch).all()


def test_mean_staleness_does_not_depend_on_the_service() -> None:
    """Little's law on the clock of updates: B leave at each, N are there, so a prompt stays for N / B of them."""
    most, train_s, batch, steps = 36, 5.0, 8, 400
    means = []
    for lengths in ([100], exponential(100, steps * batch + 100, 11), heavy(100, steps * batch + 100, 12)):
        staleness = play(lengths, in_system(most), batch, train_s, steps).prompts().staleness
        means.append(staleness.mean())
    # Of the first and the last N prompts part of the time in the system is not counted; a first token that comes with
    # the next weights is one update younger.
    assert means == pytest.approx([most / batch] * 3, rel=most / batch / steps + 0.02)


@pytest.mark.parametrize("times", [1, 4])
def test_staleness_of_waves_under_a_limit_of_what_runs(times: int) -> None:
    """Constant service and C = m · B under way, training that keeps up: m batches become ready at a time.

    A wave begins when the one before is ready, of which nothing has been trained on yet: its batches are m, m + 1, …,
    2m − 1 updates old, (3m − 1) / 2 in the mean.
    """
    staleness = play([100], bounded(concurrent=4 * times), 4, 10.0, 10 * times).prompts().staleness
    waves = staleness.reshape(-1, times, 4)[1:]
    assert (waves == (times + np.arange(times))[None, :, None]).all()
    assert waves.mean() == (3 * times - 1) / 2


def heavy(mean: float, count: int, seed: int) -> list[int]:
    """Nineteen of twenty responses are short and one is ten times as long (tokens)."""
    short = mean / 1.45
    return np.where(np.random.default_rng(seed).random(count) < 0.05, round(10 * short), round(short)).tolist()


def test_a_long_tail_makes_long_responses_stale() -> None:
    """Short and long ones wait as long for a step; beyond that a response is as stale as it is long, in steps."""
    train_s, batch, steps = 40.0, 8, 600
    lengths = heavy(200, steps * batch + 500, 13)
    played = play(lengths, in_system(64), batch, train_s, steps)
    prompts = played.prompts()
    steady = (prompts.step >= 100) & (prompts.step < 500)
    is_long = prompts.tokens > 400
    short, long = (prompts.staleness[steady & where].mean() for where in (~is_long, is_long))
    step_s = played.step_s(100, 500)
    more_s = max(lengths) - min(lengths)
    assert long - short == pytest.approx(more_s / step_s, rel=0.05)
    even = play([200], in_system(64), batch, train_s, 60).prompts()
    assert short < even.staleness[even.step >= 20].mean() < long


# ------------------------------------------------------------------------------------------- a queue with batch service


def batch_waits(ready_at: Floats, batch: int, service_s: float) -> Floats:
    """Seconds from a customer's arrival until the server takes it: B at a time, once B are there and it is free."""
    last = ready_at.reshape(-1, batch)[:, -1]
    starts = np.empty(len(last))
    free_at = 0.0
    for i, there_at in enumerate(last):
        starts[i] = max(there_at, free_at)
        free_at = starts[i] + service_s
    return np.repeat(starts, batch) - ready_at


def error_of_mean(values: Floats, blocks: int = 20) -> float:
    """Standard error of the mean of values that depend on their neighbours, by means of blocks."""
    means = values[: len(values) // blocks * blocks].reshape(blocks, -1).mean(axis=1)
    return float(means.std(ddof=1)) / math.sqrt(blocks)


@pytest.mark.parametrize(("load", "seed"), [pytest.param(0.5, 21, marks=pytest.mark.slow), (0.8, 22)])
def test_waiting_in_the_queue_is_that_of_batch_service(load: float, seed: int) -> None:
    """Responses without memory leave a station of C as a Poisson process; training takes B of them in T seconds.

    Once with the moments at which the engine's own responses became ready, once with others drawn as Poisson arrivals.
    """
    batch, concurrent, mean, steps = 8, 64, 2000, 2000
    apart_s = mean / concurrent
    train_s = float(round(load * batch * apart_s))
    lengths = exponential(mean, steps * batch + 4 * concurrent, seed)
    prompts = play(lengths, bounded(concurrent=concurrent), batch, train_s, steps).prompts()
    order = np.argsort(prompts.ready_at, kind="stable")
    ready_at, waits = prompts.ready_at[order], (prompts.taken_at - prompts.ready_at)[order]
    assert waits.mean() == pytest.approx(batch_waits(ready_at, batch, train_s).mean(), rel=1e-9)

    arrivals = np.cumsum(np.random.default_rng(seed + 100).exponential(apart_s, 100_000 * batch))
    expected = batch_waits(arrivals, batch, train_s)
    error = math.hypot(error_of_mean(waits), error_of_mean(expected))
    assert abs(waits.mean() - expected.mean()) < 3 * error
    assert error < 0.06 * expected.mean()
