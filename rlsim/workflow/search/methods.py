"""The search methods by name; of these the published one, Metropolis-Hastings over plans (Mei et al. 2024, REAL)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlsim.errors import CapacityError, unknown_name
from rlsim.workflow.search.bound import least_s
from rlsim.workflow.search.descent import descent
from rlsim.workflow.search.greedy import start
from rlsim.workflow.search.problem import Problem
from rlsim.workflow.search.progress import CROWDED, Budget, Found, Improvement, Trace

#: Relative to the start's cost, so that one value suits iterations of seconds and of hours: a plan worse by 5% of the
#: start is taken with probability 1/e.
BETA = 20.0


def mcmc(trace: Trace, seed: int) -> None:
    """The published search (section 5): propose another option for one random call; accept if better, or by chance.

    A proposal is accepted with min(1, exp(-`BETA` (cost' - cost) / cost of the start)). A cost counts `CROWDED` times
    where a GPU's memory is exceeded (the start's does not). A greedy plan that does not fit is first changed until it
    does (`rlsim.workflow.search.greedy.start`). Raises `CapacityError` as `greedy`.
    """
    problem, rng = trace.problem, np.random.default_rng(seed)
    single, sizes, plan = problem.single, problem.sizes, start(problem).tolist()

    def evaluate(plan: list[int]) -> float:
        cost, peak = single.cost_s(plan), float(problem.peak_bytes([plan])[0])
        trace.see(plan, cost, peak)
        return cost * CROWDED if peak > problem.memory_bytes else cost

    scale = BETA / single.cost_s(plan)
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


METHODS = {"descent": descent, "mcmc": mcmc}


def find_best(
    problems: Sequence[Problem],
    method: str,
    budget: Budget,
    *,
    seed: int = 0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> tuple[int, Found]:
    """The number of the problem with the best plan, and that plan.

    Problems are searched one after another, each with an equal part of what is left of the budget: those that may have
    the shortest iteration first, until none that is left can have a shorter one than the best plan so far. Raises
    `CatalogueError` for an unknown method and `CapacityError` if no plan fits.
    """
    if method not in METHODS:
        raise unknown_name("search method", method, METHODS)
    count = len(problems)
    at_least = [least_s(problem) for problem in problems] if count > 1 else [0.0]
    order = sorted(range(count), key=at_least.__getitem__)
    trace = Trace(problems[order[0]], budget, on_improvement)
    best: tuple[int, tuple[int, ...]] | None = None
    none_fits: CapacityError | None = None  # a call of the last problem
    for place, at in enumerate(order):
        if at_least[at] >= trace.best_cost_s:
            break
        trace = trace.following(problems[at], budget, 1 / (count - place), at_least[at])
        none_fits = None
        try:
            METHODS[method](trace, seed)
        except CapacityError as error:
            none_fits = error
        best = best if trace.best is None else (at, trace.best)
    if best is None:
        raise none_fits or CapacityError(
            f"{method} found no plan that fits in {trace.evaluations} evaluations: the smallest needs "
            f"{trace.least_bytes / 2**30:.1f} GiB on its fullest GPU, which has "
            f"{trace.problem.memory_bytes / 2**30:.1f} GiB"
        )
    at, plan = best
    counts = (trace.evaluations, trace.scheduled, trace.elapsed_s, tuple(trace.improvements))
    return at, Found(plan, trace.best_cost_s, *counts, method, seed, min(at_least))
