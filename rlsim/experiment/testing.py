"""The contract of a policy, checked: what the author of a part of a system runs in their own tests.

    from rlsim import check_policy
    print(check_policy(MyPolicy))
    check_policy(MyPolicy, threshold=8)

A policy must be deterministic, must end every rollout with no request lost, must not know how long responses will
get, must cope with odd batches (one request, equal lengths, nothing but preemptions), and returns nothing but actions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from rlsim.base.hooks import hooks, overridden
from rlsim.base.refusals import refuse
from rlsim.base.usercode import origin
from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import System, is_layout
from rlsim.policies.parts import KIND_NAMES, KINDS, Composition, Part, flattened
from rlsim.policies.registry import control_of, is_control
from rlsim.policies.relaxed import Split
from rlsim.sim.actions import ACTIONS, Abort, Borrow, Extend, Stop
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import (
    Action,
    ControlContext,
    Controls,
    Launch,
    RolloutControl,
    RolloutView,
    actions_of,
    decides,
)
from rlsim.sim.outcome import Responses
from rlsim.sim.request import Request
from rlsim.trace import TraceMeta, make_trace

__all__ = ["Checked", "ContractError", "check_policy"]

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
    fewer = stopped or short or any(isinstance(action, Abort) for action in actions)
    refuse("batch of a policy", ContractError, trained=trained, needed=needed, fewer=fewer)


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


# ---- the contract ---------------------------------------------------------------------------------------------------


#: Hooks about what is not played: where calls run, what they take as it comes, tools, chunks.
_NOT_CALLED = {"rewired", "plan", "handover_s", "slowdown", "chunk_tokens", "on_scored", "keep_kv_s"}
#: Hooks of a batching, and what of `Tally.prompts` must have happened for them to matter.
_OF_PROMPTS = {"counts": "dropped", "keep": "kept", "put_back": "put back"}


@dataclass(frozen=True)
class Checked:
    """What `check_policy` tried, and saw; printed, it is a few lines to read."""

    policy: str
    parameters: tuple[Mapping[str, Any], ...]  # the choices of parameters that were tried
    batches: tuple[str, ...]
    rollouts: int  # all choices and batches, each with other futures and again
    answers: int  # of on_finish and on_timer, of parts that override one of them
    actions: Mapping[str, int]  # that these contained, by kind
    prompts: Mapping[str, int]  # dropped, put back, and responses kept by the batching
    not_checked: tuple[str, ...]  # parts of the contract that these rollouts say nothing about, a sentence each

    def __str__(self) -> str:
        tried = "; ".join(", ".join(f"{k} {v}" for k, v in choice.items()) or "defaults" for choice in self.parameters)
        acted = ", ".join(f"{count:,} {kind}" for kind, count in self.actions.items()) or "no action"
        settled = [f"{count:,} {what}" for what, count in self.prompts.items() if count]
        return "\n".join(
            [
                f"{self.policy} keeps the contract in {self.rollouts:,} rollouts: it answers the same twice,",
                "  loses no request, and knows nothing of lengths to come",
                f"  batches: {'; '.join(self.batches)}",
                f"  parameters: {tried}",
                *([f"  answers of on_finish: {self.answers:,}, with {acted}"] if self.answers else []),
                *([f"  prompts: {', '.join(settled)}"] if settled else []),
                *(f"  not checked: {what}" for what in self.not_checked),
            ]
        )


def check_policy(policy: Callable[..., Any], **parameters: Any) -> Checked:
    """What was checked of a policy that keeps the contract; raises `ContractError` if it breaks it.

    `policy` is a class, a function that makes a part, or one that decides (`def policy(view, …)`). What it leaves open
    (the layout, what is launched) is as plain as can be. A policy that is to be tuned (see
    `RolloutControl.alternatives`) is checked with each of its choices. Takes a few seconds; the machine is one
    node, or both, of the catalogue's 2x8xh100 with LLaMA-3.1-8B.
    """
    if is_control(policy):
        policy = control_of(policy)
    tally, played, tried = Tally(), dict[str, None](), dict[str, Mapping[str, Any]]()
    for batch in batches():
        with _broken(f"batch {batch.name!r}"):
            for choice in _choices(policy, parameters, batch):
                if batch.responses > 1 or not _system(policy, choice).batching.needs_rewards:  # one has no variance
                    _check(lambda choice=choice: _system(policy, choice), batch, tally)  # type: ignore[misc]
                    played[batch.name] = None
                    tried[repr(choice)] = choice
    parts = list(flattened([policy(**parameters)]))
    return Checked(
        " + ".join(dict.fromkeys(type(part).__name__ for part in parts)),
        tuple(tried.values()),
        tuple(played),
        not_checked=tuple(_not_checked(parts, tally)),
        **vars(tally),
    )


@contextmanager
def _broken(where: str) -> Iterator[None]:
    """Whatever is raised in the block breaks the contract there."""
    try:
        yield
    except (ContractError, RlsimError) as error:
        raise ContractError(f"{where}: {error}") from origin(error)
    except Exception as error:
        raise ContractError(f"{where}: {type(error).__name__}: {error}") from error


def _not_checked(parts: Iterable[Part], tally: Tally) -> Iterator[str]:
    """What the rollouts that were played say nothing about."""
    for part in parts:
        name, own = type(part).__name__, overridden(type(part))
        if "on_timer" in own and (not isinstance(part, RolloutControl) or part.every_s is None):
            yield f"{name}.on_timer is never called: every_s says no seconds"
        if deciding := [hook for hook in ("on_finish", "on_timer") if hook in own]:
            never = [kind.__name__ for kind in ACTIONS if kind not in (Launch, Extend, Borrow)]
            never = [kind for kind in never if not tally.actions[kind]]
            if never:
                yield f"{name}.{_listed(deciding, 'and')} never returned {_listed(never, 'or')}"
        if isinstance(part, RolloutControl) and part.length_error is not None:
            yield f"{name} may know lengths in advance: length_error asks for a predictor of them"
        for hook, what in _OF_PROMPTS.items():
            if hook in own and not tally.prompts[what]:
                yield f"{name}.{hook}: no prompt was {what}"
        if uncalled := [hook for hook in own if hook in _NOT_CALLED]:
            yield f"{name}: only a run of an experiment calls {_listed(uncalled, 'and')}"


def _listed(names: Sequence[str], last: str) -> str:
    """The names in a sentence: `a, b and c`."""
    return f" {last} ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _check(make: Callable[[], System], batch: Batch, tally: Tally) -> None:
    first = batch.play(make(), tally, steps=2)
    _same(first, batch.play(make(), tally, steps=2))
    for other in other_futures(batch):
        # Both rollouts are the same until a response finishes in either that is not in the other as it is here.
        second = batch.play(make(), tally, other)
        both = first.seen.merge(second.seen, left_index=True, right_index=True, suffixes=("", "_there"))
        changed = both.loc[both["truth"] != both["truth_there"], ["left_at", "left_at_there"]]
        ends = (run.seen["left_at"].max() for run in (first, second))
        moments = [*changed.to_numpy().ravel(), *ends]
        _no_peeking(first, second, min(moment for moment in [*moments, math.inf] if not math.isnan(moment)))


def _same(first: Played, second: Played) -> None:
    refuse("policy again", ContractError, first=first, second=second)
    for a, b in itertools.zip_longest(first.answers, second.answers):
        if a != b:
            raise ContractError(f"it is not deterministic: it answered {_told(a)}, the second time {_told(b)}")


def _no_peeking(first: Played, second: Played, until_s: float) -> None:
    refuse("policy in another future", ContractError, first=first, second=second)
    early = [[a for a in run.answers if a[0] < until_s * (1 - 1e-9)] for run in (first, second)]
    for a, b in itertools.zip_longest(*early) if not first.told else ():
        if a is None or b is None or a[1] != b[1] or abs(a[0] - b[0]) > 1e-9 * a[0]:
            raise ContractError(
                f"it knows lengths in advance: it answered {_told(a)} but {_told(b)} where responses that had not "
                f"finished by then were going to have other lengths (the first at {until_s:.6g} s)"
            )


def _told(answer: Answer | None) -> str:
    if answer is None:
        return "nothing"
    at_s, actions = answer
    return f"[{', '.join(map(repr, actions))}] at {at_s:.6g} s"


class _Static(RolloutControl):
    """The layout of a system that says nothing about it."""

    def initial_tp(self, context: ControlContext) -> int:
        return context.feasible_tps[0]


def _system(policy: Callable[..., Part], parameters: Mapping[str, Any]) -> System:
    """The system of a policy; where its calls run and what they take as it comes is as plain as can be."""
    part = _made(policy, parameters)
    laid_out = any(is_layout(inner) for inner in flattened([part]))
    system = System.of([part] if laid_out else [part, _Static()], "")
    placing = Split() if isinstance(system.batching.launcher, Continuous) else None  # it never gives its GPUs back
    return replace(system, rewirings=(), judge=None, placing=placing, streaming=None)


def _made(policy: Callable[..., Part], parameters: Mapping[str, Any]) -> Part:
    part: object = policy(**parameters)
    if not isinstance(part, KINDS):
        raise ContractError(f"{policy!r} makes a {type(part).__name__}, which is none of {KIND_NAMES}")
    return part


def _choices(policy: Callable[..., Part], parameters: Mapping[str, Any], batch: Batch) -> Sequence[Mapping[str, Any]]:
    made = _made(policy, parameters)
    choices: Sequence[Mapping[str, object]] = ()
    if isinstance(made, RolloutControl | Composition):
        choices = made.alternatives(batch.context(_system(policy, parameters)))
    return [{**parameters, **choice} for choice in choices] or [parameters]
