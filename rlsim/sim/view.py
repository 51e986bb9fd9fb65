"""The live `RolloutView` that the engine hands to a control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlsim.sim.control import Borrowable, ReplicaView, RequestView
from rlsim.sim.replica import Replica
from rlsim.sim.request import Request
from rlsim.sim.stage import RolloutState


class LiveView:
    """The `RolloutView` of a rollout; see there."""

    def __init__(self, rollout: RolloutState) -> None:
        self._rollout = rollout

    @property
    def now_s(self) -> float:
        return self._rollout.env.now - self._rollout.started_at

    @property
    def label(self) -> str:
        return self._rollout.label

    @property
    def cap_tokens(self) -> int:
        return self._rollout.cap_tokens

    @property
    def nodes(self) -> tuple[int, ...]:
        rollout = self._rollout
        own = range(rollout.own_nodes)
        return tuple(n for n in own if n not in rollout._switching and rollout.active(n))

    @property
    def finished_nodes(self) -> tuple[int, ...]:
        rollout = self._rollout
        nodes = [n for n in sorted(rollout._just_finished) if n < rollout.own_nodes]
        return tuple(n for n in nodes if n not in rollout._switching and rollout.active(n))

    @property
    def finished(self) -> int:
        return self._rollout.finished

    @property
    def total(self) -> int:
        return self._rollout.launched

    @property
    def finished_tokens(self) -> tuple[int, int]:
        return self._rollout.finished_tokens

    def finished_lengths(self) -> tuple[int, ...]:
        return tuple(self._rollout.finished_lengths)

    def unfinished(self, node: int | None = None) -> int:
        rollout = self._rollout
        return rollout._left if node is None else rollout._left_on[node]

    def generated(self, node: int) -> Mapping[int, int]:
        first, *others = [replica.generated() for replica in self._rollout.active(node)] or [Counter()]
        for found in others:
            first.update(found)
        return first

    def context_tokens(self, node: int) -> int:
        return sum(replica.context_tokens() for replica in self._rollout.active(node))

    def requests_on(self, node: int) -> Mapping[int, int]:
        return {replica.index: replica.unfinished for replica in self._rollout.active(node)}

    def gpus(self, node: int) -> int:
        return len(self._rollout.mesh[node])

    def tp(self, node: int) -> int:
        return self._rollout._tp[node]

    def used_tps(self, node: int) -> frozenset[int]:
        return frozenset(self._rollout._used_tps[node])

    @property
    def training_backlog_s(self) -> float:
        return self._rollout.backlog_s()

    @property
    def idle(self) -> tuple[int, ...]:
        return tuple(replica.index for replica in self._rollout.active() if replica.idle)

    @property
    def launching(self) -> bool:
        return self._rollout.launching

    @property
    def borrowable(self) -> Borrowable | None:
        borrowing = self._rollout.borrowing
        return borrowing.offer() if borrowing else None

    @property
    def borrowed(self) -> tuple[int, ...]:
        return tuple(replica.index for replica in self._rollout.borrowed)

    @property
    def wanted_back(self) -> bool:
        return self._rollout.borrowing is not None and self._rollout.borrowing.wanted_back

    @property
    def batch_missing(self) -> float:
        return self._rollout.batch_missing

    def replicas(self, node: int | None = None) -> tuple[ReplicaView, ...]:
        return tuple(view_of_replica(replica) for replica in self._rollout.active(node))


def view_of(request: Request, context: int, running: bool) -> RequestView:
    """What a control may know of a request with so many tokens of context by now."""
    generated = context - request.prompt_tokens
    predicted = request.predicted_tokens
    return RequestView(request.id, request.position, request.prompt_tokens, generated, running, predicted)


def view_of_replica(replica: Replica) -> ReplicaView:
    """What it may know of a replica."""
    requests = tuple(view_of(*there) for there in replica.contexts())
    return ReplicaView(replica.index, replica.node, replica.tp, replica.gpus, requests, replica.version)
