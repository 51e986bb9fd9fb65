"""An LLM that answers requests as they come: a reward model or judge, on GPUs of its own or on shared ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import simpy

from rlsim.cost.step import StepCost
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica
from rlsim.sim.request import EngineConfig, Request


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
    """Replicas of an inference engine; a request goes to the one with the fewest tokens outstanding.

    `on_busy` is told when a replica's GPUs begin to have work and when they have none left.
    """

    def __init__(
        self,
        env: simpy.Environment,
        replicas: Sequence[tuple[int, ...]],
        cost: StepCost,
        capacity_pages: int,
        config: EngineConfig,
        recorder: Recorder,
        node_of: Callable[[int], int],
        on_busy: Callable[[tuple[int, ...], bool], None] | None = None,
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
        index = min(range(len(self._tokens)), key=lambda i: (self._tokens[i], i))
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
            if not ids.isdisjoint(request.id for request in replica.held()):
                replica.at_boundary(lambda r=replica: self._left(r, [x for p in r.remove(ids, "aborted") for x in p]))  # type: ignore[misc]

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
            replica.drain("stopped")
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
