"""Models that score responses, on GPUs of their own or on shared ones: an LLM that answers requests as they come, and
one that reads responses while they are generated, prefill only, chunk by chunk (a reward model, a critic).

docs/engine.md is the specification.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import simpy

from rlsim.cost.step import Chunk, StepCost
from rlsim.sim.moment import Sleep, until_over
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica
from rlsim.sim.request import EngineConfig, Request

#: Told when a replica's GPUs begin to have work, and when they have none left.
OnBusy = Callable[[tuple[int, ...], bool], None]


class RewardModelEngine(NamedTuple):
    """What a model that scores responses runs on: an `InferenceServer` that answers, or a
    `StreamingScorer` that reads along."""

    tp: int
    cost: StepCost
    crowded: StepCost  # while other work runs on its GPUs
    slowdown: float  # how many times as long that work takes while the model is busy
    capacity_pages: int
    config: EngineConfig
    handover_s: float = 0.0  # of a rollout replica's time, for each chunk of a response that it hands over
    load_s: float = 0.0  # its weights on their way from host memory, before it works in a step


class InferenceServer:
    """Replicas of an inference engine; a request goes to the one with the fewest tokens outstanding."""

    def __init__(
        self,
        env: simpy.Environment,
        replicas: Sequence[tuple[int, ...]],
        cost: StepCost,
        capacity_pages: int,
        config: EngineConfig,
        recorder: Recorder,
        node_of: Callable[[int], int],
        on_busy: OnBusy | None = None,
    ) -> None:
        numbers = itertools.count(1)
        self._replicas = [
            Replica(env, i, node_of(gpus[0]), gpus, cost, capacity_pages, config, recorder, self._finished, numbers)
            for i, gpus in enumerate(replicas)
        ]
        self._tokens = [0] * len(replicas)  # outstanding, of prompts and answers
        self._waiting: dict[int, Callable[[], None]] = {}
        self._on_busy = on_busy
        self.closed = env.event()  # fires when it is closed

    def submit(self, request: Request, on_answer: Callable[[], None]) -> None:
        index = min(range(len(self._tokens)), key=self._tokens.__getitem__)
        replica = self._replicas[index]
        if self._on_busy and not self._tokens[index]:
            self._on_busy(replica.gpus, True)
        self._tokens[index] += request.prompt_tokens + request.response_tokens
        self._waiting[request.id] = on_answer
        replica.receive([request])

    def forget(self, ids: frozenset[int]) -> None:
        """Nobody waits for these answers any more: what is not finished leaves at the next iteration boundary."""
        for request in ids & self._waiting.keys():
            del self._waiting[request]
        for replica in self._replicas:
            if not ids.isdisjoint(request.id for request in replica.requests()):
                replica.at_boundary(lambda r=replica: self._left(r, [x for p in r.remove("aborted", ids) for x in p]))  # type: ignore[misc]

    @property
    def busy_gpus(self) -> frozenset[int]:
        working = [] if self.closed.triggered else self._replicas
        return frozenset(g for r in working if self._tokens[r.index] for g in r.gpus)

    def close(self) -> None:
        """Nothing more will be asked; what is still unanswered is dropped."""
        for replica in self._replicas:
            if self._on_busy and self._tokens[replica.index]:
                self._on_busy(replica.gpus, False)
            replica.stop()
        self.closed.succeed()

    def break_off(self) -> None:
        """The run is over: what is still unanswered is dropped at this moment."""
        for replica in self._replicas:
            replica.catch_up()
            replica.remove("stopped")
            replica.retire()

    def _finished(self, replica: Replica, finished: list[Request]) -> None:
        self._left(replica, finished)
        for request in finished:
            answer = self._waiting.pop(request.id, None)
            if answer:
                answer()

    def _left(self, replica: Replica, requests: Sequence[Request]) -> None:
        self._tokens[replica.index] -= sum(r.prompt_tokens + r.response_tokens for r in requests)
        if self._on_busy and requests and not self._tokens[replica.index] and not self.closed.triggered:
            self._on_busy(replica.gpus, False)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A response as the scoring model has it."""

    request: Request
    arrival: int
    there: int = 0  # tokens of prompt and response that have come
    done: int = 0  # of these, the ones in the KV cache
    pages: int = 0  # that those hold, or will at the end of the iteration
    on_scored: Callable[[Request], None] | None = None  # set once all of it has come


