"""What `check_policy` sees: rollouts of a batch of responses under a policy that is watched."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rlsim.base.hooks import misused
from rlsim.experiment.systems import System
from rlsim.sim.batching import PromptFeed, StepBatch
from rlsim.sim.control import (
    Abort,
    Action,
    ControlContext,
    Controls,
    Launch,
    RolloutControl,
    RolloutReport,
    RolloutView,
    Stop,
    actions_of,
    asked,
)
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import Rollout, run_rollout
from rlsim.sim.stage import GenerationStage

_VIEW = frozenset(name for name in vars(RolloutView) if not name.startswith("_"))


class ContractError(AssertionError):
    """A policy breaks the contract; the text says on which batch, and how."""


@dataclass(frozen=True)
class Batch:
    """A generation stage to try a policy on: every response's prompt and length, in tokens."""

    name: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    cap_tokens: int  # the limit that policies are told; no length is above it
    nodes: int = 1
    kv_tokens: int | None = None  # per replica, where the memory is to be short

    @property
    def responses(self) -> int:
        """Responses to one prompt."""
        return 4 if len(self.lengths) % 4 == 0 else 1


#: At which moment of a rollout, and what.
Answer = tuple[float, tuple[Action, ...]]


@dataclass
class Tally:
    """What was seen of a policy over all its rollouts."""

    rollouts: int = 0
    answers: int = 0
    actions: Counter[str] = field(default_factory=Counter)  # by kind
    prompts: Counter[str] = field(default_factory=Counter)  # dropped, put back, kept (these in responses)


@dataclass
class Played:
    """What a policy did: its first layout, its answers by rollout, and when each request of the first one was done."""

    initial_tp: int
    answers: list[list[Answer]]
    left_at_s: list[float]
    truth: list[int]  # how long each request of the first rollout was going to be


class _Window:
    """A `RolloutView` through which nothing can be reached but what the protocol offers."""

    __slots__ = ("_Window__view",)

    def __init__(self, view: RolloutView) -> None:
        object.__setattr__(self, "_Window__view", view)

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        if name in _VIEW:
            return getattr(get(self, "_Window__view"), name)
        if name.startswith("__") and name.endswith("__"):
            return get(self, name)
        raise ContractError(f"the policy reached for `view.{name}`; a RolloutView offers: {', '.join(sorted(_VIEW))}")

    def __setattr__(self, name: str, _: object) -> None:
        raise ContractError(f"the policy set `view.{name}`: it is read-only")


class _Watched(RolloutControl):
    """Passes questions on to a policy and keeps its answers."""

    def __init__(self, policy: RolloutControl, answers: list[Answer]) -> None:
        self.policy, self.answers = policy, answers

    def on_finish(self, view: RolloutView) -> list[Action]:
        return self._kept(view, self.policy.on_finish(cast("RolloutView", _Window(view))))

    @property
    def every_s(self) -> float | None:
        return self.policy.every_s

    def on_timer(self, view: RolloutView) -> list[Action]:
        return self._kept(view, self.policy.on_timer(cast("RolloutView", _Window(view))))

    def _kept(self, view: RolloutView, answer: Action | Iterable[Action] | None) -> list[Action]:
        actions = actions_of(answer)
        self.answers.append((view.now_s, tuple(actions)))
        return actions

    @property
    def author(self) -> RolloutControl:
        return self.policy.author


