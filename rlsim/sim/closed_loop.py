"""A closed-loop serving benchmark on one replica of rlsim's own engine: a response ends, the next request comes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import count

import simpy

from rlsim.cost.step import StepCost
from rlsim.errors import CapacityError
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica
from rlsim.sim.request import EngineConfig, Request


@dataclass(frozen=True)
class Load:
    """What a benchmark's client sends: `requests` in all, never more than `concurrency` unanswered, all alike."""

    prompt_tokens: int
    response_tokens: int
    concurrency: int
    requests: int


@dataclass(frozen=True)
class Served:
    """What the client measures: means over all requests of a run, in seconds."""

    ttft_s: float  # from sending a request to its first token
    tpot_s: float  # from the first token to the last, for each token after the first; NaN for responses of one token
    preemptions: int


def closed_loop(
    cost: StepCost, capacity_pages: int, engine: EngineConfig, load: Load, *, front_end_s: float = 0.0
) -> Served:
    """Serve `load` on one replica with `capacity_pages` of KV cache.

    The client sends `concurrency` requests at once, then one whenever a response ends. Between client and engine a
    front end handles one request at a time, for `front_end_s` each (HTTP, tokenizing), in the order sent.

    Raises `CapacityError` if the replica could not hold one request alone.
    """
    pages = -(-(load.prompt_tokens + load.response_tokens) // engine.page_tokens)
    if pages > capacity_pages:
        raise CapacityError(f"one request needs {pages} KV pages, the replica has {capacity_pages}")
    env = simpy.Environment()
    requests: list[Request] = []
    sent_at: list[float] = []
    front_end_free_at = 0.0

    def send(number: int) -> Generator[simpy.Event, None, None]:
        nonlocal front_end_free_at
        first, now = len(requests), env.now
        arrivals = []
        for i in range(first, first + number):
            requests.append(Request(i, i, load.prompt_tokens, load.response_tokens))
            sent_at.append(now)
            front_end_free_at = max(front_end_free_at, now) + front_end_s
            arrivals.append(front_end_free_at)
        for i, arrives_at in enumerate(arrivals, first):
            if arrives_at > env.now:
                yield env.timeout(arrives_at - env.now)
            replica.receive([requests[i]])

    def finished(_: Replica, done: list[Request]) -> None:
        number = min(len(done), load.requests - len(requests))
        if number:
            env.process(send(number))

    gpus = tuple(range(cost.tp))
    replica = Replica(env, 0, 0, gpus, cost, capacity_pages, engine, Recorder(), finished, count(1))
    env.process(send(min(load.concurrency, load.requests)))
    env.run()
    waited_s = sum(request.first_token_at - sent for request, sent in zip(requests, sent_at, strict=True))
    decoded_s = sum(request.finished_at - request.first_token_at for request in requests)
    later = load.response_tokens - 1
    number = len(requests)
    tpot_s = decoded_s / (number * later) if later else float("nan")
    return Served(waited_s / number, tpot_s, replica.preemptions)
