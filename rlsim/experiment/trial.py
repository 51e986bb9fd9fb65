"""A policy at work on small batches, as an experiment's steps: its answers are kept, its mistakes are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from rlsim.base.hooks import hooks, overridden
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import System
from rlsim.sim.actions import Abort, Stop
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import (
    Action,
    ControlContext,
    Controls,
    RolloutControl,
    RolloutView,
    actions_of,
    decides,
)
from rlsim.sim.outcome import Responses
from rlsim.sim.request import Request
from rlsim.trace import TraceMeta, make_trace

_PAGE = 16  # tokens
_VIEW = frozenset(name for name in vars(RolloutView) if not name.startswith("_"))


class ContractError(AssertionError):
    """A policy breaks the contract; the text says on which batch, and how."""


@dataclass
class Tally:
    """What was seen of a policy over all its rollouts."""

    rollouts: int = 0
    answers: int = 0
    actions: Counter[str] = field(default_factory=Counter)  # by kind
    prompts: Counter[str] = field(default_factory=Counter)  # dropped, put back, kept (these in responses)


#: At which moment of a run, and what.
Answer = tuple[float, tuple[Action, ...]]


class Played(NamedTuple):
    """What a policy did, and the responses of its first rollout by their numbers."""

    initial_tp: int
    answers: list[Answer]
    told: bool  # whether it is given predicted lengths
    seen: pd.DataFrame  # `left_at`, when each was done (s), and `truth`, how long each was going to be


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
    """Passes questions on to a policy and keeps its answers; what else it is asked goes to it as it is."""

    def __init__(self, policy: RolloutControl, answers: list[Answer], requests: dict[int, Request]) -> None:
        self._policy, self._answers, self._requests = policy, answers, requests

    def on_finish(self, view: RolloutView) -> list[Action]:
        return self._kept(view, self._policy.on_finish)

    def on_timer(self, view: RolloutView) -> list[Action]:
        return self._kept(view, self._policy.on_timer)

    def _kept(self, view: RolloutView, ask: Callable[[RolloutView], Action | Iterable[Action] | None]) -> list[Action]:
        actions = actions_of(ask(cast("RolloutView", _Window(view))))
        self._answers.append((view._rollout.env.now, tuple(actions)))
        self._requests.update((id(request), request) for request in view._rollout.requests)
        return actions

    @property
    def author(self) -> RolloutControl:
        return self._policy.author


def _watching(kind: type[RolloutControl]) -> type[_Watched]:
    """The class that watches such a policy: it overrides what that overrides."""

    def passed_on(name: str) -> Any:
        if isinstance(vars(RolloutControl)[name], property):
            return property(lambda self: getattr(self._policy, name))
        return lambda self, *arguments: getattr(self._policy, name)(*arguments)

    others = {*overridden(kind)} & {*hooks(RolloutControl)} - {"on_finish", "on_timer"}
    return type("_Watched", (_Watched,), {name: passed_on(name) for name in others})


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

    @cached_property
    def _loaded(self) -> LoadedExperiment:
        """An experiment whose steps have such batches, but for their lengths."""
        settings = {
            "name": "check", "cluster": f"{'2x' * (self.nodes > 1)}8xh100", "model": "llama-3.1-8b",
            "calibration": "h100-vllm", "engine": {"page_tokens": _PAGE}, "systems": ["verl"],
            "trace": {"fixed": 1, "cap": self.cap_tokens, "default_prompt_tokens": self.prompt_tokens},
            "workflow": {"prompts": len(self.lengths) // self.responses, "responses": self.responses, "steps": 2,
                         "reference": False, "old_log_probs": False, "reward": {"time_per_response": 0}},
        }  # fmt: skip
        experiment, label, folder = load_experiment(settings)
        return LoadedExperiment.of(experiment, folder, label)

    @cached_property
    def _simulators(self) -> dict[int, Simulator]:
        """By the steps that they run."""
        return {steps: Simulator(self._drawn(steps, self.lengths), search=False) for steps in (1, 2)}

    @cached_property
    def _drawn(self) -> Callable[[int, tuple[int, ...]], LoadedExperiment]:
        """That experiment by its steps and the lengths of its responses."""
        return cache(self._draw)

    def _draw(self, steps: int, lengths: tuple[int, ...]) -> LoadedExperiment:
        """With these lengths. Of every third prompt all rewards are alike, of the others some right and some wrong."""
        prompt, sample = np.divmod(np.arange(len(lengths)), self.responses)
        columns = {"prompt_id": prompt, "sample_id": sample, "prompt_tokens": self.prompt_tokens}
        reward = ((sample % 2 == 1) | (prompt % 3 == 0)).astype(float)
        frame = pd.DataFrame({**columns, "response_tokens": lengths, "reward": reward})
        frame["test_run_s"] = [(1.0,)] * len(frame)
        workflow = self._loaded.experiment.workflow.model_copy(update={"steps": steps})
        experiment = self._loaded.experiment.model_copy(update={"workflow": workflow})
        return replace(self._loaded, experiment=experiment, trace=make_trace(frame, TraceMeta(name="check")))

    def _placed(self, simulator: Simulator, system: System) -> PlacedExperiment:
        placed, tokens = simulator.placed(system), self.kv_tokens
        if tokens is not None and "rollout_costs" not in vars(placed):  # the same machine with less room
            short = copy(own := placed.rollout_costs)
            short.capacity_pages = cache(lambda tp, least=0: min(own.capacity_pages(tp, least), tokens // _PAGE))
            vars(placed)["rollout_costs"] = short
        return placed

    def context(self, system: System) -> ControlContext:
        """What a policy learns before a run."""
        return self._placed(self._simulators[1], system).context

    def play(self, system: System, tally: Tally, lengths: tuple[int, ...] = (), steps: int = 1) -> Played:
        """A run; `lengths`: others than those of the batch.

        Raises `ContractError` or `PolicyError` for what it shows alone; `tally` is added to.
        """
        simulator, lengths = self._simulators[steps], lengths or self.lengths
        answers, requests, truth = list[Answer](), dict[int, Request](), np.array(lengths)
        self._placed(simulator, system)
        own = system.control.parts if isinstance(system.control, Controls) else [system.control]
        watched = Controls([_watching(type(part))(part, answers, requests) if decides(part) else part for part in own])
        outcome = simulator.simulate(replace(system, control=watched), self._drawn(steps, lengths).sampler(0))
        actions = [action for _, answer in answers for action in answer]
        endless = isinstance(system.batching.launcher, Continuous)
        for request in requests.values():
            if request.response_tokens != (launched := truth[request.row]):
                what = f"request {request.id} was tampered with: {request!r}, launched with {launched} tokens"
                raise ContractError(what)
        for step in outcome.responses:
            _check_responses(step, truth[step.row], len(self.lengths), actions, endless)
        for rollout in outcome.rollouts:
            counts = rollout.launches
            tally.prompts.update({"dropped": counts.dropped, "put back": counts.put_back, "kept": counts.paused})
        tally.rollouts += steps
        tally.answers += len(answers)
        tally.actions.update(type(action).__name__ for action in actions)
        seen = pd.concat(
            pd.DataFrame({"left_at": step.finished_at, "truth": truth[step.row]}, index=step.id)
            for step in (outcome.responses if endless else outcome.responses[:1])
        )
        seen["left_at"] = seen["left_at"].fillna(seen["left_at"].max())
        return Played(outcome.rollouts[0].initial_tp, answers, watched.length_error is not None, seen)


def _check_responses(step: Responses, truth: np.ndarray, needed: int, actions: Sequence[Action], endless: bool) -> None:
    """Raise `ContractError` if a response of a step is lost or tampered with, or its batch is not complete."""
    wrong = (step.generated_tokens > truth) | (step.finished & (step.generated_tokens != truth))
    if wrong.any():
        at = int(wrong.argmax())
        what = f"request {step.id[at]} was tampered with: it generated {step.generated_tokens[at]} tokens"
        raise ContractError(f"{what}, launched with {truth[at]}")
    stopped = any(isinstance(action, Stop) for action in actions)
    under_way = ~(step.finished | step.aborted | step.paused)
    if under_way.any() and not (stopped or endless):
        lost = step.id[under_way.argmax()]
        raise ContractError(f"request {lost} is lost: neither finished nor aborted, and nothing stopped")
    short, trained = bool((~step.finished).any()), int(step.trained.sum())
    if not trained:
        raise ContractError("a step trains on no response")
    if trained != needed and not (stopped or short or any(isinstance(action, Abort) for action in actions)):
        raise ContractError(f"the step's batch has {trained} responses, not {needed}")


@cache
def batches(seed: int = 0) -> tuple[Batch, ...]:
    """What `check_policy` tries: a long tail, and batches in which there is little or nothing to decide."""
    rng = np.random.default_rng(seed)
    tail = tuple(int(x) for x in np.clip(rng.lognormal(6.5, 1.2, 64), 1, 12_000))
    return (
        Batch("a long tail", 200, tail, 16_384),
        Batch("a long tail on two nodes", 200, tail, 16_384, nodes=2),
        Batch("one request", 100, (3000,), 8192),
        Batch("fewer requests than GPUs", 100, (50, 4000, 60), 4096),
        Batch("equal lengths", 300, (1500,) * 48, 2048),
        Batch("all of length 1", 300, (1,) * 24, 1024),
        Batch("one long response among the shortest", 10, (*(1,) * 31, 20_000), 20_480),
        Batch("too little memory: everything preempts", 100, (700, 900, 1500, 1100) * 12, 3072, kv_tokens=3200),
    )


def other_futures(batch: Batch) -> Iterator[tuple[int, ...]]:
    """Other lengths of the longer responses: shuffled, as long as may be, or drawn anew."""
    rng = np.random.default_rng(1)
    order = np.argsort(batch.lengths, kind="stable")
    for share in (0.5, 0.1):
        late = order[-max(int(share * len(order)), 2) :]
        own = np.array(batch.lengths)
        for lengths in (
            rng.permutation(own[late]),
            np.full(len(late), batch.cap_tokens),
            rng.integers(own[late[0]], batch.cap_tokens, len(late), endpoint=True),
        ):
            changed = own.copy()
            changed[late] = lengths
            yield tuple(changed.tolist())
