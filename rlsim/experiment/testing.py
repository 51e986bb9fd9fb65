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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlsim.base.hooks import overridden
from rlsim.base.refusals import refuse
from rlsim.base.usercode import origin
from rlsim.errors import RlsimError
from rlsim.experiment.systems import System, is_layout
from rlsim.experiment.trial import Answer, Batch, ContractError, Played, Tally, batches, other_futures
from rlsim.policies.parts import KIND_NAMES, KINDS, Composition, Part, flattened
from rlsim.policies.registry import control_of, is_control
from rlsim.policies.relaxed import Split
from rlsim.sim.actions import ACTIONS, Borrow, Extend
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import ControlContext, Launch, RolloutControl

__all__ = ["Checked", "ContractError", "check_policy"]

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
