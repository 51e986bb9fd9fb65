"""Coordinate descent over calls, restarted from the best plan with a few calls changed (iterated local search)."""

from __future__ import annotations

import itertools

import numpy as np

from rlsim.workflow.search.bound import LowerBound
from rlsim.workflow.search.greedy import start
from rlsim.workflow.search.problem import Problem
from rlsim.workflow.search.progress import CROWDED, Trace
from rlsim.workflow.search.scheduling import Floats, Ints

RESTARTS = 20  # before pairs are tried, which take many times as long
SOFT = 0.25, 0.5, 1.0, 2.0  # a restart first counts bytes needed / bytes there to such a power, where that is over 1
CHUNK = 16_384  # candidates whose bound is computed at once
PAIRS = 65_536  # above so many pairs of options of two calls, only the fastest of each mesh are paired


def descent(trace: Trace, seed: int) -> None:
    """Change one call at a time to the option that is best with all others as they are, until none improves the plan.

    Then some calls of the best plan take random options and the descent runs again, until the budget is spent. Where a
    GPU's memory is exceeded, a plan's cost counts `CROWDED` x bytes needed / bytes there times; as the way from one
    plan that fits to a better one often leads through others, a restart begins with a milder factor (`SOFT`). After
    `RESTARTS` of them two calls change at a time where one does not help: first those that share a model (train, and
    generate or inference: apart, neither moves, as the parameters would have to), then all others; later only from a
    plan that is better than the best. Starts at `rlsim.workflow.search.greedy.start`.

    Candidates whose lower bound (`rlsim.workflow.search.bound`) is no better than the plan at hand are not
    scheduled; the others are scheduled by bound, lowest first. Raises `CapacityError` as `greedy`.
    """
    _Descent(trace, np.random.default_rng(seed)).run()


