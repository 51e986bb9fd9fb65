"""The contract of a policy, checked: what the author of a part of a system runs in their own tests.

    from rlsim.testing import check_policy
    check_policy(MyPolicy)
    check_policy(MyPolicy, threshold=8)

A policy must be deterministic, must end every rollout with no request lost, must not know how long responses will
get, must cope with odd batches (one request, equal lengths, nothing but preemptions), and returns nothing but actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

import numpy as np

from rlsim.cost.calibration import load_calibration
from rlsim.cost.memory import resident_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.transfer import SwitchCost
from rlsim.errors import RlsimError
from rlsim.experiment.system import System, is_layout
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.policies.parts import KIND_NAMES, KINDS, Composition, Part, flattened
from rlsim.sim.alone import run_rollout
from rlsim.sim.batching import PromptFeed, StepBatch
from rlsim.sim.control import (
    Abort,
    Action,
    ControlContext,
    Controls,
    KvHandling,
    Launch,
    RolloutControl,
    RolloutReport,
    RolloutView,
    Stop,
)
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import Rollout
from rlsim.sim.stage import GenerationStage

_ACTIONS: tuple[type, ...] = get_args(Action)
_VIEW = frozenset(name for name in vars(RolloutView) if not name.startswith("_"))
_PAGE = 16


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


def check_policy(policy: Callable[..., Part], **parameters: Any) -> None:
    """Raise `ContractError` if a policy breaks the contract.

    `policy(**parameters)` makes one: a class, or any function. What it leaves open (the layout, what is launched) is as
    plain as can be. A policy that is to be tuned (see `RolloutControl.alternatives`) is checked with each of its
    choices. Takes a few seconds; the machine is the catalogue's 8xh100 with LLaMA-3.1-8B.
    """
    costs = _costs()
    for batch in batches():
        for choice in _choices(policy, parameters, _context(costs, batch)):
            make = partial(_system, policy, choice)
            if batch.responses > 1 or not make().batching.needs_rewards:  # a reward alone has no variance
                _check(make, batch, costs)


def _check(make: Callable[[], System], batch: Batch, costs: RolloutCostModel) -> None:
    first = _play(make(), batch, costs, rollouts=2)
    _same(first, _play(make(), batch, costs, rollouts=2), batch)
    for other in _other_futures(batch):
        # Both rollouts are the same until a response finishes in either that is not in the other as it is here.
        second = _play(make(), other, costs)
        pairs = zip(first.truth, second.truth, strict=False)
        changed = [i for i, (a, b) in enumerate(pairs) if a != b]
        until_s = min(min(run.left_at_s[i] for i in changed) for run in (first, second)) if changed else np.inf
        _no_peeking(first, second, until_s, batch)


# ---- one rollout under observation -----------------------------------------------------------------------------------


_Answer = tuple[float, tuple[Action, ...]]  # at which moment, and what


@dataclass
class _Run:
    """What a policy did: its first layout, its answers by rollout, and when each request of the first one was done."""

    initial_tp: int
    answers: list[list[_Answer]]
    left_at_s: list[float]
    truth: list[int]  # how long each request of the first rollout was going to be


class _Window:
    """A `RolloutView` through which nothing can be reached but what the protocol offers."""

    __slots__ = ("_Window__batch", "_Window__view")

    def __init__(self, view: RolloutView, batch: Batch) -> None:
        object.__setattr__(self, "_Window__view", view)
        object.__setattr__(self, "_Window__batch", batch)

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        if name in _VIEW:
            return getattr(get(self, "_Window__view"), name)
        if name.startswith("__") and name.endswith("__"):
            return get(self, name)
        batch: Batch = get(self, "_Window__batch")
        raise _broken(batch, f"the policy reached for `view.{name}`; a RolloutView offers: {', '.join(sorted(_VIEW))}")

    def __setattr__(self, name: str, _: object) -> None:
        raise _broken(object.__getattribute__(self, "_Window__batch"), f"the policy set `view.{name}`: it is read-only")


class _Watched(RolloutControl):
    """Passes questions on to a policy and keeps its answers."""

    def __init__(self, policy: RolloutControl, batch: Batch) -> None:
        self.policy, self.batch = policy, batch
        self.answers: list[_Answer] = []

    def on_finish(self, view: RolloutView) -> list[Action]:
        """The policy's answer, checked to be actions."""
        answer: Any = self.policy.on_finish(cast("RolloutView", _Window(view, self.batch)))
        if answer is None:
            actions: list[Any] = []
        elif isinstance(answer, Iterable) and not isinstance(answer, str):
            actions = list(answer)
        else:
            actions = [answer]
        for action in actions:
            if not isinstance(action, _ACTIONS):
                known = ", ".join(kind.__name__ for kind in _ACTIONS)
                raise _broken(self.batch, f"on_finish returned {action!r}; it returns actions ({known}) or None")
        self.answers.append((view.now_s, tuple(actions)))
        return actions


