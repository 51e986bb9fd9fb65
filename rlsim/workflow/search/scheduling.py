"""List scheduling of calls on exclusive GPUs.

The rule (Mei et al. 2024, REAL, Algorithm 1; first come first served, as the simulator hands out GPUs): of the nodes
whose parents are done, take the one that became ready first; it starts when it is ready and every node taken before it
that shares a GPU with it has ended. Nothing is passed over, so nothing is filled in behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Graph:
    """Calls and reallocations of several iterations, and which waits for which.

    A *kind* is a call (0 to C - 1) or a reallocation (C to C + R - 1), a *node* a kind in one iteration. Nodes are
    numbered in the order that decides between equal ready times: by iteration, then by `order`, a reallocation just
    before its target (with a lag above 1: just after it, see `Reallocation`). `ended_by`: the kinds whose ends are the
    end of an iteration, all calls or, where there are any, the reallocations with a lag above 1. What counts are the
    `periods` from the end of iteration number `first` on: those before fill the pipeline and settle.
    """

    def __init__(
        self,
        calls: Sequence[str],
        dependencies: Sequence[tuple[str, str, int]],
        reallocations: Sequence[tuple[str, str, int]],
        iterations: int,
        order: Sequence[str] | None = None,
    ) -> None:
        self.calls, self.iterations = tuple(calls), iterations
        self.names = (*calls, *(f"{source} -> {target}" for source, target, _ in reallocations))
        # Parents of each kind as (kind, lag); the ends of each reallocation as calls.
        self.parents: list[list[tuple[int, int]]] = [[] for _ in self.names]
        for source, target, lag in dependencies:
            self.parents[calls.index(target)].append((calls.index(source), lag))
        self.ends = [(calls.index(source), calls.index(target)) for source, target, _ in reallocations]
        lags = [move[2] for move in reallocations]
        for move, ((made_by, used_by), lag) in enumerate(zip(self.ends, lags, strict=True), start=len(calls)):
            if lag == 1:
                self.parents[move].append((made_by, 1))
                self.parents[used_by].append((move, 0))
            else:
                after = [call for call, parents in enumerate(self.parents) if (used_by, 0) in parents]
                self.parents[move] += [(made_by, lag - 1), (used_by, 0)]
                self.parents[used_by].append((move, 1))
                for call in after:
                    self.parents[call].append((move, 0))
        self.ahead = [move for move, lag in enumerate(lags, start=len(calls)) if lag > 1]
        self.ended_by = self.ahead or list(range(len(calls)))
        self._filled = max(lags, default=1) - 1  # the first iteration with parameters that lag
        self.first = 2 * self._filled
        self.periods = iterations - 1 - self.first
        self.order = self._kinds(order)

    def _kinds(self, order: Sequence[str] | None) -> tuple[int, ...]:
        """Kinds in the order that decides between equal ready times."""
        calls = range(len(self.calls))
        needs = {c: [p for p, lag in self.parents[c] if lag == 0 and p in calls] for c in calls}
        done = [*map(self.calls.index, order)] if order else [*TopologicalSorter(needs).static_order()]
        kinds: list[int] = []
        for call in done:
            moves = [len(self.calls) + r for r, (_, target) in enumerate(self.ends) if target == call]
            after = [move for move in moves if move in self.ahead]
            kinds += [*(move for move in moves if move not in after), call, *after]
        return tuple(kinds)

    @cached_property
    def nodes(self) -> list[tuple[int, int]]:
        """(iteration, kind) of every node; parameters that lag are numbered with what else their source makes ready."""
        early = dict.fromkeys(self.ahead, self._filled - 1)
        every = [(k, kind) for k in range(self.iterations) for kind in self.order if k >= self._since(kind)]
        return sorted(every, key=lambda node: (node[0] - early.get(node[1], 0), self.order.index(node[1])))

    def place(self, node: int) -> tuple[int, int]:
        """A sort key: every node sorts after the nodes that it waits for."""
        iteration, kind = self.nodes[node]
        return iteration, self.order.index(kind)

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        return {node: number for number, node in enumerate(self.nodes)}

    def node(self, iteration: int, kind: int) -> int:
        return self._numbers[iteration, kind]

    def _since(self, kind: int) -> int:
        """The first iteration that has this kind: calls that run ahead start on initial parameters."""
        return self._filled if kind in self.ahead else 0

    @cached_property
    def node_parents(self) -> list[list[int]]:
        return [
            sorted({self.node(k - lag, p) for p, lag in self.parents[kind] if k - lag >= self._since(p)})
            for k, kind in self.nodes
        ]

    @cached_property
    def node_children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.nodes]
        for node, parents in enumerate(self.node_parents):
            for parent in parents:
                children[parent].append(node)
        return children

    @cached_property
    def end_nodes(self) -> list[list[int]]:
        """The nodes whose ends are the end of the first and of the last iteration that count."""
        return [[self.node(k, kind) for kind in self.ended_by] for k in (self.first, self.iterations - 1)]


def schedule(
    graph: Graph, calls_s: Sequence[float], reallocations_s: Sequence[float], meshes: Sequence[tuple[int, int]]
) -> list[tuple[float, float]]:
    """Start and end of every node of one plan, from each call's seconds and GPUs (first, last + 1)."""
    seconds = [*calls_s, *reallocations_s]
    # GPU ranges that a kind holds. A reallocation without seconds holds none and takes no turn.
    held = [[mesh] for mesh in meshes]
    held += [[meshes[s], meshes[t]] if seconds[len(meshes) + r] > 0 else [] for r, (s, t) in enumerate(graph.ends)]
    sharing = [
        [k for k, other in enumerate(held) if any(a < d and c < b for a, b in mine for c, d in other)] for mine in held
    ]
    free_at = [0.0] * len(held)  # by kind: when the nodes taken so far leave all of its GPUs
    ready_at = [0.0] * len(graph.nodes)
    missing = [len(parents) for parents in graph.node_parents]
    spans = [(0.0, 0.0)] * len(graph.nodes)
    nodes, node_children = graph.nodes, graph.node_children
    queue = [(0.0, node) for node, count in enumerate(missing) if count == 0]
    while queue:
        ready, node = heapq.heappop(queue)
        kind = nodes[node][1]
        start = max(ready, free_at[kind])
        end = start + seconds[kind]
        spans[node] = (start, end)
        for other in sharing[kind]:
            if free_at[other] < end:
                free_at[other] = end
        for child in node_children[node]:
            if ready_at[child] < end:
                ready_at[child] = end
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(queue, (ready_at[child], child))
    return spans
