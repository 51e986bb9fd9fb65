"""The search methods by name."""

from __future__ import annotations

from collections.abc import Callable

from rlsim.errors import unknown_name
from rlsim.search.brute import brute_force
from rlsim.search.descent import descent
from rlsim.search.mcmc import mcmc
from rlsim.search.problem import Problem
from rlsim.search.progress import Budget, Found, Improvement

METHODS = ("descent", "mcmc", "brute")


def find_plan(
    problem: Problem,
    method: str,
    budget: Budget,
    *,
    seed: int = 0,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> Found:
    """The best plan that a method finds within a budget; see the functions of these names.

    `brute` has no budget: it ends with the proof. Raises `CatalogueError` for an unknown method, `CapacityError` if no
    plan fits, and `ConfigError` from `brute` for a space that is too large.
    """
    if method == "descent":
        return descent(problem, budget, seed=seed, on_improvement=on_improvement)
    if method == "mcmc":
        return mcmc(problem, budget, seed=seed, on_improvement=on_improvement)
    if method == "brute":
        return brute_force(problem, on_improvement=on_improvement)
    raise unknown_name("search method", method, METHODS)
