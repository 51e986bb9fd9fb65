"""A call that works on samples as they come, on whichever of its replicas' GPUs are free at the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any, NamedTuple

import simpy

from rlsim.sim.flow import Inbox
from rlsim.sim.pool import GpuPool
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import Request
from rlsim.workflow.graph import Call


class Pieces(NamedTuple):
    """What a call costs when it is done in pieces, and how much of it one replica takes at a time."""

    part: Callable[[Sequence[int]], Sequence[tuple[str, float]]]  # one replica, these lengths (tokens): names, seconds
    tokens: int  # at most in one part
    load_s: float  # a replica's states in from host memory, before its first part
    finish: Sequence[tuple[str, float]]  # what all replicas do once at the end: names and seconds


class ElasticCall:
    """Data-parallel replicas that each take a share of the samples whenever their GPUs are free.

    A replica holds its GPUs for one part at a time, so several such calls, and the rollout whose GPUs these are, take
    turns. `slowdown` of its GPUs, asked when a part begins, is how many times as long it takes beside what else is
    there. Once no more samples can come, what is left is spread evenly over all replicas.
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
    ) -> None:
        self._env, self._pool, self._pieces, self._inbox = env, pool, pieces, inbox
        self._recorder, self._call, self._slowdown = recorder, call, slowdown
        self.on_done: Callable[[Sequence[Request]], None] | None = None
        self._replicas = len(replicas)
        self._queue: deque[Request] = deque()
        self._tokens = 0  # of all that is in the queue
        self._idle: deque[simpy.Event] = deque()  # replicas that have nothing to do, in the order in which they had
        self._coming = 0  # replicas whose GPUs are theirs, and that are about to take a part
        self.started_at = inf  # until the first part begins
        self.parts_s: dict[str, float] = {}  # what the work went to, mean over replicas
        self.samples = [0] * len(replicas)  # that each replica worked on: its weight in the mean of the gradients
        inbox.listen(self._arrived)
        self._workers = [env.process(self._work(i, gpus)) for i, gpus in enumerate(replicas)]
        env.process(self._end())

    @property
    def done(self) -> simpy.Event:
        """Fires when every sample that ever came is worked on."""
        return simpy.AllOf(self._env, self._workers)

    def _arrived(self, samples: Sequence[Request]) -> None:
        self._queue.extend(samples)
        self._tokens += sum(sample.context for sample in samples)
        self._rouse()

    def _rouse(self) -> None:
        """Wake the next idle replica if not all of the queue will be taken at this moment anyway; it wakes another."""
        if self._idle and self._coming < len(self._queue):
            self._idle.popleft().succeed()

    def _end(self) -> Generator[simpy.Event, Any, None]:
        yield self._inbox.closed
        while self._idle:
            self._idle.popleft().succeed()

    def _work(self, index: int, gpus: tuple[int, ...]) -> Generator[simpy.Event, Any, None]:
        env, loaded = self._env, False
        while self._queue or not self._inbox.closed.triggered:
            if self._coming >= len(self._queue):
                if self._inbox.closed.triggered:
                    return  # others take what is left
                self._idle.append(env.event())
                yield self._idle[-1]
                continue
            granted = self._pool.acquire(gpus, self._call.kind)
            at_once = granted.triggered
            self._coming += at_once
            self._rouse()
            yield granted
            self._coming -= at_once
            part = self._take()
            if part:
                start = env.now
                self.started_at = min(start, self.started_at)
                work = list(self._pieces.part([r.context for r in part]))
                if not loaded and self._pieces.load_s:
                    work.append(("offload", self._pieces.load_s))
                loaded = True
                slowdown = self._slowdown(gpus)
                for name, seconds in work:
                    self.parts_s[name] = self.parts_s.get(name, 0.0) + slowdown * seconds / self._replicas
                self.samples[index] += len(part)
                yield env.timeout(slowdown * sum(seconds for _, seconds in work))
                self._recorder.add(gpus, start, env.now, self._call.name)
            self._pool.release(gpus)
            if part and self.on_done:
                self.on_done(part)

    def _take(self) -> list[Request]:
        """The next part: in order of arrival, no more than an even share of what is left when no more can come."""
        queue, most = self._queue, self._pieces.tokens
        if self._inbox.closed.triggered:
            most = min(most, max(self._tokens // self._replicas, 1))
        part: list[Request] = []
        tokens = 0
        while queue and (not part or tokens + queue[0].context <= most):
            tokens += queue[0].context
            part.append(queue.popleft())
        self._tokens -= tokens
        return part
