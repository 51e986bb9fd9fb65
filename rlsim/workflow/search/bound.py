"""Seconds that no schedule of a plan can beat, without scheduling it; also of plans of which only some calls are known.

Let end(k) be the end of the last call of iteration k. `Problem.cost_s` is (end(K-1) - end(0)) / (K - 1), a difference
(where weights lag, from the first iteration that counts on, in place of 0), so a bound must say what comes after
end(0), and end(0) is the end of some *last call*: one that no other call of its iteration waits for. Hence, with the
last call that really is the last of iteration 0 unknown, the smallest of two kinds of bounds over all last calls a:

- path: the longest chain of nodes from the end of a(0) to the end of a node of iteration K-1;
- work: what one GPU has to do for nodes that descend from a(0) and that iteration K-1 waits for.

**Two last calls.** PPO ends with two (actor and critic train); what descends from critic train alone misses much of the
next iteration, and the bound would be weak. Let r and s be the last calls and assume: all other calls precede both r
and s within an iteration; every call that waits for none of its own iteration waits for r of the one before, itself or
through a reallocation; reallocations start at r or s and end in neither. Then path and work of r alone, its path ending
at r(K-1), are a bound (tests/test_search.py has the proof, and the bound against full enumeration).

**Weights that lag.** Where a call runs ahead of its weights, an iteration ends with these (`Graph.ended_by`), and they
are the last calls of the above.

**Turns.** Between r(k) and r(k+1) calls on one GPU take turns, so under these assumptions a path may also go through
several that do not wait for each other: the shortest first call of the iteration, all others on the GPU, then r.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from rlsim.workflow.search.problem import Meshes, PairCost, Problem
from rlsim.workflow.search.scheduling import Floats, Graph

PAIRS = 20_000_000  # pairs of options, of all edges together, beyond which no bound of all plans is computed


class LowerBound:
    """Lower bounds on `Problem.cost_s` for one problem."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        calls = range(len(graph.calls))
        before = [_ancestors(graph, call) for call in calls]
        lasts = [kind for kind in graph.ended_by if not any(kind in earlier for earlier in before)]
        leads = (r for r in lasts if not graph.ahead and _leads(graph, before, r, [s for s in lasts if s != r]))
        leader = next(leads, None)
        self._calls = len(calls)
        self._gpus, self._periods = problem.gpus, graph.periods
        end = graph.iterations - 1
        if leader is None:
            ends = [graph.node(end, kind) for kind in graph.ended_by]
            self._anchors = [_Anchor(graph, last, ends, needed_by=ends) for last in lasts]
            self._turns = None
        else:
            self._anchors = [_Anchor(graph, leader, [graph.node(end, leader)], needed_by=range(len(graph.nodes)))]
            self._turns = _Turns(graph, before, leader)

    @property
    def counted(self) -> Floats:
        """(C,): the share of each call's work that every bound counts, 0 to 1.

        Hence sum(counted x GPUs x seconds) / GPUs of the cluster is a bound too, the quickest to compute.
        """
        share: Floats = np.min([anchor.counts[: self._calls] for anchor in self._anchors], axis=0) / self._periods
        return share

    def of(
        self, calls_s: Floats, reallocations_s: Floats, meshes: Meshes, elsewhere_gpu_s: Floats | None = None
    ) -> Floats:
        """Bound (n,) from seconds of calls (n, C) and of reallocations (n, R), none of them too high, and meshes.

        A call whose mesh is not known has an empty one (first = last); `elsewhere_gpu_s` (n, C): GPUs x seconds that
        such a call takes at least, 0 for all others.
        """
        seconds = np.concatenate([calls_s, reallocations_s], axis=1)
        covers = meshes.covers.astype(np.float64)
        gpu_s = calls_s * (meshes.last - meshes.first)
        if elsewhere_gpu_s is not None:
            gpu_s = gpu_s + elsewhere_gpu_s
        bounds = [
            np.maximum(anchor.path_s(seconds), anchor.work_s(seconds, covers, gpu_s, self._gpus))
            for anchor in self._anchors
        ]
        bound: Floats = reduce(np.minimum, bounds) / self._periods
        return bound if self._turns is None else np.maximum(bound, self._turns.path_s(seconds, covers))


