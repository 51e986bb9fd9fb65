"""Running requests by the step at which something happens to them: one is complete, or outgrows its window."""

from __future__ import annotations

from heapq import heappop, heappush

from rlsim.sim.request import Request

EVER = 2**62  # a later step than any response has


class Awaited(list[tuple[int, int, Request]]):
    """A heap of (step, admission number, request).

    A request that left and came back has a new admission number; its older entries are stale and skipped.
    """

    def add(self, step: int, request: Request) -> None:
        heappush(self, (step, request.order, request))

    def first(self, otherwise: int = 0) -> int:
        """The first step; `otherwise` if nothing is awaited."""
        while self and self[0][2].order != self[0][1]:
            heappop(self)
        return self[0][0] if self else otherwise

    def due(self, step: int) -> list[Request]:
        """The requests of that step or before, which are awaited no more."""
        found = []
        while self and self[0][0] <= step:
            _, order, request = heappop(self)
            if request.order == order:
                found.append(request)
        return found
