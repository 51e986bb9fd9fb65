"""Training GPUs that generate, token by token: the plain reading of "GPUs that are borrowed" in docs/engine.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference import _Replica, _View
from reference_open import RollingRun, _Run

from rlsim.sim.actions import Borrow, Reconfigure, Release
from rlsim.sim.control import Action, Borrowable, RolloutCosts

if TYPE_CHECKING:
    from open_workloads import HybridWorkload


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

    _rollout: HybridRun

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


class HybridRun(_Run):
    """Continuous generation that borrows the trainer's GPUs, all at once, and gives them back replica by replica."""

    view_kind = _HybridView

    def __init__(self, work: HybridWorkload) -> None:
        super().__init__(work)
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

    def to_be_had(self) -> bool:
        """Nobody has or wants the trainer's GPUs, and it has not begun to change the weights that generate."""
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
