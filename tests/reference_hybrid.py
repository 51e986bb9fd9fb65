"""Training GPUs that generate, token by token: the plain reading of "GPUs that are borrowed" in docs/engine.md.

`Hybrid` is what any rollout has that may borrow; with a rollout for all steps it makes `HybridRun`, with one for each
step `StepRollout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference import RefRequest, _Replica, _Rollout, _View
from reference_open import RollingRun, _Run

from rlsim.sim.control import Action, Borrow, Borrowable, Reconfigure, Release, RolloutCosts

if TYPE_CHECKING:
    from open_workloads import HybridWorkload, StepsWorkload


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

    view_kind = _HybridView

    def __init__(self, work: HybridWorkload, *requests: Sequence[RefRequest]) -> None:
        super().__init__(work, *requests)
        self.hybrid = work.hybrid
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
        for node in range(len(self.node_gpus), len(self.hybrid.domains)):
            self.tps[node] = self.hybrid.tp
            self.create_replicas(node, (*self.node_gpus, *self.hybrid.node_gpus))
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

    def __init__(self, work: HybridWorkload) -> None:
        super().__init__(work)
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


class StepRollout(Hybrid):
    """One step: its rollout, and when its other calls began and ended.

    Before `held_until` weights still come to the trainer's GPUs for the rollout before.
    """

    def __init__(self, work: StepsWorkload, before: StepRollout | None, start: float, held_until: float) -> None:
        self.number, self.before = before.number + 1 if before else 0, before
        positions = range(self.number * work.prompts, (self.number + 1) * work.prompts)
        sizes = [(position, size) for position in positions for size in work.of_prompt(position)]
        super().__init__(work, [RefRequest(i, position, *size) for i, (position, size) in enumerate(sizes)])
        self.samples = len(sizes) // work.prompts
        self.first_version = max(self.number - work.lag, 0)
        self.now = self.begun_at = start
        self.held_until = held_until
        self.used_tps = before.used_tps if before else self.used_tps
        self.workers_free_at: list[float] = before.workers_free_at if before else [0.0] * work.workers
        self.scored: dict[int, tuple[float, float]] = {}  # by id: when it was given to a worker, and when it was scored
        self.train_ready_at = math.nan
        self.train_from = math.inf  # the trainer has its GPUs
        self.parts: list[tuple[float, float]] = []  # of its batch: when training began and ended each
        self.syncs = math.nan, math.nan
        self.asks = True

    def train_wanted_at(self) -> float:
        """When the trainer wants its GPUs, as far as is known; inf if it is not."""
        if self.work.windows:
            return self.part_at(0)
        return self.before.train_ready_at if self.work.lag and self.before else math.inf

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

    def go_on(self) -> None:
        self.look_after_trainer()
        super().go_on()
        self.look_after_trainer()

    def ask(self, finished_on: set[int], looks: bool) -> None:
        while (self.asks or finished_on or looks) and not self.over():
            finishes, self.asks = bool(self.asks or finished_on), False
            for action in self.answers(finished_on, finishes, looks):
                self.note(action)
            finished_on, looks = set(), False
            self.go_on()

    def end_iterations(self) -> set[int]:
        finished_on = super().end_iterations()
        if self.work.windows:
            self.score(sorted(self.result.finished - self.scored.keys()))
        return finished_on

    def score(self, ids: Sequence[int]) -> None:
        """By CPU workers, first come first served."""
        free_at = self.workers_free_at
        for i in ids:
            if self.work.checks:
                worker = free_at.index(min(free_at))
                start = max(self.now, free_at[worker])
                free_at[worker] = start + self.work.check_s(self.by_id[i].position, i % self.samples)
                self.scored[i] = start, free_at[worker]
            else:
                self.scored[i] = math.nan, self.now

    def part_at(self, part: int) -> float:
        """When a part of the batch is there, as far as is known: so many of the responses are scored."""
        ends = [end for _, end in self.scored.values()]
        if self.work.grouped:  # those of a prompt come together
            whole = [range(at, at + self.samples) for at in range(0, len(self.requests), self.samples)]
            ends = [max(self.scored[i][1] for i in ids) for ids in whole if self.scored.keys() >= set(ids) for _ in ids]
        needed = (part + 1) * len(self.requests) // self.work.windows
        return sorted(ends)[needed - 1] if needed <= len(ends) else math.inf

    def train(self, there: Sequence[float], seconds: Sequence[float], sync_from: float) -> None:
        """On its parts, each once it is there and the one before is trained on; then new weights come."""
        at = -math.inf
        for ready, takes in zip(there, seconds, strict=True):
            start = max(at, ready)
            at = start + takes
            self.parts.append((start, at))
        at = max(at, sync_from)
        self.syncs = at, at + self.work.sync_s[self.number]


def simulate_steps(work: StepsWorkload) -> list[StepRollout]:
    """All steps, each of so many prompts.

    `lag` is 0 or 1; `windows` (with a lag of 0) are the parts in which training takes a batch, with `train_s` of all;
    where it is `grouped` it takes the responses of a prompt together. Without `checks` nothing is scored. Scoring takes
    whole batches, with windows each response as it finishes.
    """
    lag, windows, train_s = work.lag, work.windows, work.train_s
    steps: list[StepRollout] = []
    sync_ends = 0.0  # of the step that brought what generation begins with
    held_until = 0.0
    for k in range(len(work.sync_s)):
        before = steps[-1] if steps else None
        step = StepRollout(work, before, max(sync_ends, before.now if before else 0.0), held_until)
        steps.append(step)
        step.deal("contiguous", len(step.requests))
        step.go_on()
        step.ask(set(), looks=False)
        step.run()
        end = step.now
        held_until = max(step.loads_until or 0.0, held_until)
        if lag and before:
            free_at = min(step.train_from, max(end, held_until))  # the trainer may have its GPUs
            before.train([max(before.train_ready_at, free_at)], train_s[k - 1 : k], max(end, held_until))
            sync_ends = before.syncs[1]
        if windows:
            step.train_ready_at = step.part_at(0)
            first = min(step.train_from, max(step.train_ready_at, end, held_until))
            there = [first, *map(step.part_at, range(1, windows))]
            step.train(there, train_s[k * windows : (k + 1) * windows], end)
        else:
            step.score(range(len(step.requests)))
            step.train_ready_at = max(end, sync_ends if lag else 0.0, *(at for _, at in step.scored.values()))
            if not lag or k == len(work.sync_s) - 1:
                step.train([max(step.train_ready_at, held_until)], train_s[k : k + 1], end)
        if step.parts:
            sync_ends = step.syncs[1]
    return steps
