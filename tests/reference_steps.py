"""Steps with a rollout each, whose trainer's GPUs generate too, token by token; see `reference_hybrid`.

Generation has GPUs of its own. A step generates, scores, trains and brings new weights; generation is on policy, or one
update behind, or on policy with training on equal parts of the batch as they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reference import RefEngine, RefRequest, RefResult
from reference_hybrid import Hybrid, RefHybrid

from rlsim.sim.control import RolloutControl, RolloutCosts

#: When each response was given to a worker that scores, and when it was scored; by its id.
Scored = dict[int, tuple[float, float]]


@dataclass
class RefCalls:
    """One step: when its calls began and ended."""

    generates: tuple[float, float]
    rollout: RefResult
    scored: Scored
    train_ready_at: float
    parts: list[tuple[float, float]] = field(default_factory=list)  # of its batch: when training began and ended each
    syncs: tuple[float, float] = (math.nan, math.nan)


class Workers:
    """CPU workers, first come first served."""

    def __init__(self, count: int) -> None:
        self.free_at = [0.0] * count

    def take(self, given_at: float, seconds: float) -> tuple[float, float]:
        worker = min(range(len(self.free_at)), key=self.free_at.__getitem__)
        start = max(given_at, self.free_at[worker])
        self.free_at[worker] = start + seconds
        return start, start + seconds


class StepRollout(Hybrid):
    """The rollout of one step."""

    train_wanted_at: Callable[[], float]  # when the trainer wants its GPUs, as far as is known; inf if it is not

    def from_start(self, start: float, held_until: float, used_tps: dict[int, set[int]]) -> None:
        """Before `held_until` weights still come to the trainer's GPUs for the rollout before."""
        self.now = self.begun_at = start
        self.held_until = held_until
        for node, tps in self.used_tps.items():
            used_tps.setdefault(node, set()).update(tps)
        self.used_tps = used_tps
        self.train_from = math.inf  # the trainer has its GPUs
        self.ended: list[list[int]] = []  # ids, of each moment at which responses finished
        self.asks = True

    def has_trainers_gpus(self) -> bool:
        return super().has_trainers_gpus() or not self.reached(self.held_until)

    def to_be_had(self) -> bool:
        return not self.reached(self.train_wanted_at()) and not self.has_trainers_gpus()

    def batch_missing(self) -> float:
        return sum(r.left for r in self.requests) / len(self.requests)

    def moments(self) -> list[float]:
        later = [at for at in (self.train_wanted_at(), self.held_until) if not self.reached(at) and at < math.inf]
        return [*super().moments(), *later]

    def look_after_trainer(self) -> None:
        if self.train_from == math.inf and self.reached(self.train_wanted_at()) and self.has_gpus():
            self.train_from = self.now

    def rest_of_moment(self, finished_on: set[int], looks: bool = False) -> None:
        while True:
            self.look_after_trainer()
            self.settle()
            self.look_after_trainer()
            self.begin_all()
            finishes = bool(self.asks or finished_on)
            if self.over() or not (finishes or looks):
                return
            self.asks = False
            for action in self.answers(finished_on, finishes, looks):
                self.note(action)
            finished_on, looks = set(), False

    def to_the_end(self) -> None:
        self.rest_of_moment(set())
        while not self.over():
            looks = self.next_look()
            self.now = min([min(self.moments()), *looks])
            ending = [r for r in self.replicas if r.iteration is not None and self.reached(r.iteration.ends_at)]
            before = set(self.result.finished)
            finished_on = {replica.node for replica in ending if self.end(replica)}
            self.scores(sorted(self.result.finished - before))
            self.rest_of_moment(finished_on, any(map(self.reached, looks)))
        self.close()

    def scores(self, ids: list[int]) -> None:
        """Responses that have finished at this moment."""


