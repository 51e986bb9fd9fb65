"""The plan problem as arrays: options of every call, what they wait for, and the seconds and bytes of whole plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlsim.errors import ConfigError
from rlsim.search.scheduling import Graph, schedule_batch
from rlsim.search.single import Single

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# f(source_indices, target_indices) of two calls' options, of any shapes that broadcast -> an array of that shape.
OfPair = Callable[[Ints, Ints], npt.ArrayLike]

BATCH = 4096  # plans scheduled at once: their arrays stay in the cache of a core


@dataclass(frozen=True, eq=False)
class Options:
    """Where and how one call may run: equally long 1-D arrays, one entry per option.

    An option's mesh is the GPUs `first_gpu` to `first_gpu + gpus - 1`. `time_s` > 0: duration without data transfers.
    `resident_bytes`: kept on each GPU of the mesh during the whole iteration (optimizer states, parameters that stay).
    `active_bytes`: needed besides on each GPU while the call runs. Raises `ConfigError` for arrays of different
    lengths, empty ones, and values that are missing (NaN), infinite or out of range.
    """

    call: str
    first_gpu: Ints
    gpus: Ints
    time_s: Floats
    resident_bytes: Floats
    active_bytes: Floats

    def __post_init__(self) -> None:
        for name in ("first_gpu", "gpus", "time_s", "resident_bytes", "active_bytes"):
            values = np.asarray(getattr(self, name))
            if values.ndim != 1 or len(values) != len(self.time_s):
                raise ConfigError(f"options of {self.call}: {name} must be one value per option")
            if len(values) == 0:
                raise ConfigError(f"the call {self.call} has no option")
            bad = ~np.isfinite(values) | (values < 0) | ((values == 0) & (name in ("gpus", "time_s")))
            if bad.any():
                at = int(bad.argmax())
                raise ConfigError(f"option {at} of {self.call}: {name} is {values[at]}")
            if name in ("first_gpu", "gpus"):
                if (values != np.floor(values)).any():
                    raise ConfigError(f"options of {self.call}: {name} must be whole numbers")
                object.__setattr__(self, name, values.astype(np.int64))
            else:
                object.__setattr__(self, name, values.astype(np.float64))

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
    """

    source: str
    target: str
    seconds: OfPair
    resident_bytes: OfPair | None = None


@dataclass(frozen=True)
class Span:
    """One call, or one reallocation (named `source -> target`), of one iteration in a schedule."""

    name: str
    iteration: int
    start_at: float
    end_at: float