def _play(system: System, batch: Batch, costs: RolloutCostModel, rollouts: int = 1) -> _Run:
    """Rollouts of the same batch one after the other, as the steps of a training run."""
    context = _context(costs, batch)
    used_tps: dict[int, set[int]] = {}
    paused: dict[int, list[Request]] = {}
    answers, left_at_s, truth = [], [], []
    try:
        system.control.setup(context)
        tp = first_tp = system.layout.initial_tp(context)
        feed = PromptFeed(len(batch.lengths) // batch.responses, batch.responses)
        named = type(system.control.label, (_Watched,), {})  # as the policy, for the engine's messages
        for step in range(rollouts):
            if tp not in context.feasible_tps:
                asked = "next_tp" if step else "initial_tp"
                feasible = ", ".join(map(str, context.feasible_tps))
                raise _broken(batch, f"{asked} returned {tp!r}; feasible are {feasible}")
            watched: _Watched = named(system.control, batch)
            one = _Step(system, step, batch, feed, paused)
            report, requests = one.run(watched, tp, context, used_tps), one.requests
            answers.append(watched.answers)
            ended = max((r.finished_at for r in requests if r.finished), default=0.0)
            left_at_s.append([r.finished_at if r.finished else ended for r in requests])
            truth.append([r.response_tokens for r in requests])
            wanted = system.control.next_tp(report)
            tp = tp if wanted is None else wanted
    except ContractError:
        raise
    except Exception as error:
        raise _broken(batch, f"{type(error).__name__}: {error}") from error
    return _Run(first_tp, answers, left_at_s[0], truth[0])


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
                raise _broken(batch, f"it resumes the prompt at position {prompt.position}, which was not kept")
            for old in self.paused.pop(prompt.position):
                new.append(old.resume(len(self.requests) + len(new), self.step - 1, self.step))
        self.lengths += [request.response_tokens for request in new]
        self.requests += new
        self.step_batch.launched(new, [*launch.prompts, *launch.resume])
        return new

    def finished(self, responses: Sequence[Request]) -> None:
        """Score what is complete."""
        self.step_batch.finished(responses)
        for request in responses:
            request.reward = float(request.id % 2)
            if self.step_batch.scored(request) and self.rollout:
                self.rollout.ask()

    def begun(self, rollout: Rollout) -> None:
        """Score what was complete before."""
        self.rollout = rollout
        if there := [r for r in self.requests if r.finished]:
            self.finished(there)
            rollout.ask()

    def run(self, control: _Watched, tp: int, context: ControlContext, used_tps: dict[int, set[int]]) -> RolloutReport:
        """Run it, check that no request is lost or tampered with, and say how it went."""
        step_batch, end = self.step_batch, itertools.accumulate(context.node_gpus)
        first = self.launch(step_batch.first)
        stage = GenerationStage(
            requests=[r for r in first if not r.resumed],
            mesh=[tuple(range(last - gpus, last)) for last, gpus in zip(end, context.node_gpus, strict=True)],
            tp=tp,
            resumed=[r for r in first if r.resumed and not r.finished],
            costs=context.costs,
            config=EngineConfig(page_tokens=_PAGE),
            control=control if step_batch.certain else Controls([step_batch, control]),
            cap_tokens=self.batch.cap_tokens,
            used_tps=used_tps,
            open=step_batch.open,
            launcher=self.launch,
            on_finish=self.finished,
            label=step_batch.first.label,
        )
        rollout = run_rollout(stage, self.begun)
        settled = step_batch.close()
        self.paused |= step_batch.paused
        self.check([action for _, actions in control.answers for action in actions])
        preemptions = sum(replica.preemptions for replica in rollout.replicas)
        generated = tuple(r.generated for r in self.requests if r.finished)
        loads = tuple((r.prompt_tokens, r.generated - r.resumed_tokens) for r in self.requests)
        coming = self.batching.upcoming(self.feed)
        return RolloutReport(self.step, tp, rollout.env.now, preemptions, generated, settled.label, coming, loads)

    def check(self, actions: Sequence[Action]) -> None:
        """Raise `PolicyError` if a request is lost or tampered with, or the batch is not complete."""
        stopped = any(isinstance(action, Stop) for action in actions)
        for request, length in zip(self.requests, self.lengths, strict=True):
            if request.response_tokens != length or not 0 <= request.generated <= length:
                what = f"request {request.id} was tampered with: {request!r}, launched with {length} tokens"
                raise _broken(self.batch, what)
            if not (request.finished or request.aborted or stopped or not self.step_batch.certain):
                what = f"request {request.id} is lost: neither finished nor aborted, and no Stop was returned"
                raise _broken(self.batch, what)
        needed = self.feed.prompts * self.feed.responses
        interfered = stopped or any(isinstance(action, Abort) for action in actions)
        if len(self.accepted) != needed and not interfered:
            raise _broken(self.batch, f"the step's batch has {len(self.accepted)} responses, not {needed}")


# ---- comparing rollouts ----------------------------------------------------------------------------------------------


def _same(first: _Run, second: _Run, batch: Batch) -> None:
    if first.initial_tp != second.initial_tp:
        raise _broken(
            batch,
            f"it is not deterministic: it began at TP {first.initial_tp}, the second time at TP {second.initial_tp}",
        )
    for a, b in itertools.zip_longest(*(list(itertools.chain(*run.answers)) for run in (first, second))):
        if a != b:
            raise _broken(batch, f"it is not deterministic: it answered {_told(a)}, the second time {_told(b)}")


def _no_peeking(first: _Run, second: _Run, until_s: float, batch: Batch) -> None:
    if first.initial_tp != second.initial_tp:
        raise _broken(
            batch,
            f"it knows lengths in advance: it begins at TP {first.initial_tp} or {second.initial_tp}, by the lengths",
        )
    early = [[a for a in run.answers[0] if a[0] < until_s * (1 - 1e-9)] for run in (first, second)]
    for a, b in itertools.zip_longest(*early):
        if a is None or b is None or a[1] != b[1] or abs(a[0] - b[0]) > 1e-9 * a[0]:
            raise _broken(
                batch,
                f"it knows lengths in advance: it answered {_told(a)} but {_told(b)} where responses that had not "
                f"finished by then were going to have other lengths (the first at {until_s:.6g} s)",
            )


def _other_futures(batch: Batch) -> Iterator[Batch]:
    """The same batch but for the lengths of the longer responses: shuffled, as long as may be, or drawn anew."""
    rng = np.random.default_rng(1)
    order = np.argsort(batch.lengths, kind="stable")
    for share in (0.5, 0.1):
        late = order[-max(int(share * len(order)), 2) :]
        for lengths in (
            rng.permutation([batch.lengths[i] for i in late]),
            np.full(len(late), batch.cap_tokens),
            rng.integers(batch.lengths[late[0]], batch.cap_tokens, len(late), endpoint=True),
        ):
            changed = list(batch.lengths)
            for i, length in zip(late, lengths, strict=True):
                changed[i] = int(length)
            yield replace(batch, lengths=tuple(changed))


def _told(answer: _Answer | None) -> str:
    if answer is None:
        return "nothing"
    at_s, actions = answer
    return f"[{', '.join(map(repr, actions))}] at {at_s:.6g} s"


def _broken(batch: Batch, why: str) -> ContractError:
    return ContractError(f"batch {batch.name!r}: {why}")


# ---- the costs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Short:
    """Costs of replicas that have `tokens` of KV cache each."""

    costs: RolloutCostModel
    tokens: int

    def step(self, tp: int) -> StepCost:
        return self.costs.step(tp)

    def capacity_pages(self, tp: int) -> int:
        return min(self.costs.capacity_pages(tp), self.tokens // _PAGE)

    def switch(
        self,
        gpus: int,
        from_tp: int,
        to_tp: int,
        contexts: Sequence[int],
        sequences: int,
        kv: KvHandling,
        first_use: bool,
    ) -> SwitchCost:
        return self.costs.switch(gpus, from_tp, to_tp, contexts, sequences, kv, first_use)

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:
        return self.costs.transfer_s(contexts, from_tp, to_tp, same_node)


def _costs() -> RolloutCostModel:
    model = load_model("llama-3.1-8b")
    return RolloutCostModel(
        model,
        load_cluster("2x8xh100"),
        load_calibration("h100-vllm"),
        page_tokens=_PAGE,
        resident_bytes=resident_bytes(model, TrainStrategy(dp=16, zero_stage=3)),
    )


def _context(costs: RolloutCostModel, batch: Batch) -> ControlContext:
    feasible, infeasible = costs.feasible_tps(batch.prompt_tokens + batch.cap_tokens)
    return ControlContext(
        costs=costs if batch.kv_tokens is None else _Short(costs, batch.kv_tokens),
        feasible_tps=feasible,
        infeasible=infeasible,
        node_gpus=(costs.cluster.gpus_per_node,) * batch.nodes,
        cap_tokens=batch.cap_tokens,
        page_tokens=_PAGE,
        requests=len(batch.lengths),
        prompt_tokens=batch.prompt_tokens,
    )


class _Static(RolloutControl):
    """The layout of a system that says nothing about it."""

    def initial_tp(self, context: ControlContext) -> int:
        return context.feasible_tps[0]


def _system(policy: Callable[..., Part], parameters: Mapping[str, Any]) -> System:
    part: object = policy(**parameters)
    if not isinstance(part, KINDS):
        raise ContractError(f"{policy!r} makes a {type(part).__name__}, which is none of {KIND_NAMES}")
    parts: list[Part] = [part]
    try:
        if not any(is_layout(inner) for inner in flattened(parts)):
            parts.append(_Static())
        return System.of(parts)
    except RlsimError as error:
        raise ContractError(str(error)) from error


def _choices(
    policy: Callable[..., Part], parameters: Mapping[str, Any], context: ControlContext
) -> list[Mapping[str, Any]]:
    made = policy(**parameters)
    try:
        choices = made.alternatives(context) if isinstance(made, RolloutControl | Composition) else ()
    except RlsimError as error:
        raise ContractError(f"alternatives: {error}") from error
    return [{**parameters, **choice} for choice in choices] or [parameters]
