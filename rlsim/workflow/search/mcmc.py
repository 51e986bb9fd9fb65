"""The published search: Metropolis-Hastings over plans (Mei et al. 2024, REAL, section 5)."""

from __future__ import annotations

import math

import numpy as np

from rlsim.workflow.search.greedy import start
from rlsim.workflow.search.progress import CROWDED, Found, Trace

#: Relative to the start's cost, so that one value suits iterations of seconds and of hours: a plan worse by 5% of the
#: start is taken with probability 1/e.
BETA = 20.0


def mcmc(trace: Trace, seed: int) -> Found:
    """Start from the greedy plan; propose another option for one random call; accept if better, or by chance.

    A proposal is accepted with min(1, exp(-`BETA` (cost' - cost) / cost of the start)). A cost counts `CROWDED` times
    where a GPU's memory is exceeded (the start's does not). A greedy plan that does not fit is first changed until it
    does (`rlsim.workflow.search.greedy.start`). Raises `CapacityError` if no plan seen fits.
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
                return trace.found("mcmc", seed)
            proposed = plan.copy()
            proposed[call] = option
            then = evaluate(proposed)
            if then <= cost or chance < math.exp(-scale * (then - cost)):
                plan, cost = proposed, then
