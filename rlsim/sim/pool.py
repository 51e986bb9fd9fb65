"""GPUs as exclusive resources: a call starts when every GPU of its mesh is free, first come first served."""

from __future__ import annotations

from collections.abc import Iterable

import simpy


class GpuPool:
    """Hands out sets of GPUs. A waiting call is passed over only by calls that want none of the GPUs it waits for."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._busy: set[int] = set()
        self._waiting: list[tuple[frozenset[int], simpy.Event]] = []

    def acquire(self, gpus: Iterable[int]) -> simpy.Event:
        """An event that fires when all of `gpus` are the caller's."""
        granted = self._env.event()
        self._waiting.append((frozenset(gpus), granted))
        self._grant()
        return granted

    def release(self, gpus: Iterable[int]) -> None:
        """Give GPUs back."""
        self._busy.difference_update(gpus)
        self._grant()

    def _grant(self) -> None:
        claimed: set[int] = set()
        for wanted, granted in list(self._waiting):
            if not wanted & self._busy and not wanted & claimed:
                self._busy |= wanted
                self._waiting.remove((wanted, granted))
                granted.succeed()
            else:
                claimed |= wanted
