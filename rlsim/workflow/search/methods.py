"""The search methods by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlsim.errors import CapacityError, unknown_name
from rlsim.workflow.search.bound import least_s
from rlsim.workflow.search.descent import descent
from rlsim.workflow.search.mcmc import mcmc
from rlsim.workflow.search.problem import Problem
from rlsim.workflow.search.progress import Budget, Found, Improvement, Trace

METHODS = {"descent": descent, "mcmc": mcmc}


def find_plan(
    problem: Problem,
    method: str,
    budget: Budget,
    *,
    seed: int = 0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> Found:
    """The best plan that a method finds within a budget, as `find_best` for one problem."""
    return find_best([problem], method, budget, seed=seed, on_improvement=on_improvement)[1]


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
    best: tuple[int, Found] | None = None
    none_fits: CapacityError | None = None
    for place, at in enumerate(order):
        if at_least[at] >= trace.best_cost_s:
            break
        trace = trace.following(problems[at], budget, 1 / (count - place), at_least[at])
        try:
            best = at, METHODS[method](trace, seed)
        except CapacityError as error:  # or there is none that is better
            none_fits = error
    if best is None:
        assert none_fits
        raise none_fits
    at, found = best
    counts = {name: getattr(trace, name) for name in ("evaluations", "scheduled", "elapsed_s")}
    return at, replace(found, **counts, least_s=min(at_least))
