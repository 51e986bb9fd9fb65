"""The plan problem as arrays: the seconds and bytes of whole plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlsim.errors import ConfigError
from rlsim.search.options import Dependency, Meshes, OfPair, Options, PairCost, Reallocation, loads_of
from rlsim.search.scheduling import Floats, Graph, Ints, schedule_batch
from rlsim.search.single import Single

BATCH = 4096  # plans scheduled at once: their arrays stay in the cache of a core


@dataclass(frozen=True, eq=False)
class Problem:
    """Calls of an RLHF iteration with their options; a plan is one option index per call, in the order of `options`.

    `gpus`: of the cluster; `memory_bytes`: of each GPU; `iterations` are concatenated, so that calls of
    the next may overlap this one's. `order`: call names, each after those of the same iteration that it needs; decides
    between calls that become ready at the same moment (default: the first such order). Raises `ConfigError` where these
    do not fit together.
    """

    options: Sequence[Options]
    dependencies: Sequence[Dependency]
    reallocations: Sequence[Reallocation]
    gpus: int
    memory_bytes: float
    iterations: int = 3
    order: Sequence[str] | None = None
    graph: Graph = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.options:
            raise ConfigError("a plan needs at least one call")
        if not self.memory_bytes > 0:
            raise ConfigError(f"a GPU's memory must be positive, not {self.memory_bytes} bytes")
        for options in self.options:
            if (options.first_gpu + options.gpus).max() > self.gpus:
                raise ConfigError(f"an option of {options.call} reaches beyond the {self.gpus} GPUs")
        pairs = [(edge.source, edge.target) for edge in self.reallocations]
        if len(set(pairs)) != len(pairs):
            raise ConfigError("two reallocations have the same source and target")
        edges, moves = (
            [(edge.source, edge.target, edge.lag) for edge in some] for some in (self.dependencies, self.reallocations)
        )
        object.__setattr__(self, "graph", Graph(self.calls, edges, moves, self.iterations, self.order))

    @cached_property
    def calls(self) -> tuple[str, ...]:
        return tuple(options.call for options in self.options)

    @cached_property
    def sizes(self) -> Ints:
        """(C,): how many options each call has."""
        return np.array([len(options) for options in self.options])

    @property
    def space(self) -> float:
        return float(np.prod(self.sizes.astype(float)))

    @cached_property
    def _offsets(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[np.float64] | Ints]:
        """All calls' options one after another, for one look-up per quantity."""
        names = ("first_gpu", "gpus", "time_s", "resident_bytes", "active_bytes")
        return {name: np.concatenate([getattr(options, name) for options in self.options]) for name in names}

    def _pair(self, kind: str, unit: str, edge: Dependency | Reallocation, cost: OfPair) -> PairCost:
        source, target = self.calls.index(edge.source), self.calls.index(edge.target)
        return PairCost(kind, unit, source, target, (edge.source, edge.target), cost)

    @cached_property
    def transfers(self) -> list[PairCost]:
        """Seconds by which data from another call lengthens a call."""
        return [self._pair("transfer", "seconds", e, e.seconds) for e in self.dependencies if e.seconds is not None]

    @cached_property
    def moves(self) -> list[PairCost]:
        return [self._pair("reallocation", "seconds", edge, edge.seconds) for edge in self.reallocations]

    @cached_property
    def copies(self) -> list[PairCost]:
        """Bytes that reallocated parameters take."""
        copied = [(edge, edge.resident_bytes) for edge in self.reallocations]
        return [self._pair("copy", "bytes", edge, size) for edge, size in copied if size is not None]

    def checked(self, plans: npt.ArrayLike) -> Ints:
        """Plans as (n, C) integers; raises `ConfigError` where an index is no option of its call."""
        array = np.asarray(plans, dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != len(self.calls):
            raise ConfigError(f"plans must be (n, {len(self.calls)}), not {array.shape}")
        if len(array) and ((array < 0) | (array >= self.sizes)).any():
            row, call = np.argwhere((array < 0) | (array >= self.sizes))[0]
            raise ConfigError(f"the call {self.calls[call]} has no option {array[row, call]}")
        return array

    def meshes(self, plans: Ints) -> Meshes:
        """GPUs of each call of checked plans."""
        at = plans + self._offsets
        first = self._columns["first_gpu"][at].astype(np.int64)
        return Meshes(first, first + self._columns["gpus"][at].astype(np.int64))

    def durations(self, plans: Ints) -> tuple[Floats, Floats]:
        """Seconds of calls, transfers included (n, C), and of reallocations (n, R), of checked plans.

        Raises `ConfigError` if a transfer or reallocation has no cost (NaN), or an infinite or negative one.
        """
        calls_s = self._columns["time_s"][plans + self._offsets].astype(np.float64)
        for transfer in self.transfers:
            calls_s[:, transfer.target] += transfer.of(plans)
        moves_s = [move.of(plans) for move in self.moves]
        return calls_s, np.stack(moves_s, axis=1) if moves_s else np.empty((len(plans), 0))

    def cost_s(self, plans: npt.ArrayLike) -> Floats:
        """Seconds of an iteration of each plan: (end of the last one - end of the first that counts) / those after it.

        `plans` (n, C) -> (n,). A plan's calls are list-scheduled (see `rlsim.search.scheduling`). Memory is not looked
        at. An iteration ends with the last of its calls; where a call runs ahead of the weights that it is given (a
        reallocation with a lag above 1), with these. Where dependencies have lags above 1, the first iterations run
        ahead and the last ones catch up: a few iterations then show too short a time on shared GPUs, and `iterations`
        should be many times the lag. Raises `ConfigError` for indices out of range and for missing costs.
        """
        array = self.checked(plans)
        parts = [self._cost_s(array[at : at + BATCH]) for at in range(0, len(array), BATCH)]
        return np.concatenate(parts) if parts else np.empty(0)

    def _cost_s(self, plans: Ints) -> Floats:
        if len(plans) < 8:  # the loop over nodes costs more in numpy than in Python for so few
            return np.array([self.single.cost_s(plan.tolist()) for plan in plans])
        calls_s, reallocations_s = self.durations(plans)
        ends_at = schedule_batch(self.graph, calls_s, reallocations_s, self.meshes(plans).overlap)
        first, last = ends_at[:, self.graph.end_nodes].max(axis=2).T
        cost: Floats = (last - first) / self.graph.periods
        return cost

    @cached_property
    def single(self) -> Single:
        return Single(self.graph, self.options, self.transfers, self.moves, self.copies)

    def loads_bytes(self, plans: npt.ArrayLike) -> Floats:
        """Bytes on the first GPU of each call's mesh over the iteration, (n, C) -> (n, C); the fullest is among them.

        A GPU holds the resident bytes of all calls whose mesh covers it and the active bytes of the largest of them:
        calls on one GPU take turns.
        """
        array = self.checked(plans)
        parts = [self._loads_bytes(array[at : at + BATCH]) for at in range(0, len(array), BATCH)]
        return np.concatenate(parts) if parts else np.empty(array.shape)

    def _loads_bytes(self, plans: Ints) -> Floats:
        at = plans + self._offsets
        resident = self._columns["resident_bytes"][at].astype(np.float64)
        active = self._columns["active_bytes"][at].astype(np.float64)
        for copy in self.copies:
            resident[:, copy.target] += copy.of(plans)
        return loads_of(self.meshes(plans), resident, active)

    def peak_bytes(self, plans: npt.ArrayLike) -> Floats:
        """Bytes on the fullest GPU over the iteration, (n, C) -> (n,)."""
        peak: Floats = self.loads_bytes(plans).max(axis=1)
        return peak
