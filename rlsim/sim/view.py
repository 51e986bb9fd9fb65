"""Where a rollout stands, and what a control sees of it: never a response's length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import simpy

from rlsim.sim.gpus import Borrowable, Borrowing
from rlsim.sim.node import Node, active
from rlsim.sim.replica import Replica
from rlsim.sim.request import Request


class RolloutState:
    """Where a rollout stands: `Rollout` changes it, its control sees it as a `RolloutView`."""

    def __init__(self, env: simpy.Environment, nodes: Sequence[Node], stage: Any) -> None:
        self.env, self.nodes, self.started_at = env, nodes, env.now
        self.borrowing: Borrowing | None = stage.borrowing
        self.cap_tokens: int = stage.cap_tokens  # the longest a response can get
        self.label: str = stage.label  # the kind of round
        self.backlog_s: Callable[[], float] = stage.backlog_s  # of training that may borrow GPUs
        #: Share of the batch; None: what is unfinished of all that was launched.
        self.batch_missing: Callable[[], float] | None = stage.batch_missing
        #: In the order of their launch: all but what `Rollout.forget` was told.
        self.by_id: dict[int, Request] = {request.id: request for request in (*stage.requests, *stage.resumed)}
        self.launched = len(self.by_id)  # requests so far
        self.unfinished = self.launched  # of these, those neither finished, aborted nor paused
        self.finished = 0  # responses so far
        self.finished_lengths: list[int] = []  # of these, where a control is asked
        self.finished_tokens = (0, 0)  # lengths of the shortest and the longest of them
        self.lent: list[Replica] = []  # released, their GPUs not taken back
        self.launching = False  # prompts begin at this moment, or when the weights that are on their way have come

    @property
    def requests(self) -> list[Request]:
        """Those that it knows but sub-agents, in the order of their launch."""
        return [request for request in self.by_id.values() if not request.parent]

    def active(self) -> list[Replica]:
        """Replicas that have not been told to stop, by index."""
        return active(self.nodes)

    @property
    def borrowed(self) -> list[Replica]:
        return [replica for node in self.nodes if not node.own for replica in active([node])]

    @property
    def size(self) -> int:
        """How many replicas the layouts of its own nodes have, without those that are lent, with those borrowed."""
        own = sum(len(node.gpus) // node.tp for node in self.nodes if node.own)
        return own - len(self.lent) + len(self.borrowed)


class RequestView(NamedTuple):
    """An unfinished request as a policy may know it."""

    id: int
    position: int  # of its prompt in training order: responses to one prompt share it
    prompt_tokens: int
    generated_tokens: int
    has_kv: bool  # running: its context is in the KV cache
    predicted_tokens: float = 0.0  # of the whole response, where the system has a predictor (`length_error`); else 0

    @property
    def context_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens


class ToolCallView(NamedTuple):
    """A trajectory that leaves for a tool call, as a policy may know it."""

    request: RequestView
    calls: int  # that it made before
    own_mean_s: float  # of these, waits included; 0 before the first
    mean_s: float  # of all calls of the run that are over; 0 before the first
    waiting: int  # requests in the queue of its replica
    free_pages: int  # of its replica's KV cache, those that nobody holds
    capacity_pages: int  # of its replica


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica and its unfinished requests, in the order they were admitted, then those waiting."""

    index: int  # names the replica in actions
    node: int
    tp: int
    gpus: tuple[int, ...]
    requests: tuple[RequestView, ...]
    version: int = 0  # of its weights: updates that they have had