@dataclass(frozen=True)
class Meshes:
    """GPUs of each call in each plan: `first` to `last` - 1, both (n, C)."""

    first: Ints
    last: Ints

    @cached_property
    def overlap(self) -> Bools:
        """(n, C, C): whether two calls share a GPU."""
        first, last = self.first, self.last
        return (first[:, :, None] < last[:, None, :]) & (first[:, None, :] < last[:, :, None])

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

    `gpus`: of the cluster; `memory_bytes`: of each GPU; `iterations` (at least 2) are concatenated, so that calls of
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
        if self.iterations < 2:
            raise ConfigError(f"the seconds of an iteration need at least 2 iterations, not {self.iterations}")
        if not self.memory_bytes > 0:
            raise ConfigError(f"a GPU's memory must be positive, not {self.memory_bytes} bytes")
        for options in self.options:
            if (options.first_gpu + options.gpus).max() > self.gpus:
                raise ConfigError(f"an option of {options.call} reaches beyond the {self.gpus} GPUs")
        pairs = [(edge.source, edge.target) for edge in self.reallocations]
        if len(set(pairs)) != len(pairs):
            raise ConfigError("two reallocations have the same source and target")
        edges = [(edge.source, edge.target, edge.lag) for edge in self.dependencies]
        object.__setattr__(self, "graph", Graph(self.calls, edges, pairs, self.iterations, self.order))

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the calls, in the order of a plan's entries."""
        return tuple(options.call for options in self.options)

    @cached_property
    def sizes(self) -> Ints:
        """(C,): how many options each call has."""
        return np.array([len(options) for options in self.options])

    @property
    def space(self) -> float:
        """How many plans there are."""
        return float(np.prod(self.sizes.astype(float)))

    @cached_property
    def _offsets(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[np.float64] | Ints]:
        """All calls' options one after another, for one look-up per quantity."""
        names = ("first_gpu", "gpus", "time_s", "resident_bytes", "active_bytes")
        return {name: np.concatenate([getattr(options, name) for options in self.options]) for name in names}

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
        for edge in self.dependencies:
            if edge.seconds is not None:
                source, target = self.calls.index(edge.source), self.calls.index(edge.target)
                calls_s[:, target] += self.of_pair(edge.seconds, plans, source, target, "transfer", "seconds")
        reallocations_s = np.empty((len(plans), len(self.reallocations)))
        for r, move in enumerate(self.reallocations):
            source, target = self.calls.index(move.source), self.calls.index(move.target)
            reallocations_s[:, r] = self.of_pair(move.seconds, plans, source, target, "reallocation", "seconds")
        return calls_s, reallocations_s

    def of_pair(self, f: OfPair, plans: Ints, source: int, target: int, kind: str, unit: str) -> Floats:
        """`f` of the options that plans give to two calls, (n,); raises `ConfigError` where it has no valid value."""
        values = np.broadcast_to(np.asarray(f(plans[:, source], plans[:, target]), dtype=float), (len(plans),))
        if not (values.min(initial=0.0) >= 0 and values.max(initial=0.0) < np.inf):  # NaN fails both comparisons
            row = int((~(values >= 0) | np.isinf(values)).argmax())
            raise ConfigError(
                f"the {kind} {self.calls[source]} -> {self.calls[target]} has no valid cost between options "
                f"{plans[row, source]} and {plans[row, target]}: {values[row]} {unit}"
            )
        return values

    def cost_s(self, plans: npt.ArrayLike) -> Floats:
        """Seconds of an iteration of each plan: (end of the last iteration - end of the first) / (iterations - 1).

        `plans` (n, C) -> (n,). A plan's calls are list-scheduled (see `rlsim.search.scheduling`). Memory is not looked
        at. Where dependencies have lags above 1, the first iterations run ahead and the last ones catch up: a few
        iterations then show too short a time on shared GPUs, and `iterations` should be many times the lag. Raises
        `ConfigError` for indices out of range and for missing costs.
        """
        array = self.checked(plans)
        parts = [self._cost_s(array[at : at + BATCH]) for at in range(0, len(array), BATCH)]
        return np.concatenate(parts) if parts else np.empty(0)

    def _cost_s(self, plans: Ints) -> Floats:
        if len(plans) < 8:  # the loop over nodes costs more in numpy than in Python for so few
            return np.array([self.single.cost_s(plan.tolist()) for plan in plans])
        calls_s, reallocations_s = self.durations(plans)
        ends_at = schedule_batch(self.graph, calls_s, reallocations_s, self.meshes(plans).overlap)
        iterations = ends_at[:, self.graph.call_nodes].reshape(len(plans), self.iterations, -1).max(axis=2)
        cost: Floats = (iterations[:, -1] - iterations[:, 0]) / (self.iterations - 1)
        return cost

    @cached_property
    def single(self) -> Single:
        """The same costs for one plan at a time, in plain Python."""
        return Single(self)

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
        for edge in self.reallocations:
            if edge.resident_bytes is not None:
                source, target = self.calls.index(edge.source), self.calls.index(edge.target)
                resident[:, target] += self.of_pair(edge.resident_bytes, plans, source, target, "copy", "bytes")
        return loads_of(self.meshes(plans), resident, active)

    def peak_bytes(self, plans: npt.ArrayLike) -> Floats:
        """Bytes on the fullest GPU over the iteration, (n, C) -> (n,)."""
        peak: Floats = self.loads_bytes(plans).max(axis=1)
        return peak

    def fits(self, plans: npt.ArrayLike) -> Bools:
        """Whether each plan's fullest GPU has room for it, (n, C) -> (n,)."""
        fits: Bools = self.peak_bytes(plans) <= self.memory_bytes
        return fits

    def schedule(self, plan: Sequence[int] | Ints) -> list[Span]:
        """Who runs when in one plan, by start: calls and reallocations of all iterations. Same rule as `cost_s`."""
        checked: list[int] = self.checked([list(plan)])[0].tolist()
        spans, names = self.single.spans(checked), self.graph.names
        _, reallocations_s = self.single.seconds(checked)
        free = {name for name, s in zip(names[len(self.calls) :], reallocations_s, strict=True) if s == 0}
        listed = [
            Span(names[kind], iteration, *spans[node])
            for node, (iteration, kind) in enumerate(self.graph.nodes)
            if names[kind] not in free
        ]
        return sorted(listed, key=lambda span: (span.start_at, span.end_at))


def loads_of(meshes: Meshes, resident_bytes: Floats, active_bytes: Floats) -> Floats:
    """Sum of resident bytes plus largest active bytes on the first GPU of each mesh; all (n, C)."""
    covers = meshes.covers
    resident = np.matmul(covers.astype(np.float64), resident_bytes[:, :, None])[:, :, 0]
    loads: Floats = resident + (covers * active_bytes[:, None, :]).max(axis=2)
    return loads
