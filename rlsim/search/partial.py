"""Plans of which some calls have an option, some only a mesh, and some nothing yet; what all their completions cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rlsim.errors import ConfigError
from rlsim.search.bound import LowerBound
from rlsim.search.options import Meshes, PairCost, loads_of
from rlsim.search.problem import Problem
from rlsim.search.scheduling import Bools, Floats, Ints

LARGEST_TABLE = 20_000_000  # pairs of options of all edges together
CHUNK = 16_384


class Matrix(NamedTuple):
    """A cost between all options of two calls, by option of source and target."""

    source: int
    target: int
    values: Floats


class PairCosts(NamedTuple):
    """The costs between the options of two calls as matrices: of all transfers, reallocations and copies."""

    transfers: list[Matrix]
    reallocations: list[Matrix]
    copies: list[Matrix]


def pair_costs(problem: Problem) -> PairCosts:
    """Every pair of options of every edge; raises `ConfigError` if a cost is missing or there are too many pairs."""
    edges = [*problem.transfers, *problem.moves]
    pairs = sum(int(problem.sizes[edge.source] * problem.sizes[edge.target]) for edge in edges)
    if pairs > LARGEST_TABLE:
        raise ConfigError(
            f"the space of {problem.space:.3g} plans is too large for brute force: its edges have {pairs:.3g} pairs of "
            f"options, more than {LARGEST_TABLE:.3g}"
        )
    every = (problem.transfers, problem.moves, problem.copies)
    return PairCosts(*([_matrix(problem, pair) for pair in one] for one in every))


def _matrix(problem: Problem, pair: PairCost) -> Matrix:
    source, target = pair.source, pair.target
    rows, columns = int(problem.sizes[source]), int(problem.sizes[target])
    if source == target:  # a call to itself an iteration later has the same option
        plans = np.zeros((rows, len(problem.calls)), dtype=np.int64)
        plans[:, source] = np.arange(rows)
        same = np.full((rows, rows), np.inf)
        np.fill_diagonal(same, pair.of(plans))
        return Matrix(source, target, same)
    plans = np.zeros((rows * columns, len(problem.calls)), dtype=np.int64)
    plans[:, source], plans[:, target] = np.divmod(np.arange(len(plans)), columns)
    return Matrix(source, target, pair.of(plans).reshape(rows, columns))


class PartialPlans:
    """Tables for partial plans (n, C), whose entry for a call is one of

    - an option's index, below the number n of its options;
    - n + m: some option on mesh number m (`meshes`);
    - n + number of meshes: some option, wherever.

    A table's entry for the last two is the least of all options that `kept` leaves them.
    """

    def __init__(self, problem: Problem, pairs: PairCosts, kept: list[Bools]) -> None:
        options = problem.options
        spans = [np.stack([o.first_gpu, o.gpus], axis=1) for o in options]
        self.meshes: Ints = np.unique(np.concatenate(spans), axis=0)
        self._problem, self._sizes = problem, problem.sizes
        number = {tuple(mesh): at for at, mesh in enumerate(self.meshes.tolist())}
        self._members: list[list[Ints]] = []  # by call and mesh: options left there
        for span, keep in zip(spans, kept, strict=True):
            mesh = np.array([number[tuple(s)] for s in span.tolist()])
            self._members.append([np.flatnonzero((mesh == m) & keep) for m in range(len(self.meshes))])
        self._everywhere = [np.flatnonzero(keep) for keep in kept]
        self.classes = [np.array([m for m, at in enumerate(members) if len(at)]) for members in self._members]
        self.unknown: Ints = self._sizes + len(self.meshes)
        self._time_s = [self._extended(call, o.time_s) for call, o in enumerate(options)]
        self._resident = [self._extended(call, o.resident_bytes) for call, o in enumerate(options)]
        self._active = [self._extended(call, o.active_bytes) for call, o in enumerate(options)]
        # An unknown mesh is empty.
        self._first = [np.concatenate([o.first_gpu, self.meshes[:, 0], [0]]) for o in options]
        self._last = [np.concatenate([o.first_gpu + o.gpus, self.meshes.sum(axis=1), [0]]) for o in options]
        self._transfers, self._reallocations, self._copies = (list(map(self._extended_pair, some)) for some in pairs)
        self._elsewhere = np.array([self._least_work(call) for call in range(len(options))])

    def _extended(self, call: int, values: Floats) -> Floats:
        """Values (n, ...) of options, then the least of each mesh, and of all."""
        groups = [*self._members[call], self._everywhere[call]]
        nothing = np.full(values.shape[1:], np.inf)
        return np.concatenate([values, [values[at].min(axis=0) if len(at) else nothing for at in groups]])

    def _extended_pair(self, pair: Matrix) -> Matrix:
        values = self._extended(pair.target, self._extended(pair.source, pair.values).T).T.copy()
        return pair._replace(values=values)

    def _least_work(self, call: int) -> float:
        """Least GPUs x seconds of an option, with the least transfers into it."""
        seconds = self._time_s[call].copy()
        for source, target, values in self._transfers:
            if target == call:
                seconds += values[self.unknown[source]]
        return float(((self._last[call] - self._first[call]) * seconds)[self._everywhere[call]].min())

    def class_index(self, call: int, mesh: Ints) -> Ints:
        index: Ints = self._sizes[call] + mesh
        return index

    def count(self, plans: Ints) -> float:
        """How many complete plans there are of these, which must have a mesh for every call."""
        total = np.ones(len(plans))
        for call, members in enumerate(self._members):
            total *= np.array([len(at) for at in members])[plans[:, call] - self._sizes[call]]
        return float(total.sum())

    def with_options(self, plans: Ints, call: int) -> Iterator[Ints]:
        """All plans that come from these by choosing an option for a call that has a mesh, in parts."""
        members = self._members[call]
        mesh = plans[:, call] - self._sizes[call]
        counts = np.array([len(at) for at in members])[mesh]
        ends = np.cumsum(counts)
        at = 0
        while at < len(plans):
            until = max(at + 1, int(np.searchsorted(ends, (ends[at - 1] if at else 0) + CHUNK, side="right")))
            children = np.repeat(plans[at:until], counts[at:until], axis=0)
            children[:, call] = np.concatenate([members[m] for m in mesh[at:until]])
            yield children
            at = until

    def meshes_of(self, plans: Ints) -> Meshes:
        """GPUs of each call, none for those that could be anywhere."""
        return Meshes(_look_up(self._first, plans), _look_up(self._last, plans))

    def bound(self, lower: LowerBound, plans: Ints) -> Floats:
        """Lower bound on the seconds of all completions, (n,)."""
        calls_s = _look_up(self._time_s, plans)
        for source, target, values in self._transfers:
            calls_s[:, target] += values[plans[:, source], plans[:, target]]
        moves_s = [values[plans[:, source], plans[:, target]] for source, target, values in self._reallocations]
        reallocations_s = np.stack(moves_s, axis=1) if moves_s else np.empty((len(plans), 0))
        elsewhere = np.where(plans == self.unknown, self._elsewhere, 0.0)
        return lower.of(calls_s, reallocations_s, self.meshes_of(plans), elsewhere)

    def may_fit(self, plans: Ints) -> Bools:
        """Whether some completion may fit into memory, (n,)."""
        resident, active = _look_up(self._resident, plans), _look_up(self._active, plans)
        for source, target, values in self._copies:
            resident[:, target] += values[plans[:, source], plans[:, target]]
        loads = loads_of(self.meshes_of(plans), resident, active).max(axis=1)
        fits: Bools = loads <= self._problem.memory_bytes * (1 + 1e-12)  # sums may round another way than `peak_bytes`
        return fits


def least_s(problem: Problem) -> float:
    """Seconds of an iteration that no plan of a problem beats; 0 where there are too many plans to say."""
    try:
        pairs = pair_costs(problem)
    except ConfigError:
        return 0.0
    partial = PartialPlans(problem, pairs, [np.ones(len(options), dtype=bool) for options in problem.options])
    return float(partial.bound(LowerBound(problem), partial.unknown[None])[0])


def _look_up(tables: list[np.ndarray], plans: Ints) -> np.ndarray:
    return np.stack([table[plans[:, call]] for call, table in enumerate(tables)], axis=1)