class RolloutView:
    """The rollout at one moment, read-only. Building the details costs time, so they are made when asked for."""

    def __init__(self, rollout: RolloutState) -> None:
        self._rollout = rollout

    @property
    def now_s(self) -> float:
        """Seconds since the rollout began."""
        return self._rollout.env.now - self._rollout.started_at

    @property
    def label(self) -> str:
        """The kind of round, as the step's batching calls it."""
        return self._rollout.label

    @property
    def cap_tokens(self) -> int:
        """The longest a response can get."""
        return self._rollout.cap_tokens

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of generation's own GPUs that have active replicas and are not switching."""
        return tuple(n.number for n in self._rollout.nodes if n.own and not n.switched and active([n]))

    @property
    def finished_nodes(self) -> tuple[int, ...]:
        """Those of `nodes` on which responses have just finished, or paused as their budgets are used up."""
        return tuple(number for number in self.nodes if self._rollout.nodes[number].just_finished)

    @property
    def finished(self) -> int:
        """Responses finished so far."""
        return self._rollout.finished

    @property
    def total(self) -> int:
        """Requests launched in this rollout."""
        return self._rollout.launched

    @property
    def finished_tokens(self) -> tuple[int, int]:
        """Lengths of the shortest and the longest response finished so far; (0, 0) before the first."""
        return self._rollout.finished_tokens

    def finished_lengths(self) -> Sequence[int]:
        """Lengths of the responses finished so far, in that order."""
        return tuple(self._rollout.finished_lengths)

    def unfinished(self, node: int | None = None) -> int:
        """Requests neither finished, aborted nor paused; of a node, without those at tools or on their way. Cheap."""
        return self._rollout.unfinished if node is None else self._rollout.nodes[node].unfinished

    def generated(self, node: int) -> Mapping[int, int]:
        """How many of the node's unfinished requests have generated how many tokens."""
        first, *others = [replica.generated() for replica in active([self._rollout.nodes[node]])] or [Counter()]
        for found in others:
            first.update(found)
        return first

    def context_tokens(self, node: int) -> int:
        """Prompt and generated tokens of all unfinished requests of the node. Cheap."""
        return sum(replica.context_tokens() for replica in active([self._rollout.nodes[node]]))

    def requests_on(self, node: int) -> Mapping[int, int]:
        """How many unfinished requests each active replica of the node has, by the replica's index. Cheap."""
        return {replica.index: replica.unfinished for replica in active([self._rollout.nodes[node]])}

    def gpus(self, node: int) -> int:
        """How many of the node's GPUs generate; they all have one layout."""
        return len(self._rollout.nodes[node].gpus)

    def tp(self, node: int) -> int:
        """The node's present tensor-parallel degree."""
        return self._rollout.nodes[node].tp

    def used_tps(self, node: int) -> frozenset[int]:
        """Degrees that this node has used before in the run: their communication groups exist."""
        return frozenset(self._rollout.nodes[node].used_tps)

    @property
    def idle(self) -> tuple[int, ...]:
        """The active replicas that have nothing to generate. Cheap."""
        return tuple(replica.index for replica in self._rollout.active() if replica.idle)

    @property
    def training_backlog_s(self) -> float:
        """How long training will be at work on responses that wait for it, on its own GPUs, if it may borrow others;
        0 if it may not. What it works on at this moment does not count.
        """
        return self._rollout.backlog_s()

    @property
    def launching(self) -> bool:
        """Whether prompts begin at this moment, or may when new weights that are on their way have come; False where
        generation ends with the step.
        """
        return self._rollout.launching

    @property
    def borrowable(self) -> Borrowable | None:
        """What a `Borrow` would bring now (`replicas`, and `load_s` until they have the weights): GPUs of training are
        idle, and the weights there those that generate. None if not, or if the system borrows none.
        """
        borrowing = self._rollout.borrowing
        return borrowing.offer() if borrowing else None

    @property
    def borrowed(self) -> tuple[int, ...]:
        """The active replicas on GPUs of training."""
        return tuple(replica.index for replica in self._rollout.borrowed)

    @property
    def wanted_back(self) -> bool:
        """Whether a call waits for GPUs of training that generation has borrowed."""
        return self._rollout.borrowing is not None and self._rollout.borrowing.wanted_back

    @property
    def batch_missing(self) -> float:
        """What the step that takes responses still lacks, as a share of its batch; 0 while none takes any."""
        rollout = self._rollout
        if rollout.batch_missing:
            return rollout.batch_missing()
        return rollout.unfinished / rollout.launched if rollout.launched else 0.0

    def replicas(self, node: int | None = None) -> tuple[ReplicaView, ...]:
        """The active replicas of one node or of all, with their requests."""
        nodes = self._rollout.nodes if node is None else [self._rollout.nodes[node]]
        return tuple(map(view_of_replica, active(nodes)))


def view_of(request: Request, context: int, running: bool) -> RequestView:
    """What a control may know of a request with so many tokens of context by now."""
    generated = context - request.prompt_tokens
    predicted = request.predicted_tokens
    return RequestView(request.id, request.position, request.prompt_tokens, generated, running, predicted)


def view_of_replica(replica: Replica) -> ReplicaView:
    """What it may know of a replica."""
    requests = tuple(view_of(*there) for there in replica.contexts())
    return ReplicaView(replica.index, replica.node, replica.tp, replica.gpus, requests, replica.version)
