"""A closed-loop serving benchmark on one replica of rlsim's own engine: a response ends, the next request comes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

import numpy as np
import simpy

from rlsim.cost.calibration import FrontEndFit
from rlsim.cost.step import StepCost
from rlsim.errors import CapacityError
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import Replica
from rlsim.sim.request import EngineConfig, Request

JUST_BEGUN_S = 1e-7  # into an iteration: shorter than any


@dataclass(frozen=True)
class Load:
    """What a benchmark's client sends: `requests` in all, never more than `concurrency` unanswered.

    All have these lengths, or, with a `shortest` share below 1, lengths drawn evenly from that share of them up to
    them, prompts and responses apart, as the client of vLLM's and InferenceX' benchmarks does. With `simulated` only so
    many of the requests run; the others are taken to go like those after the first `concurrency`.
    """

    prompt_tokens: int
    response_tokens: int
    concurrency: int
    requests: int
    simulated: int | None = None
    shortest: float = 1.0

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Tokens of prompt and response of one request after another, the same ones each time."""
        rng = np.random.default_rng(0)
        longest = np.array([self.prompt_tokens, self.response_tokens])
        least = np.maximum((self.shortest * longest).astype(int), 1)
        while True:
            prompt, response = rng.integers(least, longest + 1).tolist()
            yield prompt, response


@dataclass(frozen=True)
class Intake:
    """When a busy engine takes in what has come.

    `ahead`: the next iteration is scheduled already when one begins, so a request joins the one after it (vLLM's
    asynchronous scheduling, SGLang's overlapped loop). `every`: decode iterations from one look at the queue to the
    next, whether anything has come or not; after a prefill it looks at once (SGLang's `scheduler_recv_interval`).
    `wait`: iterations for which prompts wait for others, unless they have `enough` tokens together (TensorRT-LLM's
    `batch_wait_timeout_iters`).
    """

    ahead: bool = False
    every: int = 1
    wait: int = 0
    enough: int = 0


@dataclass(frozen=True)
class Served:
    """What the client measures: means over all requests of a run, in seconds; generated tokens a second."""

    ttft_s: float  # from sending a request to its first token
    tpot_s: float  # from the first token to the last, for each token after the first; NaN for responses of one token
    preemptions: int
    tokens_per_s: float = field(default=float("nan"), compare=False)


