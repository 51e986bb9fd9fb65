"""Running requests by the step at which something happens to them: one is complete, or outgrows its window.

They stand in a heap of (step, admission number, request). A request that left and came back has a new admission number;
its older entries are stale and skipped.
"""

from __future__ import annotations

from heapq import heappop

from rlsim.sim.request import Request

Awaited = list[tuple[int, int, Request]]

EVER = 2**62  # a later step than any response has


def first(awaited: Awaited) -> int:
    """The first step of a heap; `EVER` if nothing is awaited."""
    while awaited:
        step, order, request = awaited[0]
        if request.order == order:
            return step
        heappop(awaited)
    return EVER


def due(awaited: Awaited, by: int) -> list[Request]:
    """The requests of that step or before, which are awaited no more."""
    found = []
    while awaited and awaited[0][0] <= by:
        _, order, request = heappop(awaited)
        if request.order == order:
            found.append(request)
    return found
