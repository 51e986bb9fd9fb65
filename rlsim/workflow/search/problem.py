"""The plan problem as arrays: options of calls, costs between those of two, the seconds and bytes of whole plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlsim.workflow.search.scheduling import Bools, Floats, Graph, Ints, schedule

REMEMBERED = 1_000_000  # pairs of options whose cost is kept, per edge


# f(source_indices, target_indices) of two calls' options, of any shapes that broadcast -> an array of that shape.
OfPair = Callable[[Ints, Ints], npt.ArrayLike]


@dataclass(frozen=True, eq=False)
class Options:
    """Where and how one call may run: equally long 1-D arrays, one entry per option.

    An option's mesh is the GPUs `first_gpu` to `first_gpu + gpus - 1`. `time_s` > 0: duration without data transfers.
    `resident_bytes`: kept on each GPU of the mesh during the whole iteration (optimizer states, parameters that stay).
    `active_bytes`: needed besides on each GPU while the call runs.
    """

    call: str
    first_gpu: Ints
    gpus: Ints
    time_s: Floats
    resident_bytes: Floats
    active_bytes: Floats

    def __post_init__(self) -> None:
        for name in ("first_gpu", "gpus"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))

    def __len__(self) -> int:
        return len(self.time_s)

    @cached_property
    def by_time(self) -> Ints:
        """All indices, fastest first, equal ones in their order."""
        return np.argsort(self.time_s, kind="stable")


@dataclass(frozen=True)
class Dependency:
    """`target` of iteration k needs what `source` of iteration k - `lag` produces.

    `seconds`: transfer of the data, by option of source and target. The target receives while it holds its mesh, so it
    lengthens the target, by the sum over its inputs; in the first `lag` iterations too, so that all are alike.
    """

    source: str
    target: str
    lag: int = 0
    seconds: OfPair | None = None


@dataclass(frozen=True)
class Reallocation:
    """Parameters that `source` (train) updates go to `target` (generate or inference of the same model).

    A node of its own before `target` of iteration k: ready when `source` of iteration k - 1 is done (at 0 for k = 0),
    it holds both meshes alone for `seconds`. Zero seconds: no node, but `target` still waits for `source`.
    `resident_bytes`: what the target's copy keeps on each GPU of the target's mesh over the whole iteration.

    With a `lag` above 1 the target runs ahead: its iteration k + 1 has the parameters of `source` in iteration
    k + 1 - `lag`, no newer ones. So they go out between the target's iterations k and k + 1, and calls that need what
    the target makes in iteration k begin after that (docs/engine.md, "Exact lags").

    `asleep_s`: by the target's option, seconds more where a call of `beside` has GPUs of its mesh: it sleeps meanwhile.
    """

    source: str
    target: str
    seconds: OfPair
    resident_bytes: OfPair | None = None
    lag: int = 1
    asleep_s: Floats | None = None
    beside: Sequence[str] = ()


@dataclass(frozen=True)
class PairCost:
    """A cost between the options of two calls: the seconds of a transfer or reallocation, or the bytes of a copy."""

    source: int  # place of the call in a plan
    target: int
    cost: OfPair

    def of(self, source: Ints, target: Ints) -> Floats:
        """The cost of options of the two calls, indices that broadcast to the shape of what is returned."""
        source, target = np.broadcast_arrays(source, target)
        return np.broadcast_to(np.asarray(self.cost(source, target), dtype=float), source.shape)


@dataclass(frozen=True)
class Meshes:
    """GPUs of each call in each plan: `first` to `last` - 1, both (n, C)."""

    first: Ints
    last: Ints

    @cached_property
    def covers(self) -> Bools:
        """(n, C, C): whether call j's mesh holds the first GPU of call i's mesh, at [., i, j].

        Sums over intervals that hold a GPU are largest at some interval's first GPU, so no other need be looked at.
        """
        points = self.first[:, :, None]
        return (self.first[:, None, :] <= points) & (points < self.last[:, None, :])


@dataclass(frozen=True, eq=False)
class Problem:
    """Calls of an RLHF iteration with their options; a plan is one option index per call, in the order of `options`.

    `gpus`: of the cluster; `memory_bytes`: of each GPU; `iterations` are concatenated, so that calls of
    the next may overlap this one's. `order`: call names, each after those of the same iteration that it needs; decides
    between calls that become ready at the same moment (default: the first such order).
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

    def _pair(self, edge: Dependency | Reallocation, cost: OfPair) -> PairCost:
        return PairCost(self.calls.index(edge.source), self.calls.index(edge.target), cost)

    @cached_property
    def transfers(self) -> list[PairCost]:
        """Seconds by which data from another call lengthens a call."""
        return [self._pair(e, e.seconds) for e in self.dependencies if e.seconds is not None]

    @cached_property
    def moves(self) -> list[PairCost]:
        return [self._pair(edge, edge.seconds) for edge in self.reallocations]

    @cached_property
    def sleeps(self) -> list[tuple[int, int, list[int], Floats]]:
        """Place of a reallocation, of its target, and of the calls beside it; the seconds that it is asleep."""
        places = self.calls.index
        return [
            (at, places(edge.target), [*map(places, edge.beside)], edge.asleep_s)
            for at, edge in enumerate(self.reallocations)
            if edge.asleep_s is not None and edge.asleep_s.any()
        ]

    @cached_property
    def copies(self) -> list[PairCost]:
        """Bytes that reallocated parameters take."""
        return [self._pair(e, e.resident_bytes) for e in self.reallocations if e.resident_bytes is not None]

    # ---- many plans -------------------------------------------------------------------------------------------------

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[np.float64] | Ints]:
        """All calls' options one after another, for one look-up per quantity."""
        names = ("first_gpu", "gpus", "time_s", "resident_bytes", "active_bytes")
        return {name: np.concatenate([getattr(options, name) for options in self.options]) for name in names}

    def _of(self, name: str, plans: Ints) -> Floats:
        found: Floats = self._columns[name][plans + self.sizes.cumsum() - self.sizes].astype(np.float64)
        return found

    def meshes(self, plans: Ints) -> Meshes:
        """GPUs of each call of plans (n, C)."""
        first, gpus = (self._of(name, plans).astype(np.int64) for name in ("first_gpu", "gpus"))
        return Meshes(first, first + gpus)

    def durations(self, plans: Ints) -> tuple[Floats, Floats]:
        """Seconds of calls, transfers included (n, C), and of reallocations (n, R), of plans (n, C)."""
        calls_s = self._of("time_s", plans)
        for pair in self.transfers:
            calls_s[:, pair.target] += pair.of(plans[:, pair.source], plans[:, pair.target])
        moves_s = [pair.of(plans[:, pair.source], plans[:, pair.target]) for pair in self.moves]
        for at, target, beside, asleep_s in self.sleeps:
            meshes, own = self.meshes(plans), [target]
            apart = (meshes.last[:, beside] <= meshes.first[:, own]) | (meshes.last[:, own] <= meshes.first[:, beside])
            moves_s[at] = moves_s[at] + asleep_s[plans[:, target]] * ~apart.all(axis=1)
        return calls_s, np.stack(moves_s, axis=1) if moves_s else np.empty((len(plans), 0))

    def cost_s(self, plans: npt.ArrayLike) -> Floats:
        """Seconds of an iteration of each plan: (end of the last one - end of the first that counts) / those after it.

        `plans` (n, C) -> (n,). A plan's calls are list-scheduled (`rlsim.workflow.search.scheduling`). Memory is not
        looked at. An iteration ends with the last of its calls; where a call runs ahead of the weights that it is given
        (a reallocation with a lag above 1), with these. Where dependencies have lags above 1, the first iterations run
        ahead and the last ones catch up: a few iterations then show too short a time on shared GPUs, and `iterations`
        should be many times the lag.
        """
        return np.array([self.single.cost_s(plan) for plan in np.asarray(plans).tolist()])

    @cached_property
    def single(self) -> Single:
        return Single(self)

    def loads_bytes(self, plans: npt.ArrayLike) -> Floats:
        """Bytes on the first GPU of each call's mesh over the iteration, (n, C) -> (n, C); the fullest is among them.

        A GPU holds the resident bytes of all calls whose mesh covers it and the active bytes of the largest of them:
        calls on one GPU take turns.
        """
        plans = np.asarray(plans, dtype=np.int64)
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
        self._sleeps = [(*places, asleep_s.tolist()) for *places, asleep_s in problem.sleeps]

    def meshes(self, plan: list[int]) -> list[tuple[int, int]]:
        """First GPU of each call's mesh, and the one after its last."""
        return [meshes[option] for meshes, option in zip(self._meshes, plan, strict=True)]

    def seconds(self, plan: list[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call, transfers included, and of each reallocation."""
        calls_s = [times[option] for times, option in zip(self._times, plan, strict=True)]
        for transfer in self._transfers:
            calls_s[transfer.pair.target] += transfer.of(plan)
        moves_s = [move.of(plan) for move in self._moves]
        for at, target, beside, asleep_s in self._sleeps:
            meshes = self.meshes(plan)
            first, last = meshes[target]
            if any(meshes[call][0] < last and first < meshes[call][1] for call in beside):
                moves_s[at] += asleep_s[plan[target]]
        return calls_s, moves_s

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
