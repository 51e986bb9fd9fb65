"""The plan problem as arrays: the seconds and bytes of whole plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlsim.errors import ConfigError
from rlsim.workflow.search.options import Dependency, Meshes, OfPair, Options, PairCost, Reallocation
from rlsim.workflow.search.scheduling import Floats, Graph, Ints, schedule

REMEMBERED = 1_000_000  # pairs of options whose cost is kept, per edge


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

    # ---- many plans -------------------------------------------------------------------------------------------------

    def checked(self, plans: npt.ArrayLike) -> Ints:
        """Plans as (n, C) integers; raises `ConfigError` where an index is no option of its call."""
        array = np.asarray(plans, dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != len(self.calls):
            raise ConfigError(f"plans must be (n, {len(self.calls)}), not {array.shape}")
        if len(array) and ((array < 0) | (array >= self.sizes)).any():
            row, call = np.argwhere((array < 0) | (array >= self.sizes))[0]
            raise ConfigError(f"the call {self.calls[call]} has no option {array[row, call]}")
        return array

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[np.float64] | Ints]:
        """All calls' options one after another, for one look-up per quantity."""
        names = ("first_gpu", "gpus", "time_s", "resident_bytes", "active_bytes")
        return {name: np.concatenate([getattr(options, name) for options in self.options]) for name in names}

    @cached_property
    def _offsets(self) -> Ints:
        return np.cumsum(self.sizes) - self.sizes

    def _of(self, name: str, plans: Ints) -> Floats:
        found: Floats = self._columns[name][plans + self._offsets].astype(np.float64)
        return found

    def meshes(self, plans: Ints) -> Meshes:
        """GPUs of each call of checked plans."""
        first, gpus = (self._of(name, plans).astype(np.int64) for name in ("first_gpu", "gpus"))
        return Meshes(first, first + gpus)

    def durations(self, plans: Ints) -> tuple[Floats, Floats]:
        """Seconds of calls, transfers included (n, C), and of reallocations (n, R), of checked plans.

        Raises `ConfigError` if a transfer or reallocation has no cost (NaN), or an infinite or negative one.
        """
        calls_s = self._of("time_s", plans)
        for pair in self.transfers:
            calls_s[:, pair.target] += pair.of(plans[:, pair.source], plans[:, pair.target])
        moves_s = [pair.of(plans[:, pair.source], plans[:, pair.target]) for pair in self.moves]
        return calls_s, np.stack(moves_s, axis=1) if moves_s else np.empty((len(plans), 0))

    def cost_s(self, plans: npt.ArrayLike) -> Floats:
        """Seconds of an iteration of each plan: (end of the last one - end of the first that counts) / those after it.

        `plans` (n, C) -> (n,). A plan's calls are list-scheduled (`rlsim.workflow.search.scheduling`). Memory is not
        looked at. An iteration ends with the last of its calls; where a call runs ahead of the weights that it is given
        (a reallocation with a lag above 1), with these. Where dependencies have lags above 1, the first iterations run
        ahead and the last ones catch up: a few iterations then show too short a time on shared GPUs, and `iterations`
        should be many times the lag. Raises `ConfigError` for indices out of range and for missing costs.
        """
        return np.array([self.single.cost_s(plan) for plan in self.checked(plans).tolist()])

    @cached_property
    def single(self) -> Single:
        return Single(self)

    def loads_bytes(self, plans: npt.ArrayLike) -> Floats:
        """Bytes on the first GPU of each call's mesh over the iteration, (n, C) -> (n, C); the fullest is among them.

        A GPU holds the resident bytes of all calls whose mesh covers it and the active bytes of the largest of them:
        calls on one GPU take turns.
        """
        plans = self.checked(plans)
        resident, active = self._of("resident_bytes", plans), self._of("active_bytes", plans)
        for pair in self.copies:
            resident[:, pair.target] += pair.of(plans[:, pair.source], plans[:, pair.target])
        covers = self.meshes(plans).covers
        kept = np.matmul(covers.astype(np.float64), resident[:, :, None])[:, :, 0]
        loads: Floats = kept + (covers * active[:, None, :]).max(axis=2)
        return loads

    def peak_bytes(self, plans: npt.ArrayLike) -> Floats:
        """Bytes on the fullest GPU over the iteration, (n, C) -> (n,)."""
        peak: Floats = self.loads_bytes(plans).max(axis=1)
        return peak


class Single:
    """Seconds of one plan at a time, a list of valid option indices, in plain Python; no pair is asked for twice."""

    def __init__(self, problem: Problem) -> None:
        self.graph, options = problem.graph, problem.options
        self._times: list[list[float]] = [o.time_s.tolist() for o in options]
        self._meshes = [list(zip(o.first_gpu.tolist(), (o.first_gpu + o.gpus).tolist(), strict=True)) for o in options]
        self._transfers = [_Remembered(pair) for pair in problem.transfers]
        self._moves = [_Remembered(pair) for pair in problem.moves]

    def meshes(self, plan: list[int]) -> list[tuple[int, int]]:
        """First GPU of each call's mesh, and the one after its last."""
        return [meshes[option] for meshes, option in zip(self._meshes, plan, strict=True)]

    def seconds(self, plan: list[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call, transfers included, and of each reallocation."""
        calls_s = [times[option] for times, option in zip(self._times, plan, strict=True)]
        for transfer in self._transfers:
            calls_s[transfer.pair.target] += transfer.of(plan)
        return calls_s, [move.of(plan) for move in self._moves]

    def spans(self, plan: list[int]) -> list[tuple[float, float]]:
        """Start and end of every node of the graph."""
        return schedule(self.graph, *self.seconds(plan), self.meshes(plan))

    def cost_s(self, plan: list[int]) -> float:
        return self.iteration_s(self.spans(plan))

    def iteration_s(self, spans: Sequence[tuple[float, float]]) -> float:
        """Seconds of an iteration in a schedule, from the start and end of every node."""
        first, last = (max(spans[node][1] for node in nodes) for nodes in self.graph.end_nodes)
        return float(last - first) / self.graph.periods


class _Remembered:
    """A cost between the options of two calls, each asked for once."""

    def __init__(self, pair: PairCost) -> None:
        self.pair = pair
        self._known: dict[tuple[int, int], float] = {}

    def of(self, plan: list[int]) -> float:
        options = plan[self.pair.source], plan[self.pair.target]
        value = self._known.get(options)
        if value is None:
            value = float(self.pair.of(*map(np.array, options)))
            if len(self._known) < REMEMBERED:
                self._known[options] = value
        return value
