"""Training GPUs that generate, token by token: the plain reading of "GPUs that are borrowed" in docs/engine.md.

`Hybrid` is what any rollout has that may borrow; with a rollout for all steps it makes `HybridRun`, with one for each
step `StepRollout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reference import RefRequest, RefResult, _Replica, _Rollout, _View
from reference_open import RollingRun, _Run

from rlsim.sim.control import Action, Borrow, Borrowable, Reconfigure, Release, RolloutCosts

if TYPE_CHECKING:
    from open_workloads import StepsWorkload


@dataclass(frozen=True)
class RefHybrid:
    """The replicas that there may be on the trainer's GPUs."""

    node_gpus: tuple[int, ...]
    tp: int
    costs: RolloutCosts
    load_s: float
    domains: tuple[int, ...]  # the NVLink domain of every node: generation's own, then these

    @property
    def replicas(self) -> int:
        return sum(self.node_gpus) // self.tp


class _HybridView(_View):
    """What a control sees of GPUs that it may borrow."""

    _rollout: Hybrid

    @property
    def borrowable(self) -> Borrowable | None:
        rollout = self._rollout
        return Borrowable(rollout.hybrid.replicas, rollout.hybrid.load_s) if rollout.to_be_had() else None

    @property
    def borrowed(self) -> tuple[int, ...]:
        return tuple(replica.index for replica in self._rollout.borrowed())

    @property
    def wanted_back(self) -> bool:
        return self._rollout.waits

    @property
    def batch_missing(self) -> float:
        return self._rollout.batch_missing()

    @property
    def idle(self) -> tuple[int, ...]:
        return tuple(replica.index for replica in self._rollout.active() if not replica.requests())

    def finished_lengths(self) -> list[int]:
        rollout = self._rollout
        return [rollout.by_id[i].response_tokens for i in rollout.result.finish_at]


class Hybrid(_Rollout):
    """A rollout that borrows the trainer's GPUs, all at once, and gives them back replica by replica."""

    hybrid: RefHybrid

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.loads_until: float | None = None  # the weights come to GPUs that are borrowed
        self.waits = False  # the trainer, for what is borrowed
        self.asks = False  # the control is to be asked, whether responses have finished or not

    # --- what there is

    def is_own(self, replica: _Replica) -> bool:
        return replica.node < len(self.node_gpus)

    def borrowed(self) -> list[_Replica]:
        return [replica for replica in self.active() if not self.is_own(replica)]

    def has_trainers_gpus(self) -> bool:
        there = [replica for replica in self.replicas if not self.is_own(replica) and not replica.stopped]
        return self.loads_until is not None or bool(there)

    def to_be_had(self) -> bool:
        """Nobody has or wants the trainer's GPUs, and it has not begun to change the weights that generate."""
        raise NotImplementedError

    def batch_missing(self) -> float:
        raise NotImplementedError

    def view(self, finished_on: set[int]) -> _View:
        return _HybridView(self, finished_on)

    # --- other GPUs

    def costs_of(self, replica: _Replica) -> RolloutCosts:
        return self.costs if self.is_own(replica) else self.hybrid.costs

    def transfer_s(self, contexts: list[int], sources: list[_Replica], to: _Replica) -> float:
        """The slower end counts; it is not far between nodes of one domain."""
        domains = self.hybrid.domains
        near = all(domains[source.node] == domains[to.node] for source in sources)
        ends = [self.costs_of(end) for end in (to, *sources)]
        return max(costs.transfer_s(contexts, sources[0].tp, to.tp, near) for costs in ends)

    # --- coming and going

    def has_gpus(self) -> bool:
        """Whether the trainer has its GPUs, now that it wants them; if not, the control is told."""
        if self.has_trainers_gpus():
            self.asks = self.asks or not self.waits
            self.waits = True
            return False
        self.waits = False
        return True

    def note(self, action: Action) -> bool:
        match action:
            case Borrow():
                if not self.to_be_had():
                    return False
                self.loads_until = self.now + self.hybrid.load_s
                return True
            case Release(indices):
                going = [replica for replica in self.active() if replica.index in indices]
                own = [replica for replica in self.active() if self.is_own(replica)]
                if all(replica in going for replica in own):  # none of these would be left: they stay
                    going = [replica for replica in going if replica not in own]
                for replica in going:
                    replica.stopping = "release"
                return bool(going)
            case Reconfigure(node):
                assert node < len(self.node_gpus), "the trainer's nodes keep their layout"
        return super().note(action)

    def end_switches(self) -> bool:
        """Nodes that start at one moment do so by their index: the trainer's after generation's own."""
        ended = super().end_switches()
        if self.loads_until is None or not self.reached(self.loads_until):
            return ended
        self.loads_until, self.asks = None, True
        first = sum(self.node_gpus)
        for node, gpus in enumerate(self.hybrid.node_gpus, len(self.node_gpus)):
            self.tps[node] = tp = self.hybrid.tp
            for gpu in range(first, first + gpus, tp):
                self.replicas.append(_Replica(len(self.replicas), node, tp, tuple(range(gpu, gpu + tp))))
            first += gpus
        return True

    def moments(self) -> list[float]:
        return [*super().moments(), *([] if self.loads_until is None else [self.loads_until])]


