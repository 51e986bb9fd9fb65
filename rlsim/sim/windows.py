"""How many of a running batch's context tokens lie in the sequences' attention windows, or in their last chunks.

A sequence reads at most `window` tokens in layers with a window. Until the next one outgrows its window, those tokens
grow by the same number in every step, so that a jump ends there and everything within it stays linear.
"""

from __future__ import annotations

from heapq import heappush

from rlsim.cost.curve import InWindows
from rlsim.sim.awaited import Awaited, due, first
from rlsim.sim.request import Request


class WindowTokens:
    """The running requests whose contexts are still shorter than `window` tokens, and what all of them read."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.clear()

    def clear(self) -> None:
        self.growing = 0  # requests with shorter contexts
        self._offsets = 0  # sum of their offsets from the step counter
        self._outgrowing: Awaited = []  # by the step at which a context is as long

    def join(self, request: Request, step: int) -> None:
        """Await that a request, whose offset is set, outgrows its window."""
        if request.offset + step < self._window:
            heappush(self._outgrowing, (self._window - request.offset, request.order, request))

    def count(self, request: Request, step: int, sign: int) -> bool:
        """Count a request in, or (`sign` -1) out; whether its context is shorter than the window."""
        if request.offset + step >= self._window:
            return False
        self.growing += sign
        self._offsets += sign * request.offset
        return True

    def outgrown(self, step: int) -> list[Request]:
        found = due(self._outgrowing, step)
        self.growing -= len(found)
        self._offsets -= sum([request.offset for request in found])
        return found

    def steps_ahead(self, step: int, most: int) -> int:
        """Steps until the next context is as long as the window, or `most`."""
        return min(most, first(self._outgrowing) - step)

    def read(self, step: int, size: int, padded_tokens: float, skew: float) -> InWindows | None:
        """What `size` requests read in windows, as a line over their padded context tokens, `padded_tokens` now.

        None while all contexts are shorter than the window, or none is: then the line of equal contexts holds.
        Otherwise the longest has outgrown its window, and the others are padded to that (`skew`).
        """
        if self.growing in (0, size):
            return None
        tokens = self._offsets + self.growing * step + (size - self.growing) * self._window
        padded = tokens + skew * (size * self._window - tokens)
        share = (1 - skew) * self.growing / size
        return InWindows(padded - share * padded_tokens, share)


class AttentionChunks(WindowTokens):
    """What running requests read where layers have chunked attention: each token to its own chunk of `window` tokens.

    A request outgrows each of its chunks, and reads one token in the next: `growing` are those that are not in their
    first chunk, `_offsets` the sum of the tokens that all read, less the step counter for each.
    """

    def _start(self, request: Request, step: int) -> int:
        return (request.offset + step - 1) // self._window * self._window

    def join(self, request: Request, step: int) -> None:
        """Await that a request, whose offset is set, enters its next chunk."""
        heappush(
            self._outgrowing, (self._start(request, step) + self._window + 1 - request.offset, request.order, request)
        )

    def count(self, request: Request, step: int, sign: int) -> bool:
        """Count a request in, or (`sign` -1) out; all layers keep the page that it fills."""
        start = self._start(request, step)
        self.growing += sign * (start > 0)
        self._offsets += sign * (request.offset - start)
        return True

    def outgrown(self, step: int) -> list[Request]:
        found = due(self._outgrowing, step)
        for request in found:
            self.growing += self._start(request, step) == self._window
            self._offsets -= self._window
            heappush(self._outgrowing, (step + self._window, request.order, request))
        return found

    def pages_left_behind(self, request: Request, step: int, page_tokens: int) -> int:
        """Pages that lie in the chunks before the one that it has just entered, and not before the last one."""
        start = self._start(request, step)
        return start // page_tokens - (start - self._window) // page_tokens

    def read(self, step: int, size: int, padded_tokens: float, skew: float) -> InWindows | None:
        """What `size` requests read in chunks, as in `WindowTokens.read`; each reads one token more in every step."""
        if not self.growing:
            return None
        padded = float(self._offsets + size * step)
        if skew:
            longest = self._window + 1 + step - first(self._outgrowing)  # of the next one to enter another chunk
            padded += skew * (size * longest - padded)
        return InWindows(padded - padded_tokens, 1.0)