class _Descent:
    """One run: the plan at hand and its score (seconds, more where it does not fit)."""

    def __init__(self, trace: Trace, rng: np.random.Generator) -> None:
        problem = trace.problem
        self.problem, self.trace, self._rng = problem, trace, rng
        self._bound = LowerBound(problem)
        self._plan, self._score_s = start(problem), np.inf
        self._settled: set[bytes] = set()  # plans that no pair of calls improves
        self._soft = 0.0  # the power of `SOFT`; 0: `CROWDED` counts
        model = [(move.source, move.target) for move in problem.moves]
        others = list(itertools.combinations(range(len(problem.calls)), 2))
        self._pairs = model + [pair for pair in others if pair not in model and pair[::-1] not in model]
        # GPU-seconds that every bound counts, per GPU of the cluster: summed over calls, the quickest bound.
        self._work_s: list[Floats] = [
            counted * options.gpus * options.time_s / problem.gpus
            for counted, options in zip(self._bound.counted, problem.options, strict=True)
        ]
        self._short = [_fastest_by_mesh(problem, call) for call in range(len(problem.calls))]

    def run(self) -> None:
        """Descend from the start, then from changed best plans, until the budget is spent."""
        self._settle()
        best, best_s = self._plan, self._score_s
        for restart in itertools.count():
            if restart == RESTARTS:
                self._plan = best
                self._settle(worth_pairs_s=np.inf)
                best, best_s = self._plan, self._score_s
            if not self.trace.left:
                return
            self._plan = best.copy()
            changed = self._rng.choice(len(best), size=int(self._rng.integers(2, len(best) + 1)), replace=False)
            for call in changed:  # random options would mostly be poor: a random mesh, and what is fastest there
                self._plan[call] = self._rng.choice(self._short[call])
            self._settle(soft=float(self._rng.choice(SOFT)))
            self._settle(worth_pairs_s=best_s if restart >= RESTARTS else 0.0)
            if self._score_s <= best_s:
                best, best_s = self._plan, self._score_s

    def _settle(self, *, soft: float = 0.0, worth_pairs_s: float = 0.0) -> None:
        """Go on from the plan at hand until no change of one call improves it or, of a plan that takes less than
        `worth_pairs_s`, of two."""
        self._soft, self._score_s = soft, np.inf
        self._try(self._plan[None])
        while self.trace.left:
            if self._sweep_calls():
                continue
            plan = self._plan.tobytes()
            if self._score_s >= worth_pairs_s or plan in self._settled or not self._sweep_pairs():
                if self._score_s < worth_pairs_s:
                    self._settled.add(plan)
                return

    def _sweep_calls(self) -> bool:
        """Each call in turn, in random order; whether the plan got better."""
        before = self._score_s
        for call in self._rng.permutation(len(self._plan)):
            order = self.problem.options[call].by_time
            order = order[self._work_s[call][order] < self._room_s(call)]
            for at in range(0, len(order), CHUNK):
                some = order[at : at + CHUNK]
                candidates = np.repeat(self._plan[None], len(some), axis=0)
                candidates[:, call] = some
                self._try(candidates)
        return self._score_s < before

    def _sweep_pairs(self) -> bool:
        """Pairs of calls, until one makes the plan better; whether one did."""
        before = self._score_s
        for a, b in self._pairs:
            few = self.problem.sizes[a] * self.problem.sizes[b] <= PAIRS  # else the fastest of each mesh, as they are
            ones, twos = (self.problem.options[call].by_time if few else self._short[call] for call in (a, b))
            room_s = self._room_s(a, b)
            rows, columns = np.nonzero(self._work_s[a][ones][:, None] + self._work_s[b][twos] < room_s)
            for at in range(0, len(rows), CHUNK):
                first, second = ones[rows[at : at + CHUNK]], twos[columns[at : at + CHUNK]]
                candidates = np.repeat(self._plan[None], len(first), axis=0)
                candidates[:, a], candidates[:, b] = first, second
                self._try(candidates)
            if self._score_s < before:
                return True
        return False

    def _room_s(self, *calls: int) -> float:
        """Work (as in `_work_s`) that calls may have in a plan better than the one at hand."""
        others = (work[o] for c, (work, o) in enumerate(zip(self._work_s, self._plan, strict=True)) if c not in calls)
        return self._score_s - float(sum(others))

    def _try(self, candidates: Ints) -> None:
        """Take the best of some plans (n, C), if it is better than the one at hand."""
        candidates = candidates[: self.trace.left]
        peaks = self.problem.peak_bytes(candidates)
        factors = self._factors(peaks)
        bounds = self._bound.of(*self.problem.durations(candidates), self.problem.meshes(candidates)) * factors
        promising = np.flatnonzero(bounds < self._score_s)
        seen = 0
        for row in promising[np.argsort(bounds[promising], kind="stable")].tolist():
            if not self.trace.left or bounds[row] >= self._score_s:
                break
            plan = candidates[row].tolist()
            cost_s = self.problem.single.cost_s(plan)
            self.trace.see(plan, cost_s, float(peaks[row]))
            seen += 1
            if cost_s * factors[row] < self._score_s:
                self._plan, self._score_s = candidates[row].copy(), float(cost_s * factors[row])
        self.trace.evaluations += len(candidates) - seen  # those that their lower bounds exclude

    def _factors(self, peaks_bytes: Floats) -> Floats:
        full = peaks_bytes / self.problem.memory_bytes
        return np.maximum(full, 1.0) ** self._soft if self._soft else np.where(full > 1, CROWDED * full, 1.0)


def _fastest_by_mesh(problem: Problem, call: int) -> Ints:
    """The fastest option on each mesh, the fastest of them first, and no more than the square root of `PAIRS`."""
    options = problem.options[call]
    order = options.by_time
    meshes = options.first_gpu[order] * (problem.gpus + 1) + options.gpus[order]
    _, at = np.unique(meshes, return_index=True)
    fastest: Ints = order[np.sort(at)][: int(PAIRS**0.5)]
    return fastest
