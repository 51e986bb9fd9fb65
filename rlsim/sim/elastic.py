"""A call that works on samples as they come, on whichever of its replicas' GPUs are free at the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import simpy

from rlsim.sim.flow import Inbox
from rlsim.sim.gpus import GpuPool
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import Request
from rlsim.workflow.graph import Call

#: One replica's work on sequences of these lengths (tokens): names and seconds.
PieceTime = Callable[[Sequence[int]], Sequence[tuple[str, float]]]


class Guests(NamedTuple):
    """Further data-parallel replicas of a training call, each with all of the model, on GPUs that it may borrow.

    They accumulate gradients as the call's own replicas do; the optimizer states stay on the call's own GPUs.
    """

    replicas: Sequence[tuple[int, ...]]  # their GPUs
    piece: PieceTime
    load_s: float  # until one has the trainer's weights, before its first piece
    own_tokens_per_s: float  # of all of the call's own replicas
    reduce_s: float  # once at the end: their gradients are added to those of the call's own replicas


class Pieces(NamedTuple):
    """What a call costs when it is done in pieces, and how much of it one replica takes at a time."""

    piece: PieceTime
    tokens: int  # at most in one piece
    load_s: float  # a replica's states in from host memory, before its first piece
    finish: Sequence[tuple[str, float]]  # what all replicas do once at the end: names and seconds
    guests: Guests | None = None
    swap_s: float = 0.0  # its weights in from host memory, where its GPUs had those of another model before a piece
    gradients_s: float = 0.0  # its gradients to host memory, after a piece that begins while others generate, or back


@dataclass(eq=False)
class _Worker:
    """A data-parallel replica at work on a call."""

    number: int
    gpus: tuple[int, ...]
    costs: Pieces | Guests
    loaded: bool = False  # whether it has its states
    away: bool = False  # whether its gradients are in host memory, if they go there

    @property
    def guest(self) -> bool:
        return isinstance(self.costs, Guests)

    def wants(self, tokens: int) -> bool:
        """Whether to begin for so many tokens: a guest does if the call's own need longer for them than it to load."""
        if self.loaded or not isinstance(self.costs, Guests):
            return True
        return tokens >= self.costs.load_s * self.costs.own_tokens_per_s


