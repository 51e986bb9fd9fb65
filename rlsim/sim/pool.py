"""GPUs as exclusive resources: a call starts when every GPU of its mesh is free.

First come, first served, but for weight syncs: one goes before the generations that wait. Where steps overlap, the next
generation may have waited for longer than the sync of an earlier step, and that step's trainer would stand still for as
long as it takes. (Without overlap no generation can wait while weights are still to come.) And but for guests: who only
borrows GPUs that others leave idle goes after all of these.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from math import inf
from operator import attrgetter
from typing import NamedTuple

import simpy

from rlsim.workflow.graph import CallKind

_rank = attrgetter("rank")


class _Waiting(NamedTuple):
    rank: tuple[float, int, int]  # its place in the order of all that wait
    gpus: frozenset[int]
    granted: simpy.Event


class GpuPool:
    """Hands out sets of GPUs. Calls that want none of the GPUs that a call waits for pass it, and weight syncs do."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._busy: set[int] = set()
        self._calls = 0
        self._queues: defaultdict[int, list[_Waiting]] = defaultdict(list)  # by GPU, in the order of ranks
        self._generations: dict[simpy.Event, _Waiting] = {}  # those that wait
        self.on_wait: Callable[[frozenset[int]], None] | None = None  # is told what a call waits for, as it begins to

    def acquire(self, gpus: Iterable[int], kind: CallKind, *, guest: bool = False) -> simpy.Event:
        """An event that fires when all of `gpus` are the caller's, a call of that kind; at once if they are free.

        A `guest` waits behind everybody else, who may ask later than it does; `withdraw` ends its wait.
        """
        self._calls += 1
        rank: tuple[float, int, int] = (self._calls, 1, 0)
        if guest:
            rank = (inf, 1, self._calls)
        elif kind == "sync" and self._generations:
            rank = (min(map(_rank, self._generations.values()))[0], 0, self._calls)
        call = _Waiting(rank, frozenset(gpus), self._env.event())
        for gpu in call.gpus:
            insort(self._queues[gpu], call, key=_rank)
        if kind == "generate":
            self._generations[call.granted] = call
        self._grant(call)
        if self.on_wait and not call.granted.triggered:
            self.on_wait(call.gpus)
        return call.granted

    def idle(self, gpus: Collection[int]) -> bool:
        """Whether nobody has any of these GPUs, or waits for one."""
        return self._busy.isdisjoint(gpus) and not self.wanted(gpus)

    def wanted(self, gpus: Iterable[int]) -> bool:
        return any(self._queues[gpu] for gpu in gpus)

    def release(self, gpus: Iterable[int]) -> None:
        freed = set(gpus)
        self._busy -= freed
        self._serve(freed)

    def withdraw(self, granted: simpy.Event) -> None:
        """Who waits for this event does so no more, and got nothing."""
        for gpu, queue in self._queues.items():
            self._queues[gpu] = [call for call in queue if call.granted is not granted]
        self._serve(self._queues)

    def _serve(self, freed: Iterable[int]) -> None:
        # Only a call that is the first to want each of its GPUs can have them.
        firsts = {queue[0].rank: queue[0] for gpu in freed if (queue := self._queues[gpu])}
        for rank in sorted(firsts):
            self._grant(firsts[rank])

    def _grant(self, call: _Waiting) -> None:
        """Give the call its GPUs if they are free and nobody else waits for one of them before it."""
        queues = [self._queues[gpu] for gpu in call.gpus]
        if self._busy.isdisjoint(call.gpus) and all(queue[0] is call for queue in queues):
            for queue in queues:
                del queue[0]
            self._busy |= call.gpus
            self._generations.pop(call.granted, None)
            call.granted.succeed()
