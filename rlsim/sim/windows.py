"""How many of a running batch's context tokens lie in the sequences' attention windows, or in their last chunks.

A sequence reads at most `window` tokens in layers with a window. Until the next one outgrows its window, those tokens
grow by the same number in every step, so that a jump ends there and everything within it stays linear.
"""

from __future__ import annotations

from heapq import heappop, heappush

from rlsim.cost.curve import InWindows
from rlsim.sim.request import Request


class WindowTokens:
    """The running requests whose contexts are still shorter than `window` tokens, and what all of them read."""

    def __init__(self, window: int) -> None:
        self.growing = 0  # requests with shorter contexts
        self._window = window
        self._growing_offsets = 0  # sum of their offsets from the step counter
        self._outgrowing: list[tuple[int, int, Request]] = []  # heap of (step it is as long at, admission number, …)

    def join(self, request: Request, step: int) -> bool:
        """Take in a request whose offset is set; whether its context is shorter than the window."""
        if request.offset + step >= self._window:
            return False
        self.growing += 1
        self._growing_offsets += request.offset
        heappush(self._outgrowing, (self._window - request.offset, request.order, request))
        return True

    def leave(self, request: Request, step: int) -> bool:
        """Let go of a request that still has its admission number; whether its context is shorter than the window."""
        if request.offset + step >= self._window:
            return False
        self.growing -= 1
        self._growing_offsets -= request.offset
        return True

    def outgrown(self, step: int) -> list[Request]:
        heap, found = self._outgrowing, []
        while heap and (heap[0][0] <= step or heap[0][2].order != heap[0][1]):
            _, order, request = heappop(heap)
            if request.order == order:
                self.growing -= 1
                self._growing_offsets -= request.offset
                found.append(request)
        return found

    def steps_ahead(self, step: int, most: int) -> int:
        """Steps until the next context is as long as the window, or `most`."""
        self.outgrown(step)
        return min(most, self._outgrowing[0][0] - step) if self._outgrowing else most

    def clear(self) -> None:
        self.growing = self._growing_offsets = 0
        self._outgrowing = []

    def read(self, step: int, size: int, padded_tokens: float, skew: float) -> InWindows | None:
        """What `size` requests read in windows, as a line over their padded context tokens, `padded_tokens` now.

        None while all contexts are shorter than the window, or none is: then the line of equal contexts holds.
        Otherwise the longest has outgrown its window, and the others are padded to that (`skew`).
        """
        if self.growing in (0, size):
            return None
        tokens = self._growing_offsets + self.growing * step + (size - self.growing) * self._window
        padded = tokens + skew * (size * self._window - tokens)
        share = (1 - skew) * self.growing / size
        return InWindows(padded - share * padded_tokens, share)


class AttentionChunks:
    """What running requests read where layers have chunked attention: each token to its own chunk of `chunk` tokens.

    The interface is that of `WindowTokens`; a request outgrows each of its chunks, and reads one token in the next.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._later = 0  # requests that are not in their first chunk
        self._read_offsets = 0  # sum of the tokens that they read, less the step counter for each
        self._leaving: list[tuple[int, int, Request]] = []  # heap of (step it enters another chunk at, order, …)

    def _start(self, request: Request, step: int) -> int:
        return (request.offset + step - 1) // self._chunk * self._chunk

    def join(self, request: Request, step: int) -> bool:
        """Take in a request whose offset is set; all layers keep the page that it fills."""
        start = self._start(request, step)
        self._later += start > 0
        self._read_offsets += request.offset - start
        heappush(self._leaving, (start + self._chunk + 1 - request.offset, request.order, request))
        return True

    def leave(self, request: Request, step: int) -> bool:
        """Let go of a request that still has its admission number; all layers keep the page that it fills."""
        start = self._start(request, step)
        self._later -= start > 0
        self._read_offsets -= request.offset - start
        return True

    def outgrown(self, step: int) -> list[Request]:
        heap, found = self._leaving, []
        while heap and (heap[0][0] <= step or heap[0][2].order != heap[0][1]):
            at, order, request = heappop(heap)
            if request.order == order:
                self._later += self._start(request, step) == self._chunk
                self._read_offsets -= self._chunk
                heappush(heap, (at + self._chunk, order, request))
                found.append(request)
        return found

    def pages_left_behind(self, request: Request, step: int, page_tokens: int) -> int:
        """Pages that lie in the chunks before the one that it has just entered, and not before the last one."""
        start = self._start(request, step)
        return start // page_tokens - (start - self._chunk) // page_tokens

    def steps_ahead(self, step: int, most: int) -> int:
        """Steps until the next request enters another chunk, or `most`."""
        self.outgrown(step)
        return min(most, self._leaving[0][0] - step) if self._leaving else most

    def clear(self) -> None:
        self._later = self._read_offsets = 0
        self._leaving = []

    def read(self, step: int, size: int, padded_tokens: float, skew: float) -> InWindows | None:
        """What `size` requests read in chunks, as in `WindowTokens.read`; each reads one token more in every step."""
        if not self._later:
            return None
        padded = float(self._read_offsets + size * step)
        if skew:
            self.outgrown(step)
            longest = self._chunk + 1 + step - self._leaving[0][0]  # of the next one to enter another chunk
            padded += skew * (size * longest - padded)
        return InWindows(padded - padded_tokens, 1.0)
