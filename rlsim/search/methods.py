"""The search methods by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rlsim.errors import ConfigError, unknown_name
from rlsim.search.brute import brute_force
from rlsim.search.descent import descent
from rlsim.search.mcmc import mcmc
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
    if method not in METHODS:
        raise unknown_name("search method", method, METHODS)
    if method == "brute":
        return brute_force(problem, on_improvement=on_improvement)
    if method == "auto" and problem.space <= SMALL:
        with suppress(ConfigError):
            return brute_force(problem, most=TRIED, on_improvement=on_improvement)
    search = mcmc if method == "mcmc" else descent
    return search(Trace(problem, budget, on_improvement), seed)
