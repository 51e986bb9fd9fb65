"""Seconds and bytes of one plan at a time in plain Python: what a single chain asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsim.search.options import Options, PairCost
from rlsim.search.scheduling import Graph, schedule_one

REMEMBERED = 1_000_000  # pairs of options whose cost is kept, per edge


class Single:
    """Costs of one plan, a list of option indices that must be valid; each pair of options is asked for once."""

    def __init__(
        self,
        graph: Graph,
        options: Sequence[Options],
        transfers: Sequence[PairCost],
        moves: Sequence[PairCost],
        copies: Sequence[PairCost],
    ) -> None:
        self.graph = graph
        self._times: list[list[float]] = [o.time_s.tolist() for o in options]
        self._meshes = [list(zip(o.first_gpu.tolist(), (o.first_gpu + o.gpus).tolist(), strict=True)) for o in options]
        self._resident: list[list[float]] = [o.resident_bytes.tolist() for o in options]
        self._active: list[list[float]] = [o.active_bytes.tolist() for o in options]
        self._transfers, self._moves, self._copies = (
            [_Remembered(pair) for pair in pairs] for pairs in (transfers, moves, copies)
        )
        self._first_nodes, self._last_nodes = graph.end_nodes.tolist()

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
        return schedule_one(self.graph, *self.seconds(plan), self.meshes(plan))

    def cost_s(self, plan: list[int]) -> float:
        return self.iteration_s(self.spans(plan))

    def iteration_s(self, spans: Sequence[tuple[float, float]]) -> float:
        """Seconds of an iteration in a schedule, from the start and end of every node."""
        first = max(spans[node][1] for node in self._first_nodes)
        last = max(spans[node][1] for node in self._last_nodes)
        return float(last - first) / self.graph.periods

    def peak_bytes(self, plan: list[int]) -> float:
        resident = [values[option] for values, option in zip(self._resident, plan, strict=True)]
        active = [values[option] for values, option in zip(self._active, plan, strict=True)]
        for copy in self._copies:
            resident[copy.pair.target] += copy.of(plan)
        meshes, peak = self.meshes(plan), 0.0
        for gpu in {first for first, _ in meshes}:
            there = [call for call, (first, last) in enumerate(meshes) if first <= gpu < last]
            peak = max(peak, sum(resident[call] for call in there) + max(active[call] for call in there))
        return peak


class _Remembered:
    """A cost between the options of two calls, each asked for once."""

    def __init__(self, pair: PairCost) -> None:
        self.pair = pair
        self._known: dict[tuple[int, int], float] = {}

    def of(self, plan: list[int]) -> float:
        options = (plan[self.pair.source], plan[self.pair.target])
        value = self._known.get(options)
        if value is None:
            value = float(self.pair.of(np.array([plan], dtype=np.int64))[0])
            if len(self._known) < REMEMBERED:
                self._known[options] = value
        return value