class HybridRun(Hybrid, _Run):
    """Continuous generation that borrows."""

    def to_be_had(self) -> bool:
        trainer_idle = self.phase == "works" and self.works_until is None and not self.waits
        begun = len(self.open.steps) - 1 + bool(self.step.parts)  # to be trained, steps
        return trainer_idle and not self.has_trainers_gpus() and begun <= self.shown_version

    def decide(self, finished_on: set[int]) -> None:
        """Who has its batch asks for the GPUs before those that are to stop at this moment have."""
        super().decide(finished_on)
        self.train()

    def batch_missing(self) -> float:
        """0 where the step does not take any: it has them all, or trains, or waits for its update."""
        takes = self.phase == "works" and len(self.step.trained) < self.prompts
        return (self.prompts - len(self.step.trained)) / self.prompts if takes else 0.0

    def size(self) -> int:
        return super().size() + len(self.borrowed())


class HybridRollingRun(HybridRun, RollingRun):
    """The same where each replica takes new weights on its own."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.left_with: dict[int, int] = {}  # by request on its way with KV: the version of that

    def end_switches(self) -> bool:
        """Replicas that are new have the newest weights."""
        ended = super().end_switches()
        for replica in self.replicas:
            self.versions.setdefault(replica.index, self.published)
        return ended

    def leave(self) -> bool:
        """What has nothing left may take new weights, or prompts, and KV cache is of the weights it was left with."""
        before = [replica for replica in self.active() if replica.requests()]
        running = {r.id: r for replica in before for r in replica.admitted if r.state == "running"}
        sources = {r.id: replica for replica in before for r in replica.admitted}
        any_left = super().leave()
        for i, r in running.items():
            if r.state == "moving":
                self.left_with[i] = self.version_of(sources[i])
        self.emptied += before
        return any_left

    def arrive(self) -> bool:
        """KV cache of other weights is of no use, unless it is kept."""
        arrived = super().arrive()
        self.look_at_kv()
        return arrived

    def look_at_kv(self) -> None:
        if self.batching.update().kv != "recompute":
            return
        for r in self.requests:
            replica = self.replica_of(r) if r.arrived_kv and r.id in self.left_with else None
            if replica:
                r.arrived_kv = self.version_of(replica) == self.left_with[r.id]

    def pull(self) -> bool:
        followed = super().pull()
        self.look_at_kv()
        return followed


# ---- a rollout for each step ----------------------------------------------------------------------------------------
# Generation has GPUs of its own. A step generates, scores, trains and brings new weights; generation is on policy, or
# one update behind, or on policy with training on equal parts of the batch as they come.

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
            looks, before = self.go_on_to_next(), set(self.result.finished)
            finished_on = self.end_iterations()
            self.scores(sorted(self.result.finished - before))
            self.rest_of_moment(finished_on, looks)
        self.close()

    def scores(self, ids: list[int]) -> None:
        """Responses that have finished at this moment."""


def simulate_steps(work: StepsWorkload) -> list[RefCalls]:
    """All steps, each of so many prompts.

    `lag` is 0 or 1; `windows` (with a lag of 0) are the parts in which training takes a batch, with `train_s` of all;
    where it is `grouped` it takes the responses of a prompt together. Without `checks` nothing is scored. Scoring takes
    whole batches, with windows each response as it finishes.
    """
    prompts, lag, windows, train_s, sync_s = work.prompts, work.lag, work.windows, work.train_s, work.sync_s
    desk, used_tps = Workers(work.workers), dict[int, set[int]]()
    steps: list[RefCalls] = []
    sync_ends = 0.0  # of the step that brought what generation begins with
    held_until = 0.0
    for k in range(len(sync_s)):
        positions = range(k * prompts, (k + 1) * prompts)
        sizes = [(position, size) for position in positions for size in work.of_prompt(position)]
        requests = [RefRequest(i, position, *size) for i, (position, size) in enumerate(sizes)]
        samples = len(requests) // prompts
        rollout = StepRollout(
            requests, work.node_gpus, work.tp, work.costs, work.engine, work.cap_tokens, work.control, None
        )
        rollout.hybrid, rollout.first_version = work.hybrid, max(k - lag, 0)
        before = steps[-1] if steps else None
        start = max(sync_ends, before.generates[1] if before else 0.0)
        rollout.from_start(start, held_until, used_tps)
        scored: Scored = {}

        def score(ids: Sequence[int], at: float, into: Scored = scored, step: int = k, of: int = samples) -> None:
            for i in ids:
                into[i] = (
                    desk.take(at, work.check_s(step * prompts + i // of, i % of)) if work.checks else (math.nan, at)
                )

        def part_at(part: int, into: Scored = scored, of: int = samples) -> float:
            """When a part of the batch is there, as far as is known: so many of the responses are scored."""
            ends = [end for _, end in into.values()]
            if work.grouped:  # those of a prompt come together
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
