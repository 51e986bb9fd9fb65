"""The sequences that a replica decodes together: their contexts, their KV pages, and when the next one is complete.

All contexts grow by one token a step, so nothing is kept per step: a request is known by its offset from a counter,
and pages are counted from how many requests stand at which place of their last page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter, mul

from rlsim.cost.curve import DecodeCurve
from rlsim.sim.request import Request


class RunningBatch:
    """Running requests of a replica with `capacity_pages` pages of `page_tokens` tokens.

    `skew` is the share of the padding to the longest context that a step pays for (`StepCost.skew`). With
    `chunk_tokens` above 0 it knows when a response reaches a multiple of so many tokens. A request that left and came
    back has a new admission number; entries of older ones are stale and skipped.
    """

    __slots__ = (
        "_ages",
        "_capacity_pages",
        "_capacity_tokens",
        "_chunk_tokens",
        "_chunks",
        "_final_tokens",
        "_finishing",
        "_longest",
        "_padding",
        "_page_tokens",
        "_residues",
        "_short",
        "_skew",
        "size",
        "step",
        "tokens",
    )

    def __init__(self, page_tokens: int, capacity_pages: int, skew: float, chunk_tokens: int = 0) -> None:
        self.step = 0  # counter of decode steps
        self.size = 0  # requests
        self.tokens = 0  # sum of their contexts
        self._final_tokens = 0  # the same once each is complete
        self._skew = skew
        self._page_tokens = page_tokens
        self._padding = page_tokens - 1  # the most that one request's last page is short of being full
        self._capacity_pages = capacity_pages
        self._capacity_tokens = capacity_pages * page_tokens
        self._finishing: list[tuple[int, int, Request]] = []  # heap of (step it finishes at, admission number, request)
        self._longest: list[tuple[int, int, Request]] = []  # heap of (-offset, …), kept only where skew costs time
        self._chunk_tokens = chunk_tokens
        self._chunks: list[tuple[int, int, Request]] = []  # heap of (step that completes its next chunk, …)
        self._short = [-i % page_tokens for i in range(2 * page_tokens)]  # tokens missing in a last page
        self._ages: Counter[int] = Counter()  # how many requests have generated how many tokens more than `step`
        self._residues = [0] * page_tokens  # how many requests have offset % page_tokens == i

    def requests(self) -> list[Request]:
        """The requests in admission order."""
        return sorted(self, key=attrgetter("order"))

    def __iter__(self) -> Iterator[Request]:
        """The requests, in no particular order."""
        return (request for _, order, request in self._finishing if request.order == order)

    def join(self, requests: Sequence[Request]) -> None:
        """Take in requests whose context is in the KV cache."""
        step, page, residues, finishing = self.step, self._page_tokens, self._residues, self._finishing
        longest, ages = self._longest if self._skew else None, self._ages
        tokens = final = 0
        for request in requests:
            order, generated = request.order, request.generated
            context = request.prompt_tokens + generated
            offset = request.offset = context - step
            tokens += context
            final += request.prompt_tokens + request.response_tokens
            residues[offset % page] += 1
            ages[generated - step] += 1
            heappush(finishing, (step + request.response_tokens - generated, order, request))
            if longest is not None:
                heappush(longest, (-offset, order, request))
        self.tokens += tokens
        self._final_tokens += final
        self.size += len(requests)
        if self._chunk_tokens:
            self._await_chunks(requests)

    def _await_chunks(self, requests: Sequence[Request]) -> None:
        """Note down when these requests complete their next chunk, unless they finish by then."""
        for request in requests:
            generated = request.offset + self.step - request.prompt_tokens
            ahead = self._chunk_tokens - generated % self._chunk_tokens
            if generated + ahead < request.response_tokens:
                heappush(self._chunks, (self.step + ahead, request.order, request))

    def leave(self, requests: Sequence[Request]) -> None:
        """Let go of requests, their tokens brought up to date."""
        step, page, residues, ages = self.step, self._page_tokens, self._residues, self._ages
        for request in requests:
            offset = request.offset
            age = offset - request.prompt_tokens
            request.generated = age + step
            if ages[age] == 1:
                del ages[age]
            else:
                ages[age] -= 1
            request.order = 0
            self.tokens -= offset + step
            self._final_tokens -= request.prompt_tokens + request.response_tokens
            residues[offset % page] -= 1
        self.size -= len(requests)

    def complete(self) -> list[Request]:
        """Let go of the requests whose response is complete, and return them."""
        heap, step = self._finishing, self.step
        finished = []
        while heap and heap[0][0] <= step:
            _, order, request = heappop(heap)
            if request.order == order:
                finished.append(request)
        if finished:
            self.leave(finished)
        return finished

    def fits_to_the_end(self) -> bool:
        """Whether all requests fit until they are complete, wherever in their last pages they stand."""
        return self._final_tokens + self.size * self._padding <= self._capacity_tokens

    def drain(self, now: float, decode: Callable[[int], DecodeCurve]) -> tuple[float, list[Request], int]:
        """Decode from `now` on until every response is complete: the moment it is, the requests in the order in which
        they finish, each with its moment, and the most context tokens.

        The same sums as completion after completion. `decode` gives the curve of a batch size.
        """
        left = [entry for entry in sorted(self._finishing) if entry[2].order == entry[1]]
        furthest = list(accumulate((request.offset for *_, request in reversed(left)), max))  # of the last 1, 2, …
        step, size, tokens, skew, peak = self.step, self.size, self.tokens, self._skew, 0
        for finish, _, request in left:
            if finish > step:
                padded = tokens + skew * (size * (step + furthest[size - 1]) - tokens) if skew else tokens
                now += decode(size).steps_s(padded, finish - step)
                tokens += (finish - step) * size
                peak, step = max(peak, tokens), finish
            request.finished_at = now
            request.generated = request.response_tokens
            request.order = 0
            tokens -= request.prompt_tokens + request.response_tokens
            size -= 1
        self.step, self.size, self.tokens, self._final_tokens = step, 0, 0, 0
        self._ages.clear()
        self._residues = [0] * self._page_tokens
        self.clear()
        return now, [request for *_, request in left], peak

    def _steps_to_chunk(self, most: int) -> int:
        """Steps until the next chunk is complete; `most` if none is awaited any more."""
        heap = self._chunks
        while heap and heap[0][2].order != heap[0][1]:
            heappop(heap)
        return heap[0][0] - self.step if heap else most

    def chunks_complete(self) -> list[tuple[Request, int]]:
        """The requests whose next chunk is complete, and what they have generated (tokens); they go on."""
        heap, step = self._chunks, self.step
        reached = []
        while heap and heap[0][0] <= step:
            _, order, request = heappop(heap)
            if request.order == order:
                reached.append(request)
        self._await_chunks(reached)
        return [(request, request.offset + step - request.prompt_tokens) for request in reached]

    def clear(self) -> None:
        """Forget all requests."""
        self._finishing, self._longest, self._chunks = [], [], []

    def generated(self, step: int) -> Counter[int]:
        """How many requests have generated how many tokens once the step counter is at `step`."""
        return Counter({age + step: count for age, count in self._ages.items()})

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    def surely_fits(self) -> bool:
        """Whether the pages suffice wherever in their last pages the requests stand; False says nothing."""
        return self.tokens + self.size * self._padding <= self._capacity_tokens

    def pages(self, ahead: int = 0) -> int:
        """KV pages, `ahead` steps from now."""
        page = self._page_tokens
        padding: int = sum(map(mul, self._residues, self._short[(self.step + ahead) % page :]))
        return (self.tokens + self.size * ahead + padding) // page

    def steps_ahead(self) -> int:
        """Decode steps until the first response finishes or completes a chunk, or the next step's pages are missing."""
        heap = self._finishing
        finish, order, request = heap[0]
        while request.order != order:
            heappop(heap)
            finish, order, request = heap[0]
        steps, capacity = finish - self.step, self._capacity_pages
        if self._chunks:
            steps = min(steps, self._steps_to_chunk(steps))
        most = self.tokens + self.size * (steps - 1 + self._padding)
        if most <= self._capacity_tokens or self.pages(steps - 1) <= capacity:
            return steps
        low, high = 1, steps  # steps that fit, steps that don't
        while high - low > 1:
            middle = (low + high) // 2
            if self.pages(middle - 1) <= capacity:
                low = middle
            else:
                high = middle
        return low

    def padded_tokens(self) -> float:
        """The contexts' sum, plus the share of their padding to the longest that the kernel pays for."""
        skew = self._skew
        if not skew or not self.size:
            return self.tokens
        heap = self._longest
        least, order, request = heap[0]
        while request.order != order:
            heappop(heap)
            least, order, request = heap[0]
        return self.tokens + skew * (self.size * (self.step - least) - self.tokens)