def simulate_steps(
    sizes: Callable[[int], Sequence[tuple[int, int]]],
    *,
    prompts: int,
    lag: int,
    windows: int,
    grouped: bool,
    train_s: Sequence[float],
    sync_s: Sequence[float],
    check_s: Callable[[int, int], float] | None,
    workers: int,
    node_gpus: Sequence[int],
    tp: int,
    costs: RolloutCosts,
    engine: RefEngine,
    cap_tokens: int,
    control: RolloutControl,
    hybrid: RefHybrid,
) -> list[RefCalls]:
    """All steps, each of so many prompts; `sizes` and `check_s` are of a prompt's position (and a response to it).

    `lag` is 0 or 1; `windows` (with a lag of 0) are the parts in which training takes a batch, with `train_s` of all;
    where it is `grouped` it takes the responses of a prompt together.
    Without `check_s` nothing is scored. Scoring takes whole batches, with windows each response as it finishes.
    """
    desk, used_tps = Workers(workers), dict[int, set[int]]()
    steps: list[RefCalls] = []
    sync_ends = 0.0  # of the step that brought what generation begins with
    held_until = 0.0
    for k in range(len(sync_s)):
        requests = [
            RefRequest(i, position, *size)
            for i, (position, size) in enumerate(
                (position, size) for position in range(k * prompts, (k + 1) * prompts) for size in sizes(position)
            )
        ]
        samples = len(requests) // prompts
        rollout = StepRollout(requests, node_gpus, tp, costs, engine, cap_tokens, control, None)
        rollout.hybrid = hybrid
        before = steps[-1] if steps else None
        start = max(sync_ends, before.generates[1] if before else 0.0)
        rollout.from_start(start, held_until, used_tps)
        scored: Scored = {}

        def score(ids: Sequence[int], at: float, into: Scored = scored, step: int = k, of: int = samples) -> None:
            for i in ids:
                into[i] = desk.take(at, check_s(step * prompts + i // of, i % of)) if check_s else (math.nan, at)

        def part_at(part: int, into: Scored = scored, of: int = samples) -> float:
            """When a part of the batch is there, as far as is known: so many of the responses are scored."""
            ends = [end for _, end in into.values()]
            if grouped:  # those of a prompt come together
                whole = [range(first, first + of) for first in range(0, prompts * of, of)]
                ends = [max(into[i][1] for i in ids) for ids in whole if into.keys() >= set(ids) for _ in ids]
            ends.sort()
            needed = (part + 1) * prompts * of // windows
            return ends[needed - 1] if needed <= len(ends) else math.inf

        if windows:
            rollout.scores = lambda ids, r=rollout, s=score: s(ids, r.now)  # type: ignore[method-assign,misc]
            rollout.train_wanted_at = lambda p=part_at: p(0)
        elif lag and before:
            rollout.train_wanted_at = lambda at=before.train_ready_at: at
        else:
            rollout.train_wanted_at = lambda: math.inf
        rollout.deal("contiguous", len(requests))
        rollout.to_the_end()
        end = rollout.now
        held_until = max(rollout.loads_until or 0.0, held_until)
        if lag and before:
            train(before, [max(before.train_ready_at, held_until_of(rollout, end, held_until))], train_s[k - 1 : k])
            before.syncs = synced(max(before.parts[-1][1], end, held_until), sync_s[k - 1])
            sync_ends = before.syncs[1]
        if not windows:
            score([request.id for request in requests], end)
        step = RefCalls((start, end), rollout.result, scored, math.nan)
        steps.append(step)
        if windows:
            step.train_ready_at = part_at(0)
            first = min(rollout.train_from, max(part_at(0), end, held_until))
            train(step, [first, *map(part_at, range(1, windows))], train_s[k * windows : (k + 1) * windows])
        else:
            step.train_ready_at = max(end, sync_ends if lag else 0.0, *(at for _, at in scored.values()))
            if not lag or k == len(sync_s) - 1:
                train(step, [max(step.train_ready_at, held_until)], train_s[k : k + 1])
        if step.parts:
            step.syncs = synced(max(step.parts[-1][1], end), sync_s[k])
            sync_ends = step.syncs[1]
    return steps


def held_until_of(rollout: StepRollout, end: float, held_until: float) -> float:
    """Since when the trainer may have its GPUs: from when it got them, or the end of the rollout."""
    return min(rollout.train_from, max(end, held_until))


def train(step: RefCalls, there: Sequence[float], seconds: Sequence[float]) -> None:
    """On its parts, each once it is there and the one before is trained on."""
    at = -math.inf
    for ready, takes in zip(there, seconds, strict=True):
        at = max(at, ready)
        step.parts.append((at, at + takes))
        at += takes


def synced(ready: float, seconds: float) -> tuple[float, float]:
    return ready, ready + seconds