class _PrefillReplica:
    """GPUs that prefill together, one iteration after the other, whatever has come."""

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        gpus: tuple[int, ...],
        cost: StepCost,
        capacity_pages: int,
        config: EngineConfig,
        recorder: Recorder,
        on_busy: OnBusy | None,
    ) -> None:
        self.gpus = gpus
        self.cost = cost
        self.tokens = 0  # of its sequences, prefilled or not
        self.busy = False
        self.busy_s = 0.0
        self.recomputed_tokens = 0  # prefilled again, for lack of pages
        self.peak_pages = 0
        self._env, self._config, self._recorder, self._on_busy = env, config, recorder, on_busy
        self._capacity_pages = capacity_pages
        self._label = f"replica {index}"
        self._pages = 0
        self._queue: dict[_Sequence, None] = {}  # some of their tokens are neither in the cache nor on their way there
        self._holding: dict[_Sequence, None] = {}  # with KV
        self._working: list[_Sequence] = []
        self._closed = False
        self._sleep = Sleep(env)  # while there is nothing to do
        env.process(self._run())

    def add(self, sequence: _Sequence, tokens: int) -> None:
        self.tokens += tokens - sequence.there
        sequence.there = tokens
        self._queue.setdefault(sequence)
        self._wake()

    def drop(self, sequence: _Sequence) -> None:
        """Nobody wants it any more. One that is being worked on keeps its pages to the end of the iteration."""
        self.tokens -= sequence.there
        sequence.there, sequence.on_scored = 0, None
        self._queue.pop(sequence, None)
        if sequence not in self._working:
            self._free(sequence)

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._sleep.lasts:
            self._sleep.cut(self._env.now)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self._env
        while True:
            yield from until_over(env)  # what comes at one moment is taken together
            if self._closed or not self._queue:
                self._say(False)
                if self._closed:
                    return
                self._sleep = Sleep(env)
                yield self._sleep
                continue
            self._say(True)
            work = self._take()
            start = env.now
            yield env.timeout(self.cost.prefill_s(work))
            self.busy_s += env.now - start
            self._recorder.add(self.gpus, start, env.now, "prefill", len(self.gpus), self._label)
            self._end(work)

    def _say(self, busy: bool) -> None:
        if busy != self.busy:
            self.busy = busy
            if self._on_busy:
                self._on_busy(self.gpus, busy)

    def _take(self) -> list[Chunk]:
        """The next iteration: the sequences in the order in which their tokens came, as many as the budget allows."""
        left, page = self._config.max_num_batched_tokens, self._config.page_tokens
        work: list[Chunk] = []
        while self._queue and left and len(work) < self._config.max_num_seqs:
            sequence = next(iter(self._queue))
            missing = sequence.there - sequence.done
            new = min(missing, left)
            pages = -(-(sequence.done + new) // page)
            if not self._make_room(sequence, pages):
                break
            if new == missing:  # else it is cut, and goes before those whose tokens came later
                del self._queue[sequence]
            self._working.append(sequence)
            self._holding.setdefault(sequence)
            self._pages += pages - sequence.pages
            sequence.pages = pages
            work.append(Chunk(new, sequence.done))
            left -= new
        self.peak_pages = max(self.peak_pages, self._pages)
        return work

    def _make_room(self, sequence: _Sequence, pages: int) -> bool:
        """Whether the sequence can have so many pages; the last to come of the others that rest lose theirs for it."""
        while self._pages + pages - sequence.pages > self._capacity_pages:
            resting = [s for s in self._holding if s is not sequence and s not in self._working]
            if not resting:
                return False
            victim = max(resting, key=lambda s: s.arrival)
            self.recomputed_tokens += victim.done
            self._free(victim)
        return True

    def _free(self, sequence: _Sequence) -> None:
        self._pages -= sequence.pages
        sequence.pages = sequence.done = 0
        self._holding.pop(sequence, None)

    def _end(self, work: Sequence[Chunk]) -> None:
        working, self._working = self._working, []
        for sequence, chunk in zip(working, work, strict=True):
            sequence.done += chunk.new_tokens
            if not sequence.there:  # dropped meanwhile
                self._free(sequence)
            elif sequence.done == sequence.there and sequence.on_scored:
                self.tokens -= sequence.there
                self._free(sequence)
                sequence.on_scored(sequence.request)


class StreamingScorer:
    """Replicas of a scoring model; a response goes to the one with the fewest tokens when its first chunk comes.

    An iteration prefills new tokens of as many sequences as its budget `max_num_batched_tokens` allows, in the order in
    which they came, and takes `cost.prefill_s`. A sequence keeps its KV cache until all of it has come and is
    prefilled: then it is scored. Where pages are missing, the last to come of the others loses its KV cache, and is
    prefilled from its start with its next chunk. `capacity_pages` must hold the longest sequence.
    """

    def __init__(
        self,
        env: simpy.Environment,
        replicas: Sequence[tuple[int, ...]],
        cost: StepCost,
        capacity_pages: int,
        config: EngineConfig,
        recorder: Recorder,
        on_busy: OnBusy | None = None,
    ) -> None:
        self.replicas = [
            _PrefillReplica(env, i, gpus, cost, capacity_pages, config, recorder, on_busy)
            for i, gpus in enumerate(replicas)
        ]
        self._arrivals = itertools.count()
        self._on: dict[int, tuple[_Sequence, _PrefillReplica]] = {}  # by request, those not scored yet

    def chunks(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """The responses have come as far as so many tokens; more will."""
        for request, generated in chunks:
            sequence, replica = self._find(request)
            replica.add(sequence, request.prompt_tokens + generated)

    def complete(self, request: Request, on_scored: Callable[[Request], None]) -> None:
        sequence, replica = self._find(request)

        def scored(request: Request) -> None:
            del self._on[request.id]
            on_scored(request)

        sequence.on_scored = scored
        if sequence.done == request.context:  # nothing new has come since
            replica.drop(sequence)
            scored(request)
            return
        replica.add(sequence, request.context)

    def _find(self, request: Request) -> tuple[_Sequence, _PrefillReplica]:
        if request.id not in self._on:
            replica = min(self.replicas, key=lambda r: r.tokens)
            self._on[request.id] = _Sequence(request, next(self._arrivals)), replica
        return self._on[request.id]

    def keep_only(self, ids: frozenset[int]) -> None:
        for request in [i for i in self._on if i not in ids]:
            sequence, replica = self._on.pop(request)
            replica.drop(sequence)

    def set_cost(self, cost: StepCost) -> None:
        for replica in self.replicas:
            replica.cost = cost

    @property
    def busy_gpus(self) -> frozenset[int]:
        return frozenset(gpu for replica in self.replicas if replica.busy for gpu in replica.gpus)

    @property
    def mean_busy_s(self) -> float:
        return sum(replica.busy_s for replica in self.replicas) / len(self.replicas)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
