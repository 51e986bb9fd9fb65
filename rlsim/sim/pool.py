"""GPUs as exclusive resources: a call starts when every GPU of its mesh is free.

First come, first served, but for weight syncs: one goes before the generations that wait. Where steps overlap, the next
generation may have waited for longer than the sync of an earlier step, and that step's trainer would stand still for as
long as it takes. (Without overlap no generation can wait while weights are still to come.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import simpy

from rlsim.workflow.graph import CallKind


class _Waiting(NamedTuple):
    gpus: frozenset[int]
    granted: simpy.Event
    kind: CallKind


class GpuPool:
    """Hands out sets of GPUs. A waiting call is passed over only by calls that want none of the GPUs it waits for."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._busy: set[int] = set()
        self._waiting: list[_Waiting] = []

    def acquire(self, gpus: Iterable[int], kind: CallKind) -> simpy.Event:
        """An event that fires when all of `gpus` are the caller's, a call of that kind."""
        place = len(self._waiting)
        if kind == "sync":
            place = next((i for i, other in enumerate(self._waiting) if other.kind == "generate"), place)
        self._waiting.insert(place, _Waiting(frozenset(gpus), self._env.event(), kind))
        granted = self._waiting[place].granted
        self._grant()
        return granted

    def release(self, gpus: Iterable[int]) -> None:
        """Give GPUs back."""
        self._busy.difference_update(gpus)
        self._grant()

    def _grant(self) -> None:
        claimed: set[int] = set()
        still: list[_Waiting] = []
        for call in self._waiting:
            if self._busy.isdisjoint(call.gpus) and claimed.isdisjoint(call.gpus):
                self._busy |= call.gpus
                call.granted.succeed()
            else:
                claimed |= call.gpus
                still.append(call)
        self._waiting = still