class _Anchor:
    """The nodes after one last call of iteration 0: chains of them to `ends`, and work that `needed_by` waits for."""

    def __init__(self, graph: Graph, last: int, ends: Sequence[int], needed_by: Iterable[int]) -> None:
        self._graph, self._source = graph, graph.node(graph.first, last)
        after = _reach(graph.node_children[self._source], graph.node_children)
        self._ends = [end for end in ends if end in after]
        on_path = _reach(self._ends, graph.node_parents) & after
        self._steps = [
            (node, graph.nodes[node][1], [p for p in graph.node_parents[node] if p in on_path or p == self._source])
            for node in sorted(on_path, key=graph.place)  # parents come first
        ]
        work = [graph.nodes[node][1] for node in _reach(needed_by, graph.node_parents) & after]
        # How often each kind is counted as work.
        self.counts = np.bincount(work, minlength=len(graph.names)).astype(np.float64)

    def path_s(self, seconds: Floats) -> Floats:
        """Longest chain from the anchor's end, (n,) from the seconds of all kinds (n, C + R)."""
        ends_at: dict[int, Floats] = {self._source: np.zeros(len(seconds))}
        for node, kind, parents in self._steps:
            ends_at[node] = reduce(np.maximum, [ends_at[parent] for parent in parents]) + seconds[:, kind]
        longest: Floats = reduce(np.maximum, [ends_at[end] for end in (*self._ends, self._source)])
        return longest

    def work_s(self, seconds: Floats, covers: Floats, gpu_s: Floats, gpus: int) -> Floats:
        """Work on the GPU that has most, or spread evenly over all, (n,)."""
        calls = len(self._graph.calls)
        counted = seconds * self.counts
        on_gpu = np.matmul(covers, counted[:, :calls, None])[:, :, 0]
        for r, (source, target) in enumerate(self._graph.ends):
            on_gpu += np.maximum(covers[:, :, source], covers[:, :, target]) * counted[:, calls + r, None]
        work: Floats = np.maximum(on_gpu.max(axis=1), gpu_s @ self.counts[:calls] / gpus)
        return work


class _Turns:
    """A bound on the time from call r of one iteration to r of the next, through calls that take turns on a GPU."""

    def __init__(self, graph: Graph, before: list[set[int]], r: int) -> None:
        self._r = r
        self._entries = [call for call in before[r] if not before[call]]
        self._between = [call for call in before[r] if before[call]]
        self._moves = [
            [len(graph.calls) + m for m, (source, target) in enumerate(graph.ends) if (source, target) == (r, entry)]
            for entry in self._entries
        ]

    def path_s(self, seconds: Floats, covers: Floats) -> Floats:
        """The shortest way to any call between, all calls between on one GPU, and r, (n,)."""
        path = seconds[:, self._r]
        if self._entries:
            ways = zip(self._entries, self._moves, strict=True)
            path = path + reduce(np.minimum, [seconds[:, [entry, *moves]].sum(axis=1) for entry, moves in ways])
        if self._between:
            turns = np.matmul(covers[:, :, self._between], seconds[:, self._between, None])
            path = path + turns[:, :, 0].max(axis=1)
        return path


def _leads(graph: Graph, before: list[set[int]], r: int, others: list[int]) -> bool:
    """Whether the path of the last call r alone bounds the cost, by the assumptions under "Two last calls"."""
    lasts, calls = {r, *others}, set(range(len(graph.calls)))
    if len(lasts) > 2 or any(before[last] != calls - lasts for last in lasts):
        return False
    moved = {target for source, target in graph.ends if source == r}
    entries_wait = all(before[call] or (r, 1) in graph.parents[call] or call in moved for call in calls)
    return entries_wait and all(source in lasts and target not in lasts for source, target in graph.ends)


def _ancestors(graph: Graph, call: int) -> set[int]:
    """Calls that precede a call within an iteration."""
    parents = [[p for p, lag in graph.parents[c] if lag == 0 and p < len(graph.calls)] for c in range(len(graph.calls))]
    return _reach(parents[call], parents)


def _reach(starts: Iterable[int], neighbours: list[list[int]]) -> set[int]:
    """The nodes that can be reached from any of `starts`, with `starts` (graphs here have no cycles)."""
    seen: set[int] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += neighbours[node]
    return seen


def least_s(problem: Problem) -> float:
    """Seconds of an iteration that no plan of a problem beats; 0 where there are too many plans to say.

    Every call and reallocation takes the least seconds and work that any option allows, wherever its GPUs are.
    """
    if (
        sum(int(problem.sizes[p.source] * problem.sizes[p.target]) for p in (*problem.transfers, *problem.moves))
        > PAIRS
    ):
        return 0.0
    calls_s = np.array([options.time_s.min() for options in problem.options])
    by_option = [options.time_s.copy() for options in problem.options]
    for pair in problem.transfers:
        into = _least_into(problem, pair)
        calls_s[pair.target] += into.min()
        by_option[pair.target] += into
    moves_s = np.array([_least_into(problem, pair).min() for pair in problem.moves])
    work = np.array([(o.gpus * seconds).min() for o, seconds in zip(problem.options, by_option, strict=True)])
    anywhere = np.zeros((1, len(calls_s)), dtype=np.int64)
    return float(LowerBound(problem).of(calls_s[None], moves_s[None], Meshes(anywhere, anywhere), work[None])[0])


def _least_into(problem: Problem, pair: PairCost) -> Floats:
    """The least cost of any source for every option of the target."""
    source, target = (np.arange(problem.sizes[call]) for call in (pair.source, pair.target))
    if pair.source == pair.target:  # a call to itself an iteration later has the same option
        return pair.of(target, target)
    least: Floats = pair.of(source[:, None], target[None]).min(axis=0)
    return least
