"""The published search: Metropolis-Hastings over plans (Mei et al. 2024, REAL, section 5)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlsim.errors import ConfigError
from rlsim.search.greedy import start
from rlsim.search.problem import Problem
from rlsim.search.progress import Budget, Found, Improvement, Trace


def mcmc(
    problem: Problem,
    budget: Budget,
    *,
    seed: int = 0,
    chains: int = 1,
    beta: float = 20.0,
    alpha: float = 100.0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> Found:
    """Start from the greedy plan; propose another option for one random call; accept if better, or by chance.

    A proposal is accepted with min(1, exp(-beta (cost' - cost) / cost of the start)). `beta` is relative to the start's
    cost so that one value suits iterations of seconds and of hours: at 20, a plan worse by 5% of the start is taken
    with probability 1/e. A cost is multiplied by `alpha` where a GPU's memory is exceeded (the start's, in `beta`, is
    not). A greedy plan that does not fit is first changed until it does (`rlsim.search.greedy.start`). `chains` walk in
    lock-step, each on its own; 1 is the algorithm as published. Raises `ConfigError` for settings out of range and
    `CapacityError` if no plan seen fits.
    """
    if chains < 1 or not beta > 0 or not alpha >= 1:
        raise ConfigError(
            f"mcmc needs chains >= 1, beta > 0 and alpha >= 1, not {chains}, {beta} and {alpha} in that order"
        )
    trace, rng, first = Trace(problem, budget, on_improvement), np.random.default_rng(seed), start(problem)
    walk = _one_chain if chains == 1 else _chains
    walk(problem, trace, rng, first.tolist(), chains, beta, alpha)
    return trace.found("mcmc", seed)


def _one_chain(
    problem: Problem, trace: Trace, rng: np.random.Generator, plan: list[int], _: int, beta: float, alpha: float
) -> None:
    single, sizes = problem.single, problem.sizes

    def evaluate(plan: list[int]) -> float:
        cost, peak = single.cost_s(plan), single.peak_bytes(plan)
        trace.see_one(plan, cost, peak)
        return cost * alpha if peak > problem.memory_bytes else cost

    scale = beta / single.cost_s(plan)
    cost = evaluate(plan)
    while True:
        calls = rng.integers(len(sizes), size=1024)  # random numbers by the batch: one at a time they cost as much
        options, chances = rng.integers(sizes[calls]).tolist(), rng.random(1024).tolist()
        for call, option, chance in zip(calls.tolist(), options, chances, strict=True):
            if not trace.left:
                return
            proposed = plan.copy()
            proposed[call] = option
            then = evaluate(proposed)
            if then <= cost or chance < math.exp(-scale * (then - cost)):
                plan, cost = proposed, then


def _chains(
    problem: Problem, trace: Trace, rng: np.random.Generator, plan: list[int], chains: int, beta: float, alpha: float
) -> None:
    def evaluate(
        plans: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        costs, peaks = problem.cost_s(plans), problem.peak_bytes(plans)
        trace.see(plans, costs, peaks)
        return np.where(peaks > problem.memory_bytes, costs * alpha, costs)

    first = np.array([plan])
    scale = beta / problem.cost_s(first)[0]
    plans, costs = np.repeat(first, chains, axis=0), np.repeat(evaluate(first), chains)
    while left := min(trace.left, chains):
        calls = rng.integers(len(problem.sizes), size=chains)
        options, chances = rng.integers(problem.sizes[calls]), rng.random(chains)
        proposed = plans.copy()
        proposed[np.arange(chains), calls] = options
        then = evaluate(proposed[:left])  # the last step of a budget moves only some chains
        worse_by = np.maximum(then - costs[:left], 0.0)
        taken = np.flatnonzero(chances[:left] < np.exp(-scale * worse_by))
        plans[taken], costs[taken] = proposed[taken], then[taken]
