"""Rewards as calls on real resources: CPU workers that run checks and test cases, and an LLM judge on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal, NamedTuple, Protocol

import simpy

from rlsim.base.hooks import Hooked, hook, is_number
from rlsim.sim.moment import DEAL, ONE_MOMENT, at, is_over, when_over
from rlsim.sim.request import Request
from rlsim.sim.server import InferenceServer

RewardKind = Literal["rule", "sandbox", "judge"]


class RewardJob(NamedTuple):
    """What scoring one response takes, as the trace has it. No policy sees it before it has happened."""

    kind: RewardKind
    prompt: int  # the prompt's number in the trace, the same in every epoch
    run_s: tuple[float, ...]  # of a check or of every test case, one after the other
    limit_s: float  # a run that takes longer is ended there, and with it the job
    reward: float  # unless a run is ended
    correct: bool
    judge_prompt_tokens: int = 0
    judge_tokens: int = 0


class RewardControl(Hooked):
    """Base of all reward controls: every run may take as long as the system's limit says."""

    @hook("seconds: a number, 0 or more", lambda seconds, *_: is_number(seconds))
    def timeout_s(self, kind: RewardKind, prompt: int, test: int, limit_s: float) -> float:  # noqa: ARG002
        """A worker begins a response: how long test case `test` (from 0) of it may run, in seconds; asked of all then.

        `kind` is "rule" (one check, test 0) or "sandbox" (test cases); where a judge scores, this is not asked.
        `prompt` is the prompt's number in the trace, the same in every epoch; `limit_s` is the limit of the experiment.
        A longer run is ended there, and with it the job (no later case is asked about): the reward is 0.
        """
        return limit_s

    @hook()
    def observe(self, kind: RewardKind, prompt: int, run_s: Sequence[float], correct: bool) -> None:
        """A response to the prompt has been checked: the run time of each of its test cases that ran, in seconds."""


class RewardFunction(Protocol):
    """What the engine needs to know about rewards; the experiment provides it."""

    workers: int  # CPU workers

    def job(self, request: Request) -> RewardJob:
        """What scoring this response takes."""


class RewardDesk:
    """Scores the responses of all steps: on `scoring.workers` CPU workers, first come first served, or by a judge.

    What comes at one moment is taken at its end, in the order of the prompts. `on_scored` is told when a response has
    its reward.
    """

    def __init__(self, env: simpy.Environment, scoring: RewardFunction, control: RewardControl) -> None:
        self._env, self._scoring, self._control = env, scoring, control
        self._free = scoring.workers
        #: A heap: when it came, its prompt, its number, one number more, and what is to be done.
        self._queue: list[tuple[float, int, int, int, Request, RewardJob, Callable[[Request], None]]] = []
        self._came_at, self._numbers = env.now, count()
        self._due = False  # workers take responses at the end of this moment

    def submit(
        self, requests: Sequence[Request], judge: InferenceServer | None, on_scored: Callable[[Request], None]
    ) -> None:
        """Have responses scored that come now; `judge` is that of their step, or of all steps."""
        now = self._env.now
        if now > self._came_at * (1 + ONE_MOMENT):
            self._came_at = now
        for request in requests:
            job = self._scoring.job(request)
            if job.kind == "judge":
                assert judge is not None, "where there are responses to judge there is a judge"
                request.score_started_at = now
                prompt = request.id  # each is asked a prompt of its own
                asked = Request(request.id, prompt, job.judge_prompt_tokens, job.judge_tokens)
                judge.submit(asked, partial(self._score, request, job.reward, on_scored))
                continue
            number = next(self._numbers)
            heappush(self._queue, (self._came_at, request.position, request.id, number, request, job, on_scored))
        self._start_at_end()

    def withdraw(self, requests: Sequence[Request], judge: InferenceServer | None) -> None:
        """Forget responses of a step that nobody needs scored any more; a run that a worker has begun is finished."""
        unwanted = set(map(id, requests))  # their numbers are of the step, the queue is of all steps
        self._queue = [item for item in self._queue if id(item[4]) not in unwanted]
        heapify(self._queue)
        if judge:
            judge.forget(frozenset(request.id for request in requests))

    def _start_at_end(self) -> None:
        if not self._free or not self._queue or self._due:
            return
        if is_over(self._env):
            self._start()
        else:
            self._due = True
            when_over(self._env, DEAL, self._start)

    def _start(self) -> None:
        self._due, now, timeout_s = False, self._env.now, self._control.timeout_s
        while self._free and self._queue:
            self._free -= 1
            *_, request, job, on_scored = heappop(self._queue)
            request.score_started_at = now
            ran: list[float] = []
            for test, run_s in enumerate(job.run_s):
                limit_s = timeout_s(job.kind, job.prompt, test, job.limit_s)
                if run_s > limit_s:
                    ran.append(limit_s)
                    request.timed_out = True
                    break
                ran.append(run_s)
            at(self._env, now + sum(ran), partial(self._end, request, job, ran, on_scored))

    def _end(
        self, request: Request, job: RewardJob, ran: list[float], on_scored: Callable[[Request], None], _: simpy.Event
    ) -> None:
        self._free += 1
        self._control.observe(job.kind, job.prompt, ran, job.correct and not request.timed_out)
        self._score(request, 0.0 if request.timed_out else job.reward, on_scored)
        self._start_at_end()

    def _score(self, request: Request, reward: float, on_scored: Callable[[Request], None]) -> None:
        request.reward = reward
        request.scored_at = self._env.now
        on_scored(request)
