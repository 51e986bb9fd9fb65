"""One replica of an inference engine: continuous batching over a paged KV cache, jumping from event to event.

docs/engine.md is the specification. `_run` is the loop: at each iteration boundary carry out orders, evict, admit; then
iterate once (prefill) or as many times as nothing can change (decode), and let go of what has finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from operator import mul
from typing import Any

import simpy

from rlsim.cost.curve import REACHED, DecodeCurve
from rlsim.cost.step import Chunk, StepCost
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import EngineConfig, Request


class Replica:
    """`tp` GPUs of one node that decode together. Starts with nothing to do; `receive` gives it requests."""

    __slots__ = (  # above 30 attributes a `__dict__` is slower to reach
        "_admitted",
        "_arrivals",
        "_asleep",
        "_batch",
        "_capacity_tokens",
        "_config",
        "_finishing",
        "_jump",
        "_kv_arrived",
        "_longest",
        "_numbers",
        "_on_finish",
        "_orders",
        "_padding",
        "_page_tokens",
        "_prefill_pages",
        "_prefilling",
        "_process",
        "_recorder",
        "_residues",
        "_short",
        "_span_end",
        "_span_kind",
        "_span_start",
        "_step",
        "_tokens",
        "_tps",
        "_waiting",
        "_watermark_pages",
        "capacity_pages",
        "cost",
        "env",
        "gpus",
        "index",
        "node",
        "peak_tokens",
        "preemptions",
        "stopped",
        "tp",
    )

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        node: int,
        gpus: tuple[int, ...],
        cost: StepCost,
        capacity_pages: int,
        config: EngineConfig,
        recorder: Recorder,
        on_finish: Callable[[Replica, list[Request]], None],
        numbers: Iterator[int],
    ) -> None:
        self.env = env
        self.index = index
        self.node = node
        self.gpus = gpus
        self.tp = len(gpus)
        self._tps = (self.tp,)
        self.cost = cost
        self.capacity_pages = capacity_pages
        self.preemptions = 0
        self.peak_tokens = 0
        self.stopped: simpy.Event | None = None  # set once it was told to stop; fires at that boundary
        self._config = config
        self._recorder = recorder
        self._on_finish = on_finish
        self._numbers = numbers  # of admissions, unique over all replicas that a request may move between
        self._page_tokens = config.page_tokens
        self._padding = config.page_tokens - 1  # the most that one request's last page is short of being full
        self._capacity_tokens = capacity_pages * config.page_tokens
        self._watermark_pages = config.watermark_pages(capacity_pages)
        self._orders: deque[Callable[[], None]] = deque()
        self._waiting: deque[Request] = deque()
        self._arrivals: list[Request] = []
        self._kv_arrived = False
        self._prefilling: list[Request] = []  # in admission order
        self._prefill_pages = 0
        self._admitted: list[tuple[int, Request]] = []  # a stack by admission number, stale entries and all
        # The running batch. Contexts grow together, so a request is kept by its offset from the step counter.
        self._step = 0
        self._batch = 0
        self._tokens = 0  # sum of the running contexts
        self._finishing: list[tuple[int, int, Request]] = []  # heap of (step it finishes at, admission number, request)
        self._short = [-i % config.page_tokens for i in range(2 * config.page_tokens)]  # tokens missing in a last page
        self._residues = [0] * config.page_tokens  # how many running requests have offset % page_tokens == i
        self._longest: list[tuple[int, int, Request]] = []  # heap of (-offset, …), kept only where skew costs time
        self._jump: tuple[float, DecodeCurve, float] | None = None  # while decoding: start, curve, tokens at the start
        self._span_kind = ""
        self._span_start = self._span_end = 0.0
        self._asleep = False
        self._process = env.process(self._run())

    # ---- from outside: orders, carried out at the next iteration boundary -------------------------------------------

    def at_boundary(self, order: Callable[[], None], urgent: bool = False) -> None:
        """Have `order` carried out at the next iteration boundary, after those given before (unless it is urgent)."""
        if urgent:
            self._orders.appendleft(order)
        else:
            self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._process.interrupt()

    def receive(self, requests: Iterable[Request]) -> None:
        """Append requests to the waiting queue at the next boundary."""
        self._arrivals.extend(requests)
        self._wake()

    def stop(self) -> simpy.Event:
        """Stop for good at the next boundary; the event fires then. `drain` hands out what was here."""
        if self.stopped is None:
            self.stopped = self.env.event()
            self._wake()
        return self.stopped

    def remove(self, ids: frozenset[int]) -> tuple[list[Request], list[Request]]:
        """Take requests out, at a boundary: those that were running, in admission order, and those that were not."""
        running = [r for r in self._running() if r.id in ids]
        self._leave(running)
        others = [r for r in (*self._prefilling, *self._waiting, *self._arrivals) if r.id in ids]
        for request in others:
            request.has_kv = False
            if request.order:
                self._prefilling.remove(request)
                self._prefill_pages -= self._pages_of(request.context)
                request.order = request.prefill_left = 0
        self._waiting = deque(r for r in self._waiting if r.id not in ids)
        self._arrivals = [r for r in self._arrivals if r.id not in ids]
        return running, others

    def drain(self) -> tuple[list[Request], list[Request]]:
        """Take everything out of a stopped replica, as `remove` does."""
        return self.remove(frozenset(r.id for r in self.requests()))

    def requests(self) -> list[Request]:
        """Running and prefilling requests in admission order, then those waiting."""
        admitted = sorted([*self._running(), *self._prefilling], key=lambda r: r.order)
        return [*admitted, *self._waiting, *self._arrivals]

    def progress(self) -> int:
        """Value of the step counter by now: what running requests have generated, in whole iterations."""
        if self._jump is None:
            return self._step
        start, curve, tokens = self._jump
        return self._step + curve.steps_done(tokens, self.env.now - start)

    def contexts(self) -> list[tuple[Request, int, bool]]:
        """Every request here as in `requests`, its context tokens by now, and whether it is running."""
        step = self.progress()
        return [(r, r.offset + step, True) if self.is_running(r) else (r, r.context, False) for r in self.requests()]

    def is_running(self, request: Request) -> bool:
        """Whether the request is in the decoding batch (its context is in the KV cache)."""
        return request.order > 0 and request.prefill_left == 0

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        while True:
            while self._orders:
                self._orders.popleft()()
            if self.stopped is not None:
                self.close()
                self.stopped.succeed()
                return
            if self._arrivals:
                self._kv_arrived = any(r.has_kv for r in self._arrivals)
                self._waiting.extend(self._arrivals)
                self._arrivals.clear()
            if self._prefill_pages or self._tokens + self._batch * self._padding > self._capacity_tokens:
                self._evict()
            chunks = self._admit() if self._waiting or self._prefilling else None
            if chunks:
                yield from self._prefill(chunks)
            elif self._batch:
                # The jump: as many decode steps as leave the batch as it is, in one sleep.
                batch, tokens, steps = self._batch, self._padded_tokens(), self._steps_ahead()
                curve = self.cost.decode(batch)
                start = env.now
                self._jump = start, curve, tokens
                self._asleep = True
                try:
                    yield env.timeout(curve.steps_s(tokens, steps))
                    self._asleep = False
                except simpy.Interrupt:
                    steps = 0
                    if not self._only_just(start):
                        steps = curve.steps_within(tokens, env.now - start)
                        yield from self._until(start + curve.steps_s(tokens, steps))
                self._jump = None
                self._step += steps
                self._tokens += steps * batch
                self._finish("decode", start)
            else:
                self.close()
                self._asleep = True
                with suppress(simpy.Interrupt):
                    yield env.event()

    def _only_just(self, start: float) -> bool:
        """Whether an iteration that began at `start` began at this very moment."""
        return self.env.now - start <= REACHED * self.env.now

    def _until(self, moment: float) -> Generator[simpy.Event, Any, None]:
        """Sleep on to a boundary; orders that arrive meanwhile are carried out there."""
        if moment > self.env.now:
            yield self.env.timeout(moment - self.env.now)

    def _prefill(self, work: list[Chunk]) -> Generator[simpy.Event, Any, None]:
        """One iteration with a chunk of each of the first prefilling in it; decodes take part only in chunked mode."""
        env = self.env
        decodes = self._batch if self._config.chunked_prefill else 0
        time_s = self.cost.mixed_s(decodes, self._padded_tokens(), work) if decodes else self.cost.prefill_s(work)
        start = env.now
        self._asleep = True
        try:
            yield env.timeout(time_s)
            self._asleep = False
        except simpy.Interrupt:
            if self._only_just(start):
                self._unadmit()
                return
            yield from self._until(start + time_s)
        if decodes:
            self._step += 1
            self._tokens += decodes
        now, complete = env.now, []
        for request, chunk in zip(self._prefilling, work, strict=False):
            request.prefill_left -= chunk.new_tokens
            if request.prefill_left:
                continue
            request.generated += 1
            if request.first_token_at != request.first_token_at:
                request.first_token_at = now
            complete.append(request)
        self._prefilling = [request for request in self._prefilling if request.prefill_left]
        self._prefill_pages = sum(self._pages_of(request.context) for request in self._prefilling)
        self._join(complete)
        self._finish("mixed" if decodes else "prefill", start)

    # ---- at a boundary ----------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        """Preempt the most recently admitted until the pages suffice."""
        while self._pages() + self._prefill_pages > self.capacity_pages:
            order, request = self._admitted.pop()
            if request.order != order:
                continue
            if request.prefill_left:
                self._prefilling.remove(request)
                self._prefill_pages -= self._pages_of(request.context)
                request.prefill_left = request.order = 0
            else:
                self._leave([request])
            request.preemptions += 1
            self.preemptions += 1
            self._waiting.appendleft(request)

    def _admit(self) -> list[Chunk]:
        """Admit from the waiting queue and return this iteration's work: a chunk of each of the first prefilling."""
        config, chunked = self._config, self._config.chunked_prefill
        budget = config.max_num_batched_tokens
        if chunked:
            budget = max(budget - self._batch, 1)
        left = budget - sum(r.prefill_left for r in self._prefilling)
        used = self._pages() + self._prefill_pages
        places = config.max_num_seqs - self._batch - len(self._prefilling)
        now, page, waiting = self.env.now, self._page_tokens, self._waiting
        room = self.capacity_pages - self._watermark_pages
        while waiting and places > 0:
            request = waiting[0]
            context = request.prompt_tokens + request.generated
            pages = -(-context // page)
            if used + pages > (room if used else self.capacity_pages):
                break
            if not request.has_kv and (left <= 0 if chunked else left < context and left < budget):
                break
            waiting.popleft()
            places -= 1
            used += pages
            request.order = order = next(self._numbers)
            self._admitted.append((order, request))
            if request.started_at != request.started_at:
                request.started_at = now
            request.replica = self.index
            if request.tps[-1:] != self._tps:
                request.tps += self._tps
            if request.has_kv:
                request.has_kv = False
                self._join([request])
            else:
                request.prefill_left = context
                self._prefilling.append(request)
                self._prefill_pages += pages
                left -= context
        if self._kv_arrived:  # KV that found no place on arrival is dropped
            self._kv_arrived = False
            for request in waiting:
                request.has_kv = False
        if not chunked:
            return [Chunk(request.prefill_left, 0) for request in self._prefilling]
        work, left = [], budget
        for request in self._prefilling:
            tokens = min(request.prefill_left, left)
            if tokens <= 0:
                break
            work.append(Chunk(tokens, request.context - request.prefill_left))
            left -= tokens
        return work

    def _unadmit(self) -> None:
        """Undo the admission of those whose prefill was cancelled before it began."""
        fresh = [r for r in self._prefilling if r.prefill_left == r.context]
        for request in reversed(fresh):
            self._prefilling.remove(request)
            self._prefill_pages -= self._pages_of(request.context)
            request.prefill_left = request.order = 0
            self._waiting.appendleft(request)

    def _join(self, requests: Sequence[Request]) -> None:
        """Put requests whose context is in the KV cache into the running batch."""
        step, page, residues, finishing = self._step, self._page_tokens, self._residues, self._finishing
        longest = self._longest if self.cost.skew else None
        tokens = 0
        for request in requests:
            order, generated = request.order, request.generated
            context = request.prompt_tokens + generated
            offset = request.offset = context - step
            tokens += context
            residues[offset % page] += 1
            heappush(finishing, (step + request.response_tokens - generated, order, request))
            if longest is not None:
                heappush(longest, (-offset, order, request))
        self._tokens += tokens
        self._batch += len(requests)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Take requests out of the running batch, their tokens brought up to date."""
        step, page, residues = self._step, self._page_tokens, self._residues
        for request in requests:
            offset = request.offset
            request.generated = offset + step - request.prompt_tokens
            request.order = 0
            self._tokens -= offset + step
            residues[offset % page] -= 1
        self._batch -= len(requests)

    def _finish(self, kind: str, start: float) -> None:
        """End iterations of one kind that began at `start`: let go of every request whose response is complete."""
        now = self.env.now
        if kind != self._span_kind or start != self._span_end:
            self.close()
            self._span_kind = kind
            self._span_start = start
        self._span_end = now
        if self._tokens > self.peak_tokens:
            self.peak_tokens = self._tokens
        heap, step = self._finishing, self._step
        finished = []
        while heap and heap[0][0] <= step:
            _, order, request = heappop(heap)
            if request.order == order:
                request.finished_at = now
                finished.append(request)
        if finished:
            self._leave(finished)
            self._on_finish(self, finished)

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    def _running(self) -> list[Request]:
        return [r for _, order, r in sorted(self._finishing, key=lambda item: item[1]) if r.order == order]

    def _pages_of(self, context: int) -> int:
        return -(-context // self._page_tokens)

    def _pages(self, ahead: int = 0) -> int:
        """KV pages of the running batch, `ahead` steps from now."""
        page = self._page_tokens
        padding: int = sum(map(mul, self._residues, self._short[(self._step + ahead) % page :]))
        return (self._tokens + self._batch * ahead + padding) // page

    def _steps_ahead(self) -> int:
        """Decode steps until the first response finishes or the next step's pages are missing."""
        heap = self._finishing
        finish, order, request = heap[0]
        while request.order != order:
            heappop(heap)
            finish, order, request = heap[0]
        steps, capacity = finish - self._step, self.capacity_pages
        most = self._tokens + self._batch * (steps - 1 + self._padding)
        if most <= self._capacity_tokens or self._pages(steps - 1) <= capacity:
            return steps
        low, high = 1, steps  # steps that fit, steps that don't
        while high - low > 1:
            middle = (low + high) // 2
            if self._pages(middle - 1) <= capacity:
                low = middle
            else:
                high = middle
        return low

    def _padded_tokens(self) -> float:
        """The running contexts' sum, plus the share of their padding to the longest that the kernel pays for."""
        skew = self.cost.skew
        if not skew or not self._batch:
            return self._tokens
        heap = self._longest
        least, order, request = heap[0]
        while request.order != order:
            heappop(heap)
            least, order, request = heap[0]
        return self._tokens + skew * (self._batch * (self._step - least) - self._tokens)

    # ---- spans ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Record the span that is still open."""
        if self._span_kind:
            self._recorder.add(
                self.gpus, self._span_start, self._span_end, self._span_kind, self.tp, f"replica {self.index}"
            )
            self._span_kind = ""

    def retire(self) -> None:
        """Let go of the requests and of the rollout, which is over: what is not in a cycle is freed at once."""
        self.close()
        self._admitted, self._finishing, self._longest = [], [], []
        self._on_finish = _nobody


def _nobody(replica: Replica, finished: list[Request]) -> None:
    """Whom a retired replica reports to."""
