"""The best plan of all: exhaustive enumeration with bounds (branch and bound), for spaces that are small enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rlsim.errors import CapacityError, ConfigError
from rlsim.search.bound import LowerBound
from rlsim.search.descent import descent
from rlsim.search.partial import PartialPlans, pair_costs
from rlsim.search.problem import Problem
from rlsim.search.progress import Budget, Found, Improvement, Trace
from rlsim.search.scheduling import Floats, Ints
from rlsim.search.symmetry import mesh_permutations, smallest_of_its_images

CHUNK = 16_384  # partial plans whose bounds are computed at once
START = 200_000  # plans that descent may judge for the one to start with


def brute_force(
    problem: Problem,
    *,
    largest: float = 1e13,
    most: int = 1_000_000_000,
    start_evaluations: int = START,
    trace: Trace | None = None,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> Found:
    """The plan with the lowest cost of all that fit; other plans may cost the same.

    First every call gets a mesh, then an option on it; after each such choice all partial plans go that do not fit or
    whose lower bound (`rlsim.search.bound`) is no better than the best plan so far, which `descent` provides at the
    start with `start_evaluations` (not counted in the result's). Of plans that differ by an exchange of GPUs that
    changes no cost, one is kept (`rlsim.search.symmetry`). An option that is slower than another on the same mesh, and
    needs as much memory, is not dropped for that: a call that takes longer may let one that matters more go first, and
    the iteration end earlier.

    Raises `ConfigError` if more than `largest` plans are left when meshes are chosen, or more than `most` (partial)
    plans have been judged without coming to an end, and `CapacityError` if no plan fits (or none that is better than
    what `trace` has).
    """
    search = _Enumeration(trace or Trace(problem, Budget(evaluations=2**62), on_improvement), largest, most)
    search.run(start_evaluations)
    return search.trace.found("brute force", None)


class _Enumeration:
    """One run. Calls are chosen for in the order of their least work, most first: it bounds the rest best."""

    def __init__(self, trace: Trace, largest: float, most: int) -> None:
        self.trace, self.problem = trace, (problem := trace.problem)
        self._largest, self._most = largest, trace.evaluations + most
        self._bound = LowerBound(problem)
        self._pairs = pair_costs(problem)
        self._kept = [np.ones(len(options), dtype=bool) for options in problem.options]
        work = [float((options.gpus * options.time_s).min()) for options in problem.options]
        self._order = sorted(range(len(work)), key=lambda call: -work[call])

    def _start(self, evaluations: int) -> None:
        try:
            found = descent(Trace(self.problem, Budget(evaluations=int(min(evaluations, self.problem.space)))), seed=0)
        except CapacityError:  # it found none that fits; there may be one
            return
        plans = np.array([found.plan])
        self.trace.see(plans, self.problem.cost_s(plans), self.problem.peak_bytes(plans))

    def run(self, start_evaluations: int) -> None:
        if not self._drop_options():
            return
        self._start(start_evaluations)
        if not self._drop_options():
            return
        plans, bounds = self._choose_meshes()
        left = self._partial.count(plans)
        if left > self._largest:
            raise ConfigError(
                f"the space of {self.problem.space:.3g} plans is too large for brute force: {left:.3g} are left after "
                f"pruning by mesh, more than {self._largest:.3g}"
            )
        stack = list(self._blocks(plans, bounds, 0))[::-1]
        while stack:
            plans, bounds, chosen = stack.pop()
            better = bounds < self.trace.best_cost_s
            plans = plans[better]
            if not len(plans):
                continue
            if chosen == len(self._order):
                self.trace.see(plans, self.problem.cost_s(plans), self.problem.peak_bytes(plans))
                continue
            children = self._partial.with_options(plans, self._order[chosen])
            stack += list(self._blocks(*self._judged(children), chosen + 1))[::-1]

    def _drop_options(self) -> bool:
        """Leave out options that no good plan can have, until no more go; false if a call has none left."""
        while True:
            self._partial = PartialPlans(self.problem, self._pairs, self._kept)
            before = sum(int(kept.sum()) for kept in self._kept)
            for call, kept in enumerate(self._kept):
                options = np.flatnonzero(kept)
                alone = np.repeat(self._partial.unknown[None], len(options), axis=0)
                alone[:, call] = options
                kept[options] = self._promising(alone)[0]
                if not kept.any():
                    return False
            if sum(int(kept.sum()) for kept in self._kept) == before:
                return True

    def _choose_meshes(self) -> tuple[Ints, Floats]:
        """Partial plans with a mesh for every call, and their bounds."""
        meshes = self._partial.meshes
        permutations = mesh_permutations(self.problem, meshes, self._pairs)
        plans, fixing = self._partial.unknown[None], np.ones((1, len(permutations)), dtype=bool)
        bounds = np.zeros(1)
        for call in self._order:
            choices = self._partial.classes[call]  # numbers of meshes on which the call has options left
            parts = []
            for at in range(0, len(plans), CHUNK // 16):
                rows = np.repeat(np.arange(at, min(at + CHUNK // 16, len(plans))), len(choices))
                mesh = np.tile(choices, len(rows) // len(choices))
                keep = smallest_of_its_images(permutations, fixing[rows], mesh)
                rows, mesh = rows[keep], mesh[keep]
                children = plans[rows]
                children[:, call] = self._partial.class_index(call, mesh)
                promising, child_bounds = self._promising(children)
                rows, mesh = rows[promising], mesh[promising]
                fixed = fixing[rows] & (mesh[:, None] == permutations[:, mesh].T)
                parts.append((children[promising], child_bounds[promising], fixed))
            if not parts:
                break
            plans, bounds, fixing = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return plans, bounds

    def _judged(self, children: Iterator[Ints]) -> tuple[Ints, Floats]:
        parts = []
        for plans in children:
            promising, bounds = self._promising(plans)
            parts.append((plans[promising], bounds[promising]))
        return np.concatenate([plans for plans, _ in parts]), np.concatenate([bounds for _, bounds in parts])

    def _promising(self, plans: Ints) -> tuple[np.ndarray, Floats]:
        """Which partial plans may become the best one, and the bounds of all."""
        self.trace.pass_over(len(plans))
        if self.trace.evaluations > self._most:
            raise ConfigError(
                f"the space of {self.problem.space:.3g} plans is too large for brute force: it has not come to an end "
                f"after {self.trace.evaluations:.3g} partial plans"
            )
        bounds = self._partial.bound(self._bound, plans)
        return (bounds < self.trace.best_cost_s) & self._partial.may_fit(plans), bounds

    def _blocks(self, plans: Ints, bounds: Floats, chosen: int) -> Iterator[tuple[Ints, Floats, int]]:
        """Partial plans by bound, lowest first, in blocks."""
        order = np.argsort(bounds, kind="stable")
        size = CHUNK // 16
        for at in range(0, len(order), size):
            yield plans[order[at : at + size]], bounds[order[at : at + size]], chosen
