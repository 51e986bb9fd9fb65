"""The sequences that a replica decodes together: their contexts, their KV pages, and when the next one is complete.

All contexts grow by one token a step, so nothing is kept per step: a request is known by its offset from a counter,
and pages are counted on from how many requests begin a new one at which step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappush
from itertools import accumulate
from math import ceil, fsum
from operator import attrgetter

from rlsim.cost.curve import DecodeCurve, InWindows
from rlsim.cost.step import PLAIN_KV, Chunk, KvShape, StepCost
from rlsim.sim.awaited import EVER, Awaited, due, first
from rlsim.sim.prefix_cache import PrefixCache
from rlsim.sim.request import Request
from rlsim.sim.windows import AttentionChunks, WindowTokens


class RunningBatch:
    """Running requests of a replica with `capacity_pages` pages of `page_tokens` tokens, some of them shared (`cache`).

    `skew` is the share of the padding to the longest context that a step pays for (`StepCost.skew`). With
    `chunk_tokens` above 0 it knows when a response reaches a multiple of so many tokens. `kv` is what a sequence keeps
    there: pages are counted in its units.
    """

    def __init__(
        self,
        page_tokens: int,
        capacity_pages: int,
        skew: float,
        chunk_tokens: int = 0,
        kv: KvShape = PLAIN_KV,
    ) -> None:
        self.step = 0  # counter of decode steps
        self.size = 0  # requests
        self.tokens = 0  # sum of their contexts
        self.pages = 0  # KV pages that those fill, each request's last one counted whole, shared ones for each
        self._final_tokens = 0  # the same once each is complete, or its budget used up
        self._skew = skew
        self._page_tokens = page_tokens
        self._padding = page_tokens - 1  # the most that one request's last page is short of being full
        self._kv = kv
        self.windowed = kv.window_tokens is not None
        self._windows: WindowTokens | AttentionChunks | None = None
        if kv.window_tokens is not None:
            self._windows = (AttentionChunks if kv.chunked else WindowTokens)(kv.window_tokens)
        self._capacity_pages = capacity_pages * kv.page_units
        self.plain = kv == PLAIN_KV
        self.spare_pages = 0  # with fewer left its iterations cost something else
        self._same_level = 0  # steps for which `length_level` is known to hold, from where it was asked; 0: it was not
        self.cache: PrefixCache | None = None  # where requests may find anything
        self.pinned_pages = 0  # that requests keep which are not here
        self._chunk_tokens = chunk_tokens
        self.clear()
        self._turns = [0] * page_tokens  # i: pages that a decode step at counter i (modulo the page size) begins
        self._round = 0  # their sum: pages begun in as many steps as a page has tokens

    @property
    def room_pages(self) -> int:
        """Pages that requests of the replica may fill, where shared ones are counted for each."""
        if not self.cache:
            return self._capacity_pages
        return self._capacity_pages - self.pinned_pages + self.cache.shared_pages

    def requests(self) -> list[Request]:
        return sorted(self, key=attrgetter("order"))

    def __iter__(self) -> Iterator[Request]:
        """The requests, in no particular order."""
        return (request for _, order, request in self._finishing if request.order == order)

    def join(self, requests: Sequence[Request]) -> None:
        """Take in requests whose context is in the KV cache."""
        step, finishing, windows = self.step, self._finishing, self._windows
        longest = self._longest if self._skew else None
        for request in requests:
            order, generated = request.order, request.generated
            request.offset = offset = request.prompt_tokens + generated - step
            heappush(finishing, (step + request.limit_tokens - generated, order, request))
            if longest is not None:
                heappush(longest, (-offset, order, request))
            if windows is not None:
                windows.join(request, step)
        self._count(requests, 1)
        if self._chunk_tokens:
            self._await_chunks(requests)

    def _count(self, requests: Sequence[Request], sign: int) -> None:
        """Count requests in whose offsets are set, or (`sign` -1) out."""
        step, page, turns, windows = self.step, self._page_tokens, self._turns, self._windows
        each, more, plain = self._kv.late_units, self._kv.page_units - self._kv.late_units, self.plain
        tokens = final = pages = 0
        begun = each * len(requests)
        for request in requests:
            offset = request.offset
            context = offset + step
            tokens += context
            final += request.prompt_tokens + request.limit_tokens
            pages += -(-context // page) if plain else self.pages_of(context)
            turns[-offset % page] += sign * each
            if windows is not None and windows.count(request, step, sign):
                turns[-offset % page] += sign * more
                begun += more
        self.tokens += sign * tokens
        self.pages += sign * pages
        self._round += sign * begun
        self._final_tokens += sign * final
        self.size += sign * len(requests)

    def _await_chunks(self, requests: Sequence[Request]) -> None:
        """Note down when these requests complete their next chunk, unless they finish or pause by then."""
        for request in requests:
            generated = request.offset + self.step - request.prompt_tokens
            ahead = self._chunk_tokens - generated % self._chunk_tokens
            if generated + ahead < request.limit_tokens:
                heappush(self._chunks, (self.step + ahead, request.order, request))

    def advance(self, steps: int) -> None:
        """Every request has generated so many tokens more."""
        self.pages = self._pages_after(steps)
        self.tokens += self.size * steps
        self.step += steps
        if self._windows is not None:
            self._outgrow(self._windows)

    def _outgrow(self, windows: WindowTokens | AttentionChunks) -> None:
        """Requests have outgrown their windows, and fill less with each page from now on, or have left a chunk."""
        less, step, page = self._kv.page_units - self._kv.late_units, self.step, self._page_tokens
        for request in windows.outgrown(step):
            if isinstance(windows, AttentionChunks):
                self.pages -= less * windows.pages_left_behind(request, step, page)
            else:
                self._turns[-request.offset % page] -= less
                self._round -= less

    def leave(self, requests: Sequence[Request]) -> None:
        """Let go of requests, their tokens brought up to date."""
        step, cache = self.step, self.cache
        self._count(requests, -1)
        for request in requests:
            context = request.offset + step
            if cache:
                cache.release(request, context - 1)  # the last token's KV comes with the next step
            request.generated = context - request.prompt_tokens
            request.order = 0

    def complete(self) -> list[Request]:
        """Let go of the requests that are complete or have used up their budget, and return them."""
        finished = due(self._finishing, self.step)
        if finished:
            self.leave(finished)
        return finished

    def fits_to_the_end(self) -> bool:
        """Whether all requests fit until they leave, wherever in their last pages they stand, and cost the same."""
        return not self._same_level and self._fits(self._final_tokens)

    def _fits(self, tokens: int) -> bool:
        """Whether so many tokens have pages for certain, and leave those to spare; nothing is certain where pages are
        not proportional."""
        most = (self.room_pages - self.spare_pages) * self._page_tokens
        return self.plain and tokens + self.size * self._padding <= most

    def drain(self, now: float, decode: Callable[[int], DecodeCurve]) -> tuple[float, list[Request], int]:
        """Decode from `now` on until every response is complete: the moment it is, the requests in the order in which
        they finish, each with its moment, and the most context tokens.

        The same sums as completion after completion. None of the requests may have a budget. `decode` gives the curve
        of a batch size.
        """
        left = [entry for entry in sorted(self._finishing) if entry[2].order == entry[1]]
        furthest = list(accumulate([entry[2].offset for entry in reversed(left)], max)) if self._skew else []
        step, size, tokens, skew, peak = self.step, self.size, self.tokens, self._skew, 0
        cache, page = self.cache, self._page_tokens
        shared = cache if cache and cache.shared_pages else None
        for finish, _, request in left:
            if finish > step:
                padded = tokens + skew * (size * (step + furthest[size - 1]) - tokens) if skew else tokens
                now += decode(size).steps_s(padded, finish - step)
                tokens += (finish - step) * size
                step = finish
                if tokens > peak:  # what is shared only makes it less
                    peak = max(peak, tokens - shared.shared_pages * page) if shared else tokens
            if shared:
                shared.forgo(request)
            request.finished_at = now
            request.generated = request.response_tokens
            request.order = 0
            tokens -= request.prompt_tokens + request.response_tokens
            size -= 1
        self.step = step
        self._reset()
        if cache:
            cache.flush()
        return now, [entry[2] for entry in left], peak

    def _reset(self) -> None:
        self.size = self.tokens = self.pages = self._final_tokens = self._round = 0
        self._turns = [0] * self._page_tokens
        self.clear()

    def chunks_complete(self) -> list[tuple[Request, int]]:
        """The requests whose next chunk is complete, and what they have generated (tokens); they go on."""
        reached = due(self._chunks, self.step)
        self._await_chunks(reached)
        return [(request, request.offset + self.step - request.prompt_tokens) for request in reached]

    def clear(self) -> None:
        self._finishing: Awaited = []  # by the step that they leave at
        self._longest: Awaited = []  # by -offset, kept only where skew costs time
        self._chunks: Awaited = []  # by the step that completes the next chunk
        if self._windows is not None:
            self._windows.clear()

    def generated(self, step: int) -> Counter[int]:
        """How many requests have generated how many tokens once the step counter is at `step`."""
        return Counter([self.context_of(request, step) - request.prompt_tokens for request in self])

    def context_of(self, request: Request, step: int) -> int:
        """A request's context once the step counter is at `step`."""
        return request.offset + step

    def tokens_at(self, step: int) -> int:
        """The sum of the contexts once the step counter is at `step`."""
        return self.tokens + (step - self.step) * self.size

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    @property
    def page_units(self) -> int:
        """What a page of all layers takes, in the units of `pages`."""
        return self._kv.page_units

    def pages_of(self, context_tokens: int) -> int:
        """What a request of so many tokens takes, in the units of `pages`."""
        if self.plain:
            return -(-context_tokens // self._page_tokens)
        return self._kv.units(context_tokens, self._page_tokens)

    def _pages_after(self, steps: int) -> int:
        """KV pages so many steps from now."""
        rounds, steps = divmod(steps, self._page_tokens)
        first = self.step % self._page_tokens
        end = first + steps
        begun = sum(self._turns[first:end])
        if end > self._page_tokens:
            begun += sum(self._turns[: end - self._page_tokens])
        return self.pages + rounds * self._round + begun

    def _steps_that_fit(self, room_pages: int) -> int:
        """The most steps from now after which so many pages suffice; they do now."""
        if not self._round:
            return EVER
        rounds, left = divmod(room_pages - self.pages, self._round)
        first = self.step % self._page_tokens
        begun = list(accumulate(self._turns[first:] + self._turns[:first]))
        return rounds * self._page_tokens + bisect_right(begun, left)

    def ahead(self, cost: StepCost) -> tuple[DecodeCurve, float, int]:
        """The jump: its steps' curve, the context tokens that they begin with, and how many steps leave the batch as it
        is."""
        tokens = self.padded_tokens()
        return cost.decode(self.size, self.in_windows(tokens) if self.windowed else None), tokens, self.steps_ahead()

    def mixed_s(self, cost: StepCost, chunks: Sequence[Chunk]) -> float:
        """Seconds of an iteration that decodes the batch and prefills these."""
        tokens = self.padded_tokens()
        return cost.mixed_s(self.size, tokens, chunks, self.in_windows(tokens))

    def steps_ahead(self) -> int:
        """Decode steps until the first response leaves or completes a chunk, or the next step's pages are missing, or
        begin to be those to spare."""
        steps = first(self._finishing) - self.step
        if self._same_level:
            steps = min(steps, self._same_level)
        if self._chunks:
            steps = min(steps, first(self._chunks) - self.step)
        if self._windows is not None:
            steps = self._windows.steps_ahead(self.step, steps)
        if self._fits(self.tokens + self.size * (steps - 1)):
            return steps
        room_pages = self.room_pages
        steps = min(steps, self._steps_that_fit(room_pages) + 1)
        if 0 < self.spare_pages <= room_pages - self.pages:
            steps = min(steps, self._steps_that_fit(room_pages - self.spare_pages) + 1)
        return steps

    def length_level(self, lengths: Sequence[int]) -> int:
        """How many of these lengths the responses are expected to reach on average: each what is predicted of it, or
        what it has generated where that is more."""
        have = [(request, request.offset + self.step - request.prompt_tokens) for request in self]
        total = fsum([max(request.predicted_tokens, generated) for request, generated in have])
        level = bisect_right(lengths, total / self.size)
        ahead = [request.predicted_tokens - generated for request, generated in have]
        self._same_level = min((ceil(tokens) for tokens in ahead if tokens > 0), default=EVER)
        growing = sum(tokens <= 0 for tokens in ahead)
        if growing and level < len(lengths):
            self._same_level = min(self._same_level, max(int((lengths[level] * self.size - total) / growing), 1))
        return level

    def padded_tokens(self) -> float:
        """The contexts' sum, plus the share of their padding to the longest that the kernel pays for."""
        skew = self._skew
        if not skew or not self.size:
            return self.tokens
        least = first(self._longest)
        return self.tokens + skew * (self.size * (self.step - least) - self.tokens)

    def in_windows(self, padded_tokens: float) -> InWindows | None:
        """How many of the context tokens lie in windows while `padded_tokens` grow from now on; None without windows,
        or as for equal contexts."""
        windows = self._windows
        return None if windows is None else windows.read(self.step, self.size, padded_tokens, self._skew)