def play(system: System, batch: Batch, context: ControlContext, tally: Tally, rollouts: int = 1) -> Played:
    """Rollouts of the same batch one after the other, as the steps of a training run.

    Raises `ContractError` or `PolicyError` for what a single rollout shows; `tally` is added to.
    """
    used_tps: dict[int, set[int]] = {}
    paused: dict[int, list[Request]] = {}
    answers, left_at_s, truth = [], [], []
    system.control.setup(context)
    tp = first_tp = system.initial_tp(context)
    feed = PromptFeed(len(batch.lengths) // batch.responses, batch.responses)
    for step in range(rollouts):
        seen: list[Answer] = []
        watched = Controls([_Watched(part, seen) for part in asked(system.control, "on_finish", "on_timer")])
        one = _Step(system, step, batch, feed, paused)
        report, requests = one.run(watched, tp, context, used_tps, tally), one.requests
        one.check([action for _, actions in seen for action in actions])
        answers.append(seen)
        ended = max((r.finished_at for r in requests if r.finished), default=0.0)
        left_at_s.append([r.finished_at if r.finished else ended for r in requests])
        truth.append([r.response_tokens for r in requests])
        tally.rollouts += 1
        tally.answers += len(seen)
        tally.actions.update(type(action).__name__ for _, actions in seen for action in actions)
        wanted = system.control.next_tp(report)
        tp = tp if wanted is None else wanted
    return Played(first_tp, answers, left_at_s[0], truth[0])


class _Step:
    """One rollout of a system, with its batching and requests. `paused`: by prompt position, what goes on after it."""

    def __init__(
        self, system: System, step: int, batch: Batch, feed: PromptFeed, paused: dict[int, list[Request]]
    ) -> None:
        self.step, self.batch, self.feed, self.paused, self.batching = step, batch, feed, paused, system.batching
        self.requests: list[Request] = []
        self.lengths: list[int] = []  # of these, as they were launched
        self.accepted: list[Request] = []
        self.step_batch = StepBatch(system.batching, feed, self.accepted.extend, step)
        self.rollout: Rollout | None = None

    def launch(self, launch: Launch) -> list[Request]:
        """The requests of a launch."""
        batch, new = self.batch, list[Request]()
        for prompt in launch.prompts:
            for sample in range(prompt.first_sample, prompt.first_sample + launch.samples):
                length = batch.lengths[(prompt.position * batch.responses + sample) % len(batch.lengths)]
                new.append(Request(len(self.requests) + len(new), prompt.position, batch.prompt_tokens, length))
        for prompt in launch.resume:
            if prompt.position not in self.paused:
                what = f"it resumes the prompt at position {prompt.position}, which was not kept"
                raise misused(self.batching.launcher, "launch", what)
            for old in self.paused.pop(prompt.position):
                new.append(old.resume(len(self.requests) + len(new), self.step - 1))
        self.lengths += [request.response_tokens for request in new]
        self.requests += new
        self.step_batch.launched(new, launch)
        return new

    def finished(self, responses: Sequence[Request]) -> None:
        """Score what is complete: of every third prompt all alike, of the others some right and some wrong."""
        self.step_batch.finished(responses)
        for request in responses:
            request.reward = float(request.id % 2 or request.position % 3 == 0)
            if self.step_batch.scored(request) and self.rollout:
                self.rollout.ask()

    def begun(self, rollout: Rollout) -> None:
        """Score what was complete before."""
        self.rollout = rollout
        if there := [r for r in self.requests if r.finished]:
            self.finished(there)
            rollout.ask()

    def run(
        self, control: RolloutControl, tp: int, context: ControlContext, used_tps: dict[int, set[int]], tally: Tally
    ) -> RolloutReport:
        """Run it, and say how it went."""
        step_batch, end = self.step_batch, itertools.accumulate(context.node_gpus)
        first = self.launch(step_batch.first)
        stage = GenerationStage(
            requests=[r for r in first if not r.resumed],
            mesh=[tuple(range(last - gpus, last)) for last, gpus in zip(end, context.node_gpus, strict=True)],
            tp=tp,
            resumed=[r for r in first if r.resumed and not r.finished],
            costs=context.costs,
            config=EngineConfig(page_tokens=context.page_tokens),
            control=control if step_batch.certain else Controls([step_batch, control]),
            cap_tokens=self.batch.cap_tokens,
            used_tps=used_tps,
            open=step_batch.open,
            launcher=self.launch,
            on_finish=self.finished,
            label=step_batch.first.label,
        )
        rollout = run_rollout(stage, self.begun)
        launches = step_batch.close()
        self.paused |= step_batch.paused
        self.batching.waiting()
        tally.prompts.update({"dropped": launches.dropped, "put back": launches.put_back, "kept": launches.paused})
        preemptions = sum(replica.preemptions for replica in rollout.replicas)
        generated = tuple(r.generated for r in self.requests if r.finished)
        loads = tuple((r.prompt_tokens, r.generated - r.resumed_tokens) for r in self.requests)
        coming, tps, took_s = self.batching.launcher.upcoming(self.feed), context.feasible_tps, rollout.env.now
        return RolloutReport(self.step, tp, took_s, preemptions, generated, launches.label, coming, loads, tps)

    def check(self, actions: Sequence[Action]) -> None:
        """Raise `ContractError` if a request is lost or tampered with, or the batch is not complete."""
        stopped = any(isinstance(action, Stop) for action in actions)
        for request, length in zip(self.requests, self.lengths, strict=True):
            if request.response_tokens != length or not 0 <= request.generated <= length:
                what = f"request {request.id} was tampered with: {request!r}, launched with {length} tokens"
                raise ContractError(what)
            if not (request.finished or request.aborted or stopped or not self.step_batch.certain):
                raise ContractError(f"request {request.id} is lost: neither finished nor aborted, and nothing stopped")
        needed = self.feed.prompts * self.feed.responses
        interfered = stopped or any(isinstance(action, Abort) for action in actions) or self.step_batch.incomplete_ok
        if len(self.accepted) != needed and not interfered:
            raise ContractError(f"the step's batch has {len(self.accepted)} responses, not {needed}")
