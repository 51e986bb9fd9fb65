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
ENGINE = RefEngine(max_num_seqs=10**6, max_num_batched_tokens=10**6, chunked_prefill=True)
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
    length, found = 50, dict[float, float]()
    for eta in (0, 1, 2, 4, 8, 16, UNBOUNDED):
        period = min(eta, 20) + 1
        first, last = 2 * period, 4 * period
        found[eta] = play([length], bounded(eta), 4, train_s, last + 2, sync_s).step_s(first, last)
        expected = max(train_s, (length + train_s) / (eta + 1)) + sync_s
        assert found[eta] == pytest.approx(expected, rel=1e-12), f"eta {eta}"
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found[UNBOUNDED] == pytest.approx(train_s + sync_s, rel=1e-12)


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