class ElasticCall:
    """Data-parallel replicas that each take a share of the samples whenever their GPUs are free.

    A replica holds its GPUs for one piece at a time, so several such calls, and the rollout whose GPUs these are, take
    turns. `slowdown` of its GPUs, asked when a piece begins, is how many times as long it takes beside what else is
    there. Once no more samples can come, what is left is spread evenly over the call's own replicas and loaded guests.

    Guests do the same on GPUs that nobody else wants, with what the call's own replicas cannot take up at once. One
    whose GPUs do not become free is not waited for.
    """

    def __init__(
        self,
        env: simpy.Environment,
        pool: GpuPool,
        replicas: Sequence[tuple[int, ...]],
        pieces: Pieces,
        inbox: Inbox,
        recorder: Recorder,
        call: Call,
        slowdown: Callable[[tuple[int, ...]], float],
        generating: Callable[[], bool],
        residents: dict[int, str],
    ) -> None:
        self._env, self._pool, self._pieces, self._inbox = env, pool, pieces, inbox
        self._recorder, self._call, self._slowdown = recorder, call, slowdown
        self._generating = generating  # whether responses of the step are still generated
        self._residents = residents  # by GPU: whose weights the last piece there needed, of whichever call
        self.on_done: Callable[[Sequence[Request]], None] | None = None
        self._own = len(replicas)
        self._queue: deque[Request] = deque()
        self._tokens = 0  # of all that is in the queue
        #: Replicas that have nothing to do, the call's own and guests, in the order in which they had.
        self._idle: tuple[deque[simpy.Event], deque[simpy.Event]] = (deque(), deque())
        self._coming = 0  # replicas whose GPUs are theirs, and that are about to take a piece
        self._all_taken = env.event()  # no sample waits, and no more can come
        self.started_at = inf  # until the first piece begins
        self.parts_s: dict[str, float] = {}  # what the work went to, mean over the call's own replicas
        workers = [_Worker(i, gpus, pieces) for i, gpus in enumerate(replicas)]
        if pieces.guests:
            workers += [_Worker(i, gpus, pieces.guests) for i, gpus in enumerate(pieces.guests.replicas, self._own)]
        self._workers = workers
        #: That each replica worked on, guests last: its weight in the mean of the gradients.
        self.samples = [0] * len(workers)
        inbox.listen(self._arrived)
        self.done = simpy.AllOf(env, [env.process(self._work(worker)) for worker in workers])  # all is worked on
        env.process(self._end())

    @property
    def finish(self) -> list[tuple[str, float]]:
        """What all of the call's own GPUs do together when it is done: names and seconds."""
        pieces, helped = self._pieces, any(self.samples[self._own :])
        back = [("offload", pieces.gradients_s)] if pieces.gradients_s and any(w.away for w in self._workers) else []
        added = [("communication", pieces.guests.reduce_s)] if pieces.guests and helped else []
        return [*back, *pieces.finish, *added]

    @property
    def backlog_s(self) -> float:
        """How long the call's own replicas will be at work on what waits, of a call that may have guests; else 0."""
        return self._tokens / self._pieces.guests.own_tokens_per_s if self._pieces.guests else 0.0

    def _arrived(self, samples: Sequence[Request]) -> None:
        self._queue.extend(samples)
        self._tokens += sum(sample.context for sample in samples)
        self._rouse()

    def _rouse(self) -> None:
        """Wake the next idle replica if not all of the queue will be taken at this moment anyway; it wakes another."""
        idle = self._idle[0] or self._idle[1]
        if idle and self._coming < len(self._queue):
            idle.popleft().succeed()

    def _end(self) -> Generator[simpy.Event, Any, None]:
        yield self._inbox.closed
        for idle in self._idle:
            while idle:
                idle.popleft().succeed()
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self._inbox.closed.triggered and not self._queue and not self._all_taken.triggered:
            self._all_taken.succeed()

    def _work(self, worker: _Worker) -> Generator[simpy.Event, Any, None]:
        env, gpus = self._env, worker.gpus
        while self._queue or not self._inbox.closed.triggered:
            if self._coming >= len(self._queue) or not worker.wants(self._tokens):
                if self._inbox.closed.triggered:
                    return  # others take what is left
                idle = self._idle[worker.guest]
                idle.append(env.event())
                yield idle[-1]
                continue
            granted = self._pool.acquire(gpus, self._call.kind, streams=True, guest=worker.guest)
            at_once = granted.triggered
            self._coming += at_once
            self._rouse()
            yield granted | self._all_taken if worker.guest else granted
            if not granted.triggered:
                self._pool.withdraw(granted)
                return
            self._coming -= at_once
            piece = self._take()
            if piece:
                yield from self._work_on(piece, worker)
            self._pool.release(gpus)
            if piece and self.on_done:
                self.on_done(piece)

    def _work_on(self, piece: Sequence[Request], worker: _Worker) -> Generator[simpy.Event, Any, None]:
        start = self._env.now
        self.started_at = min(start, self.started_at)
        work = list(worker.costs.piece([r.context for r in piece]))
        if moved_s := self._moved_s(worker):
            work.append(("offload", moved_s))
        slowdown = self._slowdown(worker.gpus)
        if not worker.guest:
            for name, seconds in work:
                self.parts_s[name] = self.parts_s.get(name, 0.0) + slowdown * seconds / self._own
        self.samples[worker.number] += len(piece)
        yield self._env.timeout(slowdown * sum(seconds for _, seconds in work))
        self._recorder.add(worker.gpus, start, self._env.now, self._call.name)

    def _moved_s(self, worker: _Worker) -> float:
        """Seconds of what comes from host memory before a piece that begins now, and of gradients that go after it."""
        costs, first, back = worker.costs, not worker.loaded, worker.away
        worker.loaded = True
        if isinstance(costs, Guests):
            return costs.load_s * first
        others = any(self._residents.get(gpu) != self._call.model for gpu in worker.gpus)
        self._residents.update(dict.fromkeys(worker.gpus, self._call.model))
        worker.away = self._generating()
        return costs.load_s * first + costs.swap_s * others + costs.gradients_s * (back + worker.away)

    def _take(self) -> list[Request]:
        """The next piece: in order of arrival, no more than an even share of what is left when no more can come."""
        queue, most = self._queue, self._pieces.tokens
        if self._inbox.closed.triggered:
            sharing = sum(not worker.guest or worker.loaded for worker in self._workers)
            most = min(most, max(self._tokens // sharing, 1))
        piece: list[Request] = []
        tokens = 0
        while queue and (not piece or tokens + queue[0].context <= most):
            tokens += queue[0].context
            piece.append(queue.popleft())
        self._tokens -= tokens
        self._look_for_end()
        return piece
