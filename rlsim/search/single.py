"""Seconds and bytes of one plan at a time in plain Python: what a single chain asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlsim.search.scheduling import schedule_one

if TYPE_CHECKING:
    from rlsim.search.problem import Problem

REMEMBERED = 1_000_000  # pairs of options whose transfer is kept, per edge


class Single:
    """Costs of one plan, a list of option indices that must be valid; each pair of options is asked for once."""

    def __init__(self, problem: Problem) -> None:
        calls = problem.calls.index
        self._problem = problem
        self._times: list[list[float]] = [options.time_s.tolist() for options in problem.options]
        self._first: list[list[int]] = [options.first_gpu.tolist() for options in problem.options]
        self._last: list[list[int]] = [(options.first_gpu + options.gpus).tolist() for options in problem.options]
        self._resident: list[list[float]] = [options.resident_bytes.tolist() for options in problem.options]
        self._active: list[list[float]] = [options.active_bytes.tolist() for options in problem.options]
        self._transfers = [
            _Pairs(problem, calls(edge.source), calls(edge.target), edge.seconds, "transfer", "seconds")
            for edge in problem.dependencies
            if edge.seconds is not None
        ]
        self._reallocations = [
            _Pairs(problem, calls(edge.source), calls(edge.target), edge.seconds, "reallocation", "seconds")
            for edge in problem.reallocations
        ]
        self._copies = [
            _Pairs(problem, calls(edge.source), calls(edge.target), edge.resident_bytes, "copy", "bytes")
            for edge in problem.reallocations
            if edge.resident_bytes is not None
        ]
        nodes = problem.graph.call_nodes.tolist()
        self._first_nodes, self._last_nodes = nodes[: len(problem.calls)], nodes[-len(problem.calls) :]

    def meshes(self, plan: list[int]) -> list[tuple[int, int]]:
        """First GPU of each call's mesh, and the one after its last."""
        return [(first[o], last[o]) for first, last, o in zip(self._first, self._last, plan, strict=True)]

    def seconds(self, plan: list[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call, transfers included, and of each reallocation."""
        calls_s = [times[option] for times, option in zip(self._times, plan, strict=True)]
        for transfer in self._transfers:
            calls_s[transfer.target] += transfer(plan)
        return calls_s, [reallocation(plan) for reallocation in self._reallocations]

    def spans(self, plan: list[int]) -> list[tuple[float, float]]:
        """Start and end of every node of the problem's graph."""
        return schedule_one(self._problem.graph, *self.seconds(plan), self.meshes(plan))

    def cost_s(self, plan: list[int]) -> float:
        """Seconds of an iteration, as `Problem.cost_s`."""
        spans = self.spans(plan)
        first = max(spans[node][1] for node in self._first_nodes)
        last = max(spans[node][1] for node in self._last_nodes)
        return float(last - first) / (self._problem.iterations - 1)

    def peak_bytes(self, plan: list[int]) -> float:
        """Bytes on the fullest GPU, as `Problem.peak_bytes`."""
        resident = [values[option] for values, option in zip(self._resident, plan, strict=True)]
        active = [values[option] for values, option in zip(self._active, plan, strict=True)]
        for copy in self._copies:
            resident[copy.target] += copy(plan)
        meshes, peak = self.meshes(plan), 0.0
        for gpu in {first for first, _ in meshes}:
            there = [call for call, (first, last) in enumerate(meshes) if first <= gpu < last]
            peak = max(peak, sum(resident[call] for call in there) + max(active[call] for call in there))
        return peak


class _Pairs:
    """A cost between the options of two calls, remembered."""

    def __init__(
        self,
        problem: Problem,
        source: int,
        target: int,
        f: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.ArrayLike],
        kind: str,
        unit: str,
    ) -> None:
        self.source, self.target = source, target
        self._problem, self._f, self._kind, self._unit = problem, f, kind, unit
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, plan: list[int]) -> float:
        pair = (plan[self.source], plan[self.target])
        value = self._known.get(pair)
        if value is None:
            row = np.array([plan], dtype=np.int64)
            value = float(self._problem.of_pair(self._f, row, self.source, self.target, self._kind, self._unit)[0])
            if len(self._known) < REMEMBERED:
                self._known[pair] = value
        return value
