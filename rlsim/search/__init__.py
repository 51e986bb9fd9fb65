"""Search for execution plans: on arrays of seconds and bytes, whatever they were made from."""

from __future__ import annotations

from collections.abc import Callable

from rlsim.errors import unknown_name
from rlsim.search.descent import descent
from rlsim.search.mcmc import mcmc
from rlsim.search.problem import Problem
from rlsim.search.progress import Budget, Found, Improvement

METHODS = ("descent", "mcmc", "brute")

__all__ = ["METHODS", "Budget", "Found", "Improvement", "Problem", "find_plan"]


def find_plan(
    problem: Problem,
    method: str,
    budget: Budget,
    *,
    seed: int = 0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> Found:
    """The best plan that a method finds within a budget; see the function of that name.

    Raises `CatalogueError` for an unknown method, `CapacityError` if no plan fits.
    """
    if method == "descent":
        return descent(problem, budget, seed=seed, on_improvement=on_improvement)
    if method == "mcmc":
        return mcmc(problem, budget, seed=seed, on_improvement=on_improvement)
    raise unknown_name("search method", method, METHODS)
