"""The contract of a policy, checked: what the author of a part of a system runs in their own tests.

    from rlsim import check_policy
    print(check_policy(MyPolicy))
    check_policy(MyPolicy, threshold=8)

A policy must be deterministic, must end every rollout with no request lost, must not know how long responses will
get, must cope with odd batches (one request, equal lengths, nothing but preemptions), and returns nothing but actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, get_args

import numpy as np

from rlsim.base.hooks import overridden
from rlsim.base.usercode import origin
from rlsim.cost.calibration import load_calibration
from rlsim.cost.memory import kept_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import RlsimError
from rlsim.experiment.systems import System, is_layout
from rlsim.experiment.trial import Answer, Batch, ContractError, Played, Tally, play
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.policies.parts import KIND_NAMES, KINDS, Composition, Part, flattened
from rlsim.policies.registry import control_of, is_control
from rlsim.sim.control import Action, Borrow, ControlContext, Extend, Launch, RolloutControl

__all__ = ["Checked", "ContractError", "check_policy"]

_PAGE = 16

#: Hooks that rollouts alone call; the others are called by a run of an experiment.
_CALLED = {"alternatives", "setup", "initial_tp", "on_finish", "every_s", "on_timer", "next_tp", "parts"} | {
    "ends", "launch", "under_way", "upcoming", "counts", "more", "keep", "put_back", "waiting",
}  # fmt: skip
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
    costs, tally = _machine(), Tally()
    played: dict[str, None] = {}
    tried: dict[str, Mapping[str, Any]] = {}
    for batch in _batches():
        with _broken(f"batch {batch.name!r}"):
            context = _context(costs, batch)
            for choice in _choices(policy, parameters, context):
                make = partial(_system, policy, choice)
                if batch.responses > 1 or not make().batching.needs_rewards:  # a reward alone has no variance
                    _check(make, batch, context, tally)
                    played[batch.name] = None
                    tried[repr(choice)] = choice
    parts = list(flattened([policy(**parameters)]))
    return Checked(
        " + ".join(dict.fromkeys(type(part).__name__ for part in parts)),
        tuple(tried.values()),
        tuple(played),
        tally.rollouts,
        tally.answers,
        dict(tally.actions),
        dict(tally.prompts),
        tuple(_not_checked(parts, tally)),
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
        name, hooks = type(part).__name__, overridden(type(part))
        if "on_timer" in hooks and (not isinstance(part, RolloutControl) or part.every_s is None):
            yield f"{name}.on_timer is never called: every_s says no seconds"
        if deciding := [hook for hook in ("on_finish", "on_timer") if hook in hooks]:
            never = [kind.__name__ for kind in get_args(Action) if kind not in (Launch, Extend, Borrow)]
            never = [kind for kind in never if not tally.actions[kind]]
            if never:
                yield f"{name}.{_listed(deciding, 'and')} never returned {_listed(never, 'or')}"
        for hook, what in _OF_PROMPTS.items():
            if hook in hooks and not tally.prompts[what]:
                yield f"{name}.{hook}: no prompt was {what}"
        if uncalled := [hook for hook in hooks if hook not in _CALLED]:
            yield f"{name}: only a run of an experiment calls {_listed(uncalled, 'and')}"


def _listed(names: Sequence[str], last: str) -> str:
    """The names in a sentence: `a, b and c`."""
    return f" {last} ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _check(make: Callable[[], System], batch: Batch, context: ControlContext, tally: Tally) -> None:
    first = play(make(), batch, context, tally, rollouts=2)
    _same(first, play(make(), batch, context, tally, rollouts=2))
    for other in _other_futures(batch):
        # Both rollouts are the same until a response finishes in either that is not in the other as it is here.
        second = play(make(), other, context, tally)
        pairs = zip(first.truth, second.truth, strict=False)
        changed = [i for i, (a, b) in enumerate(pairs) if a != b]
        until_s = min(min(run.left_at_s[i] for i in changed) for run in (first, second)) if changed else np.inf
        _no_peeking(first, second, until_s)


def _same(first: Played, second: Played) -> None:
    if first.initial_tp != second.initial_tp:
        raise ContractError(
            f"it is not deterministic: it began at TP {first.initial_tp}, the second time at TP {second.initial_tp}"
        )
    for a, b in itertools.zip_longest(*(list(itertools.chain(*run.answers)) for run in (first, second))):
        if a != b:
            raise ContractError(f"it is not deterministic: it answered {_told(a)}, the second time {_told(b)}")


def _no_peeking(first: Played, second: Played, until_s: float) -> None:
    if first.initial_tp != second.initial_tp:
        raise ContractError(
            f"it knows lengths in advance: it begins at TP {first.initial_tp} or {second.initial_tp}, by the lengths"
        )
    early = [[a for a in run.answers[0] if a[0] < until_s * (1 - 1e-9)] for run in (first, second)]
    for a, b in itertools.zip_longest(*early):
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
    part = _made(policy, parameters)
    if any(is_layout(inner) for inner in flattened([part])):
        return System.of([part], "")
    return System.of([part, _Static()], "")


def _made(policy: Callable[..., Part], parameters: Mapping[str, Any]) -> Part:
    part: object = policy(**parameters)
    if not isinstance(part, KINDS):
        raise ContractError(f"{policy!r} makes a {type(part).__name__}, which is none of {KIND_NAMES}")
    return part


def _choices(
    policy: Callable[..., Part], parameters: Mapping[str, Any], context: ControlContext
) -> Sequence[Mapping[str, Any]]:
    made = _made(policy, parameters)
    choices = made.alternatives(context) if isinstance(made, RolloutControl | Composition) else ()
    return [{**parameters, **choice} for choice in choices] or [parameters]


# ---- what is played --------------------------------------------------------------------------------------------------


def _batches(seed: int = 0) -> tuple[Batch, ...]:
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


def _short(costs: RolloutCostModel, tokens: int) -> RolloutCostModel:
    """The same machine with room for so many tokens of KV in each replica."""
    short = copy(costs)
    short.capacity_pages = cache(lambda tp: min(costs.capacity_pages(tp), tokens // _PAGE))
    return short


def _machine() -> RolloutCostModel:
    """The catalogue's 2x8xh100 with LLaMA-3.1-8B, its training states spread over both nodes."""
    model = load_model("llama-3.1-8b")
    return RolloutCostModel(
        model,
        load_cluster("2x8xh100"),
        load_calibration("h100-vllm"),
        page_tokens=_PAGE,
        resident_bytes=kept_bytes(model, TrainStrategy(dp=16, zero_stage=3)),
    )


def _context(costs: RolloutCostModel, batch: Batch) -> ControlContext:
    """What a policy learns before a run on this batch."""
    feasible, infeasible = costs.feasible_tps(batch.prompt_tokens + batch.cap_tokens)
    return ControlContext(
        costs=costs if batch.kv_tokens is None else _short(costs, batch.kv_tokens),
        feasible_tps=feasible,
        infeasible=infeasible,
        node_gpus=(costs.cluster.gpus_per_node,) * batch.nodes,
        cap_tokens=batch.cap_tokens,
        page_tokens=_PAGE,
        requests=len(batch.lengths),
        prompt_tokens=batch.prompt_tokens,
    )
