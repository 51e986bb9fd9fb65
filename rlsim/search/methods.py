"""The search methods by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlsim.errors import CapacityError, ConfigError, unknown_name
from rlsim.search.brute import START, brute_force
from rlsim.search.descent import descent
from rlsim.search.mcmc import mcmc
from rlsim.search.partial import least_s
from rlsim.search.problem import Problem
from rlsim.search.progress import Budget, Found, Improvement, Trace

METHODS = ("auto", "descent", "mcmc", "brute")

#: `auto` tries to prove the best plan of spaces up to so many plans, judging so many partial ones at most.
SMALL, TRIED = 1e12, 5_000_000


def find_plan(
    problem: Problem,
    method: str,
    budget: Budget,
    *,
    seed: int = 0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> Found:
    """The best plan that a method finds within a budget; see the functions of these names.

    `brute` has no budget: it ends with the proof. `auto` is `brute` where that ends soon, else `descent`. Raises
    `CatalogueError` for an unknown method, `CapacityError` if no plan fits, and `ConfigError` from `brute` for a space
    that is too large.
    """
    return _search(Trace(problem, budget, on_improvement), method, seed)


def find_best(
    problems: Sequence[Problem],
    method: str,
    budget: Budget,
    *,
    seed: int = 0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> tuple[int, Found]:
    """The number of the problem with the best plan, and that plan. Raises as `find_plan`.

    Problems are searched one after another, each with an equal part of what is left of the budget: those that may have
    the shortest iteration first, until none that is left can have a shorter one than the best plan so far.
    """
    count = len(problems)
    at_least = [least_s(problem) for problem in problems] if count > 1 else [0.0]
    order = sorted(range(count), key=at_least.__getitem__)
    trace = Trace(problems[order[0]], budget, on_improvement)
    best: tuple[int, Found] | None = None
    none_fits: CapacityError | None = None
    for place, at in enumerate(order):
        if at_least[at] >= trace.best_cost_s:
            break
        trace = trace.following(problems[at], budget, 1 / (count - place))
        try:
            best = at, _search(trace, method, seed, among=count)
        except CapacityError as error:  # or there is none that is better
            none_fits = error
    if best is None:
        assert none_fits
        raise none_fits
    at, found = best
    return at, replace(
        found,
        evaluations=trace.evaluations,
        scheduled=trace.scheduled,
        elapsed_s=trace.elapsed_s,
        least_s=min(at_least),
    )


def _search(trace: Trace, method: str, seed: int, among: int = 1) -> Found:
    """The best plan of a problem, one of so many that are searched, if it is better than what the trace has."""
    if method not in METHODS:
        raise unknown_name("search method", method, METHODS)
    start = START // among
    if method == "brute":
        return brute_force(trace.problem, start_evaluations=start, trace=trace)
    if method == "auto" and trace.problem.space <= SMALL:
        before_s, before = trace.elapsed_s, trace.evaluations
        try:
            return brute_force(trace.problem, most=TRIED // among, start_evaluations=start, trace=trace)
        except ConfigError:
            trace.budget = trace.budget.plus(trace.elapsed_s - before_s, trace.evaluations - before)
    search = mcmc if method == "mcmc" else descent
    return search(trace, seed)
