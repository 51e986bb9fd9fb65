"""How long a search may run, what it found, and how it got there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlsim.errors import ConfigError
from rlsim.workflow.search.problem import Problem

#: A plan's seconds count so many times where a GPU's memory is exceeded.
CROWDED = 100.0


@dataclass(frozen=True)
class Budget:
    """A search ends after so many seconds of wall time or so many plans evaluated, whichever comes first.

    With `evaluations` alone, the same seed finds the same plan on any machine. Raises `ConfigError` if one is not
    positive.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("evaluations", self.evaluations)):
            if value is not None and not value > 0:
                raise ConfigError(f"a search budget must be positive, not {value} {name}")


@dataclass(frozen=True)
class Improvement:
    """The best plan that fits became this good, so long after the start."""

    elapsed_s: float
    evaluations: int
    best_cost_s: float


@dataclass(frozen=True)
class Found:
    """The best plan of a search: one option index per call, its seconds per iteration, and how it was found.

    `evaluations`: plans judged; `scheduled` of them were, the others were left out by a lower bound of their own.
    """

    plan: tuple[int, ...]
    cost_s: float
    evaluations: int
    scheduled: int
    elapsed_s: float
    improvements: tuple[Improvement, ...]
    method: str
    seed: int | None
    least_s: float = 0.0  # seconds of an iteration that no plan beats, where that is known


@dataclass
class Trace:
    """Counts evaluations, keeps the best plan that fits, and tells `on_improvement` of each better one."""

    problem: Problem
    budget: Budget
    on_improvement: Callable[[Improvement], None] | None = None
    evaluations: int = 0
    scheduled: int = 0
    at_least_s: float = 0.0  # no plan of the problem takes less
    best_cost_s: float = np.inf
    best: tuple[int, ...] | None = None
    improvements: list[Improvement] = field(default_factory=list)
    _started_at: float = field(default_factory=time.perf_counter)
    least_bytes: float = np.inf  # on the fullest GPU of any plan that was seen

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_at

    @property
    def left(self) -> int:
        """Evaluations that the budget still allows; none once its seconds are over, or no plan can be better."""
        if self.budget.seconds is not None and self.elapsed_s >= self.budget.seconds:
            return 0
        if self.best_cost_s <= self.at_least_s * (1 + 1e-12):  # but for rounding
            return 0
        if self.budget.evaluations is None:
            return 2**62
        return max(0, self.budget.evaluations - self.evaluations)

    def following(self, problem: Problem, budget: Budget, share: float, at_least_s: float) -> Trace:
        """Goes on with another problem and a share of what is left of a budget, for plans better than those so far."""
        now_s, seen = self.elapsed_s, self.evaluations
        until_s = budget.seconds and now_s + max(share * (budget.seconds - now_s), 1e-3)
        until = budget.evaluations and seen + max(round(share * (budget.evaluations - seen)), 1)
        part = Budget(until_s, until)
        return replace(self, problem=problem, budget=part, at_least_s=at_least_s, best=None)

    def see(self, plan: Sequence[int], cost_s: float, peak_bytes: float) -> None:
        """Count a plan that was scheduled, and keep it if it is the best that fits."""
        self.evaluations += 1
        self.scheduled += 1
        self.least_bytes = min(self.least_bytes, peak_bytes)
        if cost_s < self.best_cost_s and peak_bytes <= self.problem.memory_bytes:
            self.best, self.best_cost_s = tuple(plan), cost_s
            self.improvements.append(Improvement(self.elapsed_s, self.evaluations, cost_s))
            if self.on_improvement is not None:
                self.on_improvement(self.improvements[-1])
