"""One replica of an inference engine: continuous batching over a paged KV cache, jumping from event to event.

docs/engine.md is the specification. `_run` is the loop: at each iteration boundary carry out orders, preempt, admit;
then iterate once (prefill) or as many times as nothing can change (decode), and let go of what has finished or pauses.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from math import floor, isnan
from operator import attrgetter
from typing import Any, NamedTuple

import simpy

from rlsim.cost.curve import DecodeCurve
from rlsim.cost.step import Chunk, Conditions, StepCost
from rlsim.cost.transfer import NO_HOST_KV, HostKv
from rlsim.sim.batch import RunningBatch
from rlsim.sim.drawn import DrawnBatch
from rlsim.sim.moment import ONE_MOMENT, Sleep, at
from rlsim.sim.recorder import Left, Recorder, Stays
from rlsim.sim.request import NAN, EngineConfig, Request, UpdatedKv
from rlsim.sim.scheduler import Scheduler


class ChunkListener(NamedTuple):
    """Who is told of responses while they are generated."""

    tokens: int  # of a chunk
    handover_s: float  # of the replica's time for each chunk
    on_chunks: Callable[[Sequence[tuple[Request, int]]], None]  # requests, and how many tokens each has generated


class Replica:
    """`tp` GPUs of one node that decode together. Starts with nothing to do; `receive` gives it requests.

    `chunks` is told each time a response reaches a multiple of its chunk length; each such chunk, and the last one of
    a response, makes the replica's next iteration begin later by the time of a hand-over. To a `quiet` replica no order
    ever comes, and it tells of the last responses, once nothing waits any more, all at once and at the end. What the KV
    cache has no room for goes to `host`.
    """

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
        chunks: ChunkListener | None = None,
        quiet: bool = False,
        version: int = 0,
        host: HostKv = NO_HOST_KV,
    ) -> None:
        self.env = env
        self.index = index
        self.node = node
        self.gpus = gpus
        self.tp = len(gpus)  # all its GPUs: tensor parallel × pipeline stages (`EngineConfig.pp`)
        self.cost = self._usual = cost
        self.capacity_pages = capacity_pages
        self.version = version  # of its weights: updates that they have had
        self.peak_tokens = 0
        self.stopped: simpy.Event | None = None  # set once it was told to stop; fires at that boundary
        self._recorder = recorder
        self._on_finish = on_finish
        self._orders: deque[Callable[[], None]] = deque()
        self._arrivals: list[Request] = []
        self._chunk_listener = chunks
        self._quiet = quiet
        self._owed_s = 0.0  # for chunks that were handed over at the boundary before
        self._chunked = config.chunked_prefill
        self._host = host
        number = index if recorder.numbers is None else next(recorder.numbers)
        self._stays = Stays(recorder.step, recorder.call, number, gpus)
        recorder.stays.append(self._stays)
        chunk_tokens = chunks.tokens if chunks else 0
        self._batch = (DrawnBatch if cost.drawn else RunningBatch)(
            config.page_tokens, capacity_pages, cost.skew, chunk_tokens, cost.kv
        )
        capacity = capacity_pages * cost.kv.page_units
        self._batch.spare_pages = capacity - floor(cost.most_kv * capacity)
        self.scheduler = Scheduler(
            self._batch, config, capacity_pages, numbers, self._stays, number, self.tp, quiet, host.pages
        )
        self._jump: tuple[float, DecodeCurve, float] | None = None  # while decoding: start, curve, tokens at the start
        self._label = f"replica {number}"  # of its spans
        self._span_kind = ""
        self._span_start = self._span_end = 0.0
        self._stopped_at = NAN
        self._paused: simpy.Event | None = None  # while it is to stand still: fires when it does
        self._kept = True  # whether requests keep their KV cache in that pause
        self._sleep = Sleep(env)  # that orders and arrivals cut short
        self._began_at = NAN  # when the iteration under way, or its jump, began; NaN: none, or undone
        self._steps = 0  # decode steps of the jump
        env.process(self._run())

    # ---- from outside: orders, carried out at the next iteration boundary -------------------------------------------

    def at_boundary(self, order: Callable[[], None], urgent: bool = False) -> None:
        """Have `order` carried out at the next iteration boundary, after those given before (unless it is urgent)."""
        if urgent:
            self._orders.appendleft(order)
        else:
            self._orders.append(order)
        self._wake()

    def receive(self, requests: Sequence[Request]) -> None:
        """Append requests to the waiting queue at the next boundary."""
        now = self.env.now
        for request in requests:
            request.arrived_at = now
        self._arrivals.extend(requests)
        self._wake()

    def stop(self) -> simpy.Event:
        """Stop for good at the next boundary; the event fires then. `remove` hands out what was here."""
        if self.stopped is None:
            self.stopped = self.env.event()
            self._wake()
        return self.stopped

    def pause(self, kv: UpdatedKv) -> simpy.Event:
        """Stand still from the next boundary on until `resume`; the event fires when it does."""
        self._paused, self._kept = self.env.event(), kv == "keep"
        self._wake()
        return self._paused

    def resume(self) -> None:
        self._paused = None
        self._wake()

    def renew(self, version: int) -> None:
        """Its weights are of this version from now on, while it stands still."""
        step = self.progress()
        for request in self._batch:
            request.end_run(self.version, self._batch.context_of(request, step) - request.prompt_tokens)
        for request in self._not_decoding():
            request.end_run(self.version, request.generated)
            request.kv_arrived &= self._kept  # of what came here while it stood still
        self.version = version

    def catch_up(self) -> None:
        """Bring the tokens of what is running up to date at a boundary that is not: the run ends here."""
        if self._jump is not None:
            self._extend_span("decode", self._jump[0], self.env.now)
        self._batch.advance(self.progress() - self._batch.step)

    def remove(self, left: Left, ids: frozenset[int] | None = None) -> tuple[list[Request], list[Request]]:
        """Take requests (all, unless named) out, at a boundary: those that were running, in admission order, and those
        that were not. `left` says why.
        """
        if ids is None:
            ids = frozenset(request.id for request in self.requests())
        running = [r for r in self._batch.requests() if r.id in ids]
        self._batch.leave(running)
        others = [*self.scheduler.remove(ids), *(r for r in self._arrivals if r.id in ids)]
        for request in others:
            request.kv_arrived = False
            self.scheduler.unpin(request)
        self._arrivals = [r for r in self._arrivals if r.id not in ids]
        left_at = self._stopped_at if not isnan(self._stopped_at) else self.env.now
        self._stays.add([*running, *others], left_at, left)
        return running, others

    def pin(self, request: Request) -> None:
        """Keep the KV cache of a trajectory that leaves for a tool call at this boundary."""
        self.scheduler.pin(request)

    def unpin(self, request: Request) -> None:
        """From the next boundary on its pages are free for others, if it is not back."""
        if request in self.scheduler.pinned:
            self.at_boundary(lambda: self.scheduler.unpin(request))

    @property
    def room(self) -> tuple[int, int, int]:
        """Requests that wait, KV pages that nobody holds, and all there are."""
        return len(self.scheduler.waiting) + len(self._arrivals), self.scheduler.free_pages, self.capacity_pages

    def set_cost(self, cost: StepCost) -> None:
        """Change the cost of an iteration, at a boundary: something else runs on these GPUs from now on, or no more."""
        self.cost = self._usual = cost

    def requests(self) -> list[Request]:
        """Running and prefilling requests in admission order, then those waiting."""
        admitted = sorted(chain(self._batch, self.scheduler.prefilling), key=attrgetter("order"))
        return [*admitted, *self.scheduler.waiting, *self._arrivals]

    def _not_decoding(self) -> Iterator[Request]:
        return chain(self.scheduler.prefilling, self.scheduler.waiting, self._arrivals)

    @property
    def unfinished(self) -> int:
        return self._batch.size + self.scheduler.size + len(self._arrivals)

    @property
    def idle(self) -> bool:
        return not (self._batch.size or self._arrivals or self.scheduler.size)

    def take_peak(self) -> int:
        """Most KV tokens that were here since this was asked last; from now on, since now."""
        peak, self.peak_tokens = self.peak_tokens, self.scheduler.kv_tokens
        return peak

    def progress(self) -> int:
        """Value of the step counter by now: what running requests have generated, in whole iterations."""
        if self._jump is None:
            return self._batch.step
        start, curve, tokens = self._jump
        return self._batch.step + min(self._steps, curve.steps_done(tokens, self.env.now - start))

    def contexts(self) -> list[tuple[Request, int, bool]]:
        """Every request here as in `requests`, its context tokens by now, and whether it is running (decodes)."""
        step, there, context_of = self.progress(), self.requests(), self._batch.context_of
        return [
            (r, context_of(r, step), True) if r.order and not r.prefill_left else (r, r.context, False) for r in there
        ]

    def generated(self) -> Counter[int]:
        found = self._batch.generated(self.progress())
        found.update(r.generated for r in self._not_decoding())
        return found

    def context_tokens(self) -> int:
        return self._batch.tokens_at(self.progress()) + sum(r.context for r in self._not_decoding())

    def _wake(self) -> None:
        """Something has come: the boundary for it is the end of the iteration under way, or at once where none is.

        One that began at this very moment is undone.
        """
        sleep, now = self._sleep, self.env.now
        if not sleep.lasts:  # it is at a boundary, or knows already
            return
        if isnan(self._began_at):
            sleep.cut(now)
        elif now - self._began_at <= ONE_MOMENT * now:
            self._steps, self._began_at = 0, NAN
            sleep.cut(now)
        elif self._jump is not None:
            start, curve, tokens = self._jump
            self._steps = min(self._steps, max(curve.steps_within(tokens, now - start), 1))
            sleep.cut(start + curve.steps_s(tokens, self._steps))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, batch, scheduler = self.env, self._batch, self.scheduler
        while True:
            if self._orders or self._arrivals or self.stopped is not None or self._paused is not None:
                self._look_up()
                if self.stopped is not None:
                    return
                if self._paused is not None:
                    yield from self._stand_still()
                    continue
            chunks = scheduler.schedule(env.now)
            if self._usual.conditional:
                level = batch.length_level(self._usual.lengths) if self._usual.lengths and batch.size else -1
                self.cost = self._usual.under(Conditions(self.version, scheduler.free_pages < batch.spare_pages, level))
            if chunks:
                yield from self._prefill(chunks)
            elif self._quiet and batch.size and not scheduler.waiting and batch.fits_to_the_end():
                yield from self._to_the_end()
            elif batch.size:
                # The jump: as many decode steps as leave the batch as it is, in one sleep.
                curve, tokens, self._steps = batch.ahead(self.cost)
                start = self._began_at = env.now
                self._jump = start + self._owed_s, curve, tokens
                self._sleep = Sleep(env, start + self._owed_s + curve.steps_s(tokens, self._steps))
                yield self._sleep
                if self._steps:
                    self._owed_s = 0.0
                self._jump = None
                batch.advance(self._steps)
                self._finish("decode", start)
            else:
                self._flush_span()
                idle_at, self._sleep, self._began_at = env.now, Sleep(env), NAN
                yield self._sleep
                if env.now > idle_at:
                    self._owed_s = 0.0
                    scheduler.next_boundary()

    def _to_the_end(self) -> Generator[simpy.Event, Any, None]:
        """Decode until every response is complete: nothing comes in between."""
        start = self.env.now
        end, finished, peak = self._batch.drain(start, self.cost.decode)
        yield at(self.env, end)
        self._extend_span("decode", start, end)
        self.peak_tokens = max(self.peak_tokens, peak)
        self._stays.finished(finished)
        self._on_finish(self, finished)

    def _look_up(self) -> None:
        """At a boundary: carry out orders, then stop if told to, or take in what has arrived unless it stands still."""
        while self._orders:
            self._orders.popleft()()
        if self.stopped is not None:
            self._flush_span()
            self._stopped_at = self.env.now
            self.stopped.succeed()
            if self._paused is not None and not self._paused.triggered:
                self._paused.succeed()  # it stands still for good
        elif self._arrivals and self._paused is None:
            self.scheduler.arrive(self._arrivals)
            self._arrivals.clear()

    def _stand_still(self) -> Generator[simpy.Event, Any, None]:
        """From a boundary until something is to be done: an order, a stop, the end of the pause."""
        self._flush_span()
        if self._paused is not None and not self._paused.triggered:
            if not self._kept:
                self._lose_kv()
            self._paused.succeed()
        self._sleep, self._began_at = Sleep(self.env), NAN
        yield self._sleep

    def _lose_kv(self) -> None:
        """What is running or prefilling goes to the front of the queue, in the order of its admission."""
        now, running = self.env.now, self._batch.requests()
        lost = [*running, *self.scheduler.prefilling]
        first = sorted(lost, key=attrgetter("order"))
        self._batch.leave(running)
        self.scheduler.lose_kv()
        self._stays.add(lost, now, "updated")
        for request in lost:
            request.order, request.prefill_left, request.arrived_at = 0, 0, now
        self.scheduler.waiting.extendleft(reversed(first))

    def _prefill(self, work: list[Chunk]) -> Generator[simpy.Event, Any, None]:
        """One iteration with a chunk of each of the first prefilling in it; decodes take part only in chunked mode."""
        env, batch = self.env, self._batch
        decodes = batch.size if self._chunked else 0
        time_s = batch.mixed_s(self.cost, work) if decodes else self.cost.prefill_s(work)
        if self.scheduler.loading_pages:
            time_s = max(time_s, self._host.load_s(self.scheduler.loading_pages))
        start = self._began_at = env.now
        self._sleep = Sleep(env, start + (time_s + self._owed_s))
        yield self._sleep
        if isnan(self._began_at):
            self.scheduler.unadmit()
            return
        self._owed_s = 0.0
        if decodes:
            batch.advance(1)
        complete = self.scheduler.prefilled(work, env.now)
        batch.join(complete)
        self._finish("mixed" if decodes else "prefill", start, complete)

    # ---- at a boundary ----------------------------------------------------------------------------------------------

    def _finish(self, kind: str, start: float, prefilled: Sequence[Request] = ()) -> None:
        """End iterations of one kind that began at `start`: let go of every request that is complete or pauses."""
        now, batch = self.env.now, self._batch
        self._extend_span(kind, start, now)
        if batch.tokens > self.peak_tokens:  # what is shared only makes it less
            self.peak_tokens = max(self.peak_tokens, self.scheduler.kv_tokens)
        self.scheduler.trim()
        left = batch.complete()
        finished = [request for request in left if request.finished] if left else left
        if finished:
            for request in finished:
                request.finished_at = now
            self._stays.finished(finished)
        if len(finished) < len(left):
            self._stays.add([r for r in left if not (r.finished or r.acts)], now, "paused")
            self._stays.add([r for r in left if r.acts], now, "tool")
        if self._chunk_listener:
            self._hand_over(self._chunk_listener, len(finished), prefilled)
        if left:
            self._on_finish(self, left)

    def _hand_over(self, chunks: ChunkListener, finished: int, prefilled: Sequence[Request]) -> None:
        """Tell of responses that have just completed a chunk; of those just prefilled, the batch does not know yet."""
        reached = [(r, r.generated) for r in prefilled if r.generated % chunks.tokens == 0 and not r.at_limit]
        reached += self._batch.chunks_complete()
        self._owed_s += chunks.handover_s * (finished + len(reached))
        if reached:
            chunks.on_chunks(reached)

    # ---- spans ------------------------------------------------------------------------------------------------------

    def _extend_span(self, kind: str, start: float, end: float) -> None:
        """Work of this kind went on from `start` to `end`: the span that is open grows, or a new one begins."""
        if kind != self._span_kind or start != self._span_end:
            self._flush_span()
            self._span_kind = kind
            self._span_start = start
        self._span_end = end

    def _flush_span(self) -> None:
        """Record the span that is still open."""
        if self._span_kind:
            self._recorder.add(self.gpus, self._span_start, self._span_end, self._span_kind, self.tp, self._label)
            self._span_kind = ""

    def retire(self) -> None:
        """Let go of the requests and of the rollout, which is over: what is not in a cycle is freed at once."""
        self._flush_span()
        self.scheduler.clear()
        self._batch.clear()
        self._on_finish = lambda *_: None
