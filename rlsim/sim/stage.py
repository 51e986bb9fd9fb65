"""One generation stage: what is generated, where, who decides, and which replica gets which requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Literal, TypeVar

from rlsim.base.hooks import misused
from rlsim.cost.step import StepCost
from rlsim.sim.control import Launch, RefusedError, RolloutControl, asked
from rlsim.sim.environment import Environments
from rlsim.sim.gpus import Borrowing, RolloutCosts
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import ChunkListener, Replica
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.view import view_of, view_of_replica

Routing = Literal["contiguous", "round_robin"]
#: To which replica a request goes that is launched while others run: each to the one with the least context, or with
#: the fewest requests.
Dispatch = Literal["least_context", "fewest_requests"]


#: Requests of each replica that gets any, by its index, in the order in which they come there.
Shares = Mapping[int, Sequence[Request]]


def _no_launch(launch: Launch) -> Sequence[Request]:  # noqa: ARG001
    raise RefusedError("nothing can be launched here")


def nobody(*_: object) -> None:
    """Nobody is told."""


@dataclass(kw_only=True, slots=True)
class GenerationStage:
    """One generation stage: what is generated, on which GPUs, and who decides and is told."""

    requests: Sequence[Request]
    mesh: Sequence[tuple[int, ...]]  # the GPUs of each node, on some perhaps more than on others
    tp: int  # that every node starts with
    costs: RolloutCosts
    config: EngineConfig
    cap_tokens: int  # the longest a response can get
    control: RolloutControl = field(default_factory=RolloutControl)
    asked_at_finish: bool = True  # each time responses finish; if not, the control is asked at an `ask` alone
    routing: Routing = "contiguous"
    micro_batches: int = 1  # of what each replica begins with, one after the other
    dispatch: Dispatch = "least_context"
    label: str = ""  # the kind of round
    resumed: Sequence[Request] = ()  # further requests, with tokens from an earlier step
    used_tps: dict[int, set[int]] = field(default_factory=dict)  # by node, degrees of this run; the stage adds its own
    version: int = 0  # of the weights that it begins with: updates that they have had
    open: bool = False  # goes on when no request is left, as more may be launched; only a `Stop` ends it
    launcher: Callable[[Launch], Sequence[Request]] = _no_launch  # makes the requests of a `Launch`
    on_finish: Callable[[Sequence[Request]], None] | None = None  # is told of responses that are complete
    on_abort: Callable[[Sequence[Request]], None] = nobody  # is told of those that a control has dropped
    on_drained: Callable[[], None] = nobody  # is told each time that no request is left of an open stage
    on_idle: Callable[[], None] | None = None  # at the end of a moment: a replica has nothing left
    on_release: Callable[[Iterable[int]], None] = nobody  # is told of GPUs that are given up before the end
    crowded: Callable[[int], StepCost] | None = None  # step cost, by TP, of a replica whose GPUs are shared
    backlog_s: Callable[[], float] = lambda: 0.0  # of training that may borrow GPUs, see `RolloutView`
    batch_missing: Callable[[], float] | None = None  # see `RolloutView`; default: the share that is unfinished
    borrowing: Borrowing | None = None  # GPUs of training that it may have for a time
    chunks: ChunkListener | None = None  # is told of responses on their way
    environments: Environments | None = None  # that run tool calls; None where no request has any
    recorder: Recorder = field(default_factory=Recorder)

    def shares(self, requests: Sequence[Request], replicas: Sequence[Replica], idle: bool) -> Shares:
        """How new requests are dealt to these replicas: as the control says, else evenly where all are idle, else to
        those that have the fewest.
        """
        if (shares := self._wanted(requests, replicas)) is None and idle:
            even = evenly(requests, len(replicas), self.routing)
            shares = {replica.index: share for replica, share in zip(replicas, even, strict=True)}
        elif shares is None:
            load = {replica.index: replica.unfinished for replica in replicas}
            shares = to_least([(request, 1) for request in requests], load)
        if self.micro_batches > 1 and idle:
            for share in shares.values():
                for number, part in enumerate(evenly(share, self.micro_batches, "contiguous")):
                    for request in part:
                        request.micro_batch = number
        return shares

    def _wanted(self, requests: Sequence[Request], replicas: Sequence[Replica]) -> Shares | None:
        if not requests or not (parts := asked(self.control, "dispatch")):
            return None
        known = {request.id: request for request in requests}
        views = [view_of(request, request.context, running=False) for request in requests]
        seen = [view_of_replica(replica) for replica in replicas]
        answers = ((part, part.dispatch(views, seen)) for part in parts)
        part, wanted = next(((part, wanted) for part, wanted in answers if wanted is not None), (None, None))
        if part is None or wanted is None:
            return None
        named = [id_ for ids in wanted.values() for id_ in ids]
        if sorted(named) != sorted(known) or not wanted.keys() <= {replica.index for replica in replicas}:
            what = "returned a share that does not give each response to one of the replicas"
            raise misused(part.author, "dispatch", what)
        return {index: [known[id_] for id_ in ids] for index, ids in wanted.items()}


_T = TypeVar("_T")


def evenly(requests: Sequence[_T], replicas: int, routing: Routing) -> list[Sequence[_T]]:
    """As many to each replica, one after the other or in runs; the first replicas get one more."""
    if routing == "round_robin":
        return [requests[i::replicas] for i in range(replicas)]
    size, extra = divmod(len(requests), replicas)
    ends = [size * i + min(i, extra) for i in range(replicas + 1)]
    return [requests[first:end] for first, end in pairwise(ends)]


def by_context(requests: Iterable[Request], load_tokens: Mapping[int, int]) -> Shares:
    """Longest context first, each to the replica with the least context so far."""
    return to_least([(r, r.context) for r in sorted(requests, key=lambda r: (-r.context, r.id))], load_tokens)


def to_least(weighed: Iterable[tuple[_T, float]], load: Mapping[int, float]) -> dict[int, list[_T]]:
    """Each with its weight, in their order, to the least loaded so far (ties: lowest index); who gets any, by index."""
    shares: dict[int, list[_T]] = {}
    least = [(amount, index) for index, amount in load.items()]
    heapify(least)
    for one, weight in weighed:
        amount, index = least[0]
        heapreplace(least, (amount + weight, index))
        shares.setdefault(index, []).append(one)
    return {index: shares[index] for index in load if index in shares}