def closed_loop(
    cost: StepCost,
    capacity_pages: int,
    engine: EngineConfig,
    load: Load,
    front_end: FrontEndFit | None = None,
    intake: Intake = Intake(),
) -> Served:
    """Serve `load` on one replica with `capacity_pages` of KV cache, through `front_end` (none: it takes no time).

    The client sends `concurrency` requests at once, then one whenever a response ends. Raises `CapacityError` if the
    replica could not hold one request alone.
    """
    pages = -(-(load.prompt_tokens + load.response_tokens) // engine.page_tokens)
    if not cost.kv.fits(load.prompt_tokens + load.response_tokens, engine.page_tokens, capacity_pages):
        raise CapacityError(f"one request needs {pages} KV pages, the replica has {capacity_pages}")
    run = _Run(load, front_end or FrontEndFit())
    return run.served(_Observed(run, capacity_pages, engine, cost, intake))


class _Run:
    """One benchmark: its client and its front end, beside the engine's replica."""

    def __init__(self, load: Load, front_end: FrontEndFit) -> None:
        self.env = simpy.Environment()
        self._load, self._front_end = load, front_end
        self._number = load.requests if load.simulated is None else min(load.simulated, load.requests)
        self._lengths = load.lengths()
        self._requests: list[Request] = []
        self._sent_at: list[float] = []
        self._first_at: dict[int, float] = {}
        self._held: list[Sequence[Request]] = []  # those of each prefill whose first tokens are not handed out yet
        self._free_at = 0.0  # when the front end's thread has done all work that has come to it
        self._seen_step, self._seen_at = 0, 0.0  # of the engine, whose tokens until then are known

    def served(self, replica: _Observed) -> Served:
        """The means, once `replica` has served all."""
        load, requests, self._replica = self._load, self._requests, replica
        self.env.process(self._send(min(load.concurrency, self._number), 0.0))
        self.env.run()
        burst = min(load.concurrency, len(requests))
        each = (load.requests - burst) / max(len(requests) - burst, 1)  # requests that one after the burst stands for

        def mean(values: Sequence[float]) -> float:
            return (sum(values[:burst]) + each * sum(values[burst:])) / load.requests

        ttft_s = mean([self._first_at[request.id] - at for request, at in zip(requests, self._sent_at, strict=True)])
        if load.response_tokens == 1:
            return Served(ttft_s, float("nan"), self._replica.scheduler.preemptions)
        decoded = [request.finished_at - self._first_at[request.id] for request in requests]
        later = [max(request.response_tokens - 1, 1) for request in requests]
        tpot_s = mean([time_s / tokens for time_s, tokens in zip(decoded, later, strict=True)])
        generated = sum(request.response_tokens for request in requests)
        rate = generated / max(request.finished_at for request in requests)
        return Served(ttft_s, tpot_s, self._replica.scheduler.preemptions, rate)

    # ---- client and front end ---------------------------------------------------------------------------------------

    def _send(self, number: int, after_s: float) -> Generator[simpy.Event, None, None]:
        """So many requests, `after_s` from now: each waits for its turn in the front end."""
        env, first = self.env, len(self._requests)
        sent = [Request(i, i, *next(self._lengths)) for i in range(first, first + number)]
        self._requests += sent
        self._sent_at += [env.now + after_s] * number
        if after_s + self._front_end.delay_s:
            yield env.timeout(after_s + self._front_end.delay_s)
        self._look()
        for request in sent:
            self._work(self._front_end.prompt_token_s * request.prompt_tokens)
            env.process(self._arrive(request, self._free_at))

    def _arrive(self, request: Request, at: float) -> Generator[simpy.Event, None, None]:
        if at > self.env.now:
            yield self.env.timeout(at - self.env.now)
        self._replica.receive([request])

    def _work(self, work_s: float) -> None:
        self._free_at = max(self._free_at, self.env.now) + work_s

    def _look(self) -> None:
        """Take over the work of the tokens that the engine has made by now, a burst of them with each iteration."""
        step, now = self._replica.progress(), self.env.now
        steps = step - self._seen_step
        if steps > 0:
            burst_s = self._replica.running * self._front_end.token_s
            first_at = self._seen_at + (now - self._seen_at) / steps
            # Either the thread has kept up with all bursts but the last, or it has been behind since the first.
            self._free_at = max(max(self._free_at, first_at) + steps * burst_s, now + burst_s)
        self._seen_step, self._seen_at = step, now

    # ---- what the engine tells --------------------------------------------------------------------------------------

    def boundary(self, kind: str, start: float, tokens: int, prefilled: Sequence[Request]) -> None:
        """Iterations of one kind that began at `start` have ended; a prefill or mixed one has made `tokens` tokens."""
        held = self._front_end.held_prefills
        if kind == "decode":
            self._seen_at = max(self._seen_at, start)
            self._look()
            self._hand_out(len(self._held), start)
            return
        self._seen_step, self._seen_at = self._replica.progress(), self.env.now
        self._work(tokens * self._front_end.token_s)
        if prefilled:
            self._held.append(prefilled)
        self._hand_out(len(self._held) - held, self.env.now)

    def _hand_out(self, prefills: int, at: float) -> None:
        for request in chain.from_iterable([self._held.pop(0) for _ in range(prefills)]):
            self._first_at.setdefault(request.id, at)  # one that was preempted has had its first token

    def finished(self, _: Replica, done: Sequence[Request]) -> None:
        """Responses are complete: the client sends as many requests."""
        for request in done:
            self._first_at.setdefault(request.id, self.env.now)
        number = min(len(done), self._number - len(self._requests))
        if number:
            self.env.process(self._send(number, self._front_end.client_s))


class _Observed(Replica):
    """A replica that tells its benchmark of every iteration, and takes requests in as `intake` says."""

    def __init__(self, run: _Run, capacity_pages: int, engine: EngineConfig, cost: StepCost, intake: Intake) -> None:
        self._run_of, self._intake = run, intake
        self._coming: list[Request] = []
        self._prefill_step, self._prefilled = 0, False  # after the last prefill; whether the last iteration was one
        self._waits_since: int | None = None  # the first step that began without the requests that wait
        gpus = tuple(range(cost.tp))
        super().__init__(run.env, 0, 0, gpus, cost, capacity_pages, engine, Recorder(), run.finished, count(1))

    @property
    def running(self) -> int:
        return self._batch.size

    def receive(self, requests: Sequence[Request]) -> None:
        if self.idle or self._intake == Intake():
            super().receive(requests)
            return
        if not self._coming:
            self.at_boundary(self._look)
            self._waits_since = None
        self._coming += requests

    def _look(self) -> None:
        """At a boundary: take in what has come, if it is time to look."""
        due = self._due(self.progress())
        if due and not self._intake.ahead:
            self._take_in()
        else:
            self.env.process(self._within(self._take_in if due else lambda: self.at_boundary(self._look)))

    def _due(self, step: int) -> bool:
        if not self._intake.wait:
            return (step - self._prefill_step) % self._intake.every == 0 or self._prefilled or not self.running
        self._waits_since = step if self._waits_since is None else self._waits_since
        tokens = sum(request.prompt_tokens for request in self._coming)
        return step - self._waits_since >= self._intake.wait or tokens >= self._intake.enough or not self.running

    def _take_in(self) -> None:
        coming, self._coming = self._coming, []
        super().receive(coming)

    def _within(self, do: Callable[[], None]) -> Generator[simpy.Event, None, None]:
        """Once the iteration has begun that begins now, so that it is not undone."""
        yield self.env.timeout(JUST_BEGUN_S)
        do()

    def _finish(self, kind: str, start: float, prefilled: Sequence[Request] = ()) -> None:
        self._prefilled = kind != "decode"
        if self._prefilled:
            self._prefill_step = self.progress()
        tokens = len(prefilled) if kind == "prefill" else self._batch.size
        self._run_of.boundary(kind, start, tokens, prefilled)
        super()._finish(kind, start, prefilled)
