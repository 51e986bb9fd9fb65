"""Who has which GPUs: calls, which hold them alone, or generation, which borrows those of training; costs there.

A call starts when every GPU of its mesh is free: first come, first served, but for weight syncs: one goes before the
generations that wait, and the calls that take responses as they come. Where steps overlap, these may have waited for
longer than the sync of an earlier step, and that step's trainer, or the generation that its weights are for, would
stand still for as long as they take. (Without overlap none of them can wait while weights are still to come.) And but
for guests, who borrow what others leave idle: they go after all of these, and after all who ask at the same moment.

`rlsim.sim.elastic` has training's replicas on GPUs of generation, this file generation's *hybrid* replicas on those of
training, while training waits for its batch. A control says when they come (`Borrow`) and go (`Release`).
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol

import simpy

from rlsim.cost.step import StepCost
from rlsim.cost.transfer import IN_PLACE, HostKv, SwitchCost, SwitchWay
from rlsim.sim.moment import IDLE, when_over
from rlsim.workflow.graph import CallKind

KvHandling = Literal["migrate", "recompute"]


class RolloutCosts(Protocol):
    """What the engine needs to know about the machine; rlsim.cost provides it, tests make their own."""

    def step(self, tp: int) -> StepCost:
        """Iteration times of a replica at this TP."""

    def capacity_pages(self, tp: int) -> int:
        """KV pages of a replica at this TP."""

    def host_kv(self, tp: int) -> HostKv:
        """Host memory for KV pages that a replica at this TP has no room for."""

    def switch(
        self,
        gpus: int,
        from_tp: int,
        to_tp: int,
        contexts: Sequence[int],
        sequences: int,
        kv: KvHandling,
        first_use: bool,
        way: SwitchWay = IN_PLACE,
    ) -> SwitchCost:
        """Pause of so many GPUs of a node with `sequences` unfinished requests, some holding `contexts` tokens of KV.

        With `kv` "recompute" the KV costs nothing here: the engine prefills it again. `first_use`: this run has not
        used `to_tp` on this node before, so its communication groups must be created.
        """

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:
        """Time of moving the KV of these contexts from one replica to another."""


_rank = attrgetter("rank")


class _Waiting(NamedTuple):
    rank: tuple[float, int, int]  # its place in the order of all that wait
    gpus: frozenset[int]
    granted: simpy.Event
    yields: bool  # to syncs


class GpuPool:
    """Hands out sets of GPUs. Calls that want none of the GPUs that a call waits for pass it, and weight syncs do."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._busy: set[int] = set()
        self._calls = 0
        self._queues: defaultdict[int, list[_Waiting]] = defaultdict(list)  # by GPU, in the order of ranks
        self.on_wait: Callable[[frozenset[int]], None] | None = None  # is told what a call waits for, as it begins to

    def acquire(
        self, gpus: Iterable[int], kind: CallKind, *, streams: bool = False, guest: bool = False
    ) -> simpy.Event:
        """An event that fires when all of `gpus` are the caller's, a call of that kind; at once if they are free.

        One that `streams` takes responses as they come. A `guest` waits behind everybody else, who may ask later in
        this moment or its wait; `withdraw` ends that.
        """
        self._calls += 1
        wanted, sync, place = frozenset(gpus), kind == "sync", inf if guest else self._calls
        passed = [call.rank[0] for gpu in wanted for call in self._queues[gpu] if sync and call.yields]
        rank, yields = (min([place, *passed]), not sync, self._calls), streams or kind == "generate"
        call = _Waiting(rank, wanted, self._env.event(), yields)
        for gpu in wanted:
            insort(self._queues[gpu], call, key=_rank)
        self._turn(call)
        if self.on_wait and not call.granted.triggered:
            self.on_wait(call.gpus)
        return call.granted

    def idle(self, gpus: Collection[int]) -> bool:
        """Whether nobody has any of these GPUs, or waits for one."""
        return self._busy.isdisjoint(gpus) and not self.wanted(gpus)

    def wanted(self, gpus: Iterable[int]) -> bool:
        return any(self._queues[gpu] for gpu in gpus)

    def release(self, gpus: Iterable[int]) -> None:
        freed = set(gpus)
        self._busy -= freed
        self._serve(freed)

    def withdraw(self, granted: simpy.Event) -> None:
        """Who waits for this event does so no more, and got nothing."""
        for gpu, queue in self._queues.items():
            self._queues[gpu] = [call for call in queue if call.granted is not granted]
        self._serve(self._queues)

    def _serve(self, freed: Iterable[int]) -> None:
        # Only a call that is the first to want each of its GPUs can have them.
        firsts = {queue[0].rank: queue[0] for gpu in freed if (queue := self._queues[gpu])}
        for rank in sorted(firsts):
            self._turn(firsts[rank])

    def _turn(self, call: _Waiting) -> None:
        if call.rank[0] < inf:
            self._grant(call)
        else:
            when_over(self._env, IDLE, partial(self._grant, call))

    def _grant(self, call: _Waiting) -> None:
        """Give the call its GPUs if they are free and nobody else waits for one of them before it."""
        queues = [self._queues[gpu] for gpu in call.gpus]
        if self._busy.isdisjoint(call.gpus) and all(queue and queue[0] is call for queue in queues):
            for queue in queues:
                del queue[0]
            self._busy |= call.gpus
            call.granted.succeed()


class Borrowable(NamedTuple):
    """Replicas that generation may have on GPUs of training."""

    replicas: int
    load_s: float  # until they have the weights


class HybridReplicas(NamedTuple):
    """The rollout replicas that there may be on the GPUs of the call that trains the model."""

    mesh: Sequence[tuple[int, ...]]  # its GPUs, node by node
    tp: int  # GPUs of a replica
    costs: RolloutCosts  # of replicas there: perhaps another kind of GPU, beside what training keeps in memory
    load_s: float  # until all of them have the trainer's weights in the layout of the rollout
    call: str  # whose time that is, in the record
    domain_of: Callable[[int], object] = int  # the NVLink domain of a GPU, which own replicas may share


class Borrowing:
    """Who has the GPUs of hybrid replicas: the calls of training, or generation, which has all at once.

    Generation may have them while no call has or wants one of them, and only before training begins to change the
    weights of the version that is generated with: the trainer's are what it gets.
    """

    def __init__(self, env: simpy.Environment, pool: GpuPool, there: HybridReplicas) -> None:
        self.there = there
        self.trained = 0  # updates of the trainer's weights, the one at work included
        self._had_gpu_s = 0.0  # of generation, on GPUs that it has given back since `take_gpu_s`
        self.loading = False  # generation has them, but cannot begin yet
        self._env, self._pool = env, pool
        self._version: Callable[[], int] = lambda: 0
        self._on_wanted: Callable[[], None] | None = None
        self._gpus = frozenset(gpu for gpus in there.mesh for gpu in gpus)
        self._since: dict[int, float] = {}  # by GPU that generation has
        pool.on_wait = self._waits

    def serve(self, version: Callable[[], int], on_wanted: Callable[[], None]) -> None:
        """They are there for a rollout, with weights of this version; it is told when a call waits for what it has."""
        self._version, self._on_wanted = version, on_wanted

    def _waits(self, gpus: frozenset[int]) -> None:
        if self._on_wanted and not gpus.isdisjoint(self._since):
            self._on_wanted()

    @property
    def wanted_back(self) -> bool:
        """Whether a call waits for some that generation has."""
        return self._pool.wanted(self._since)

    def offer(self) -> Borrowable | None:
        if self._since or self.trained > self._version() or not self._pool.idle(self._gpus):
            return None
        return Borrowable(sum(len(gpus) // self.there.tp for gpus in self.there.mesh), self.there.load_s)

    def take(self) -> None:
        self._pool.acquire(self._gpus, "generate")
        self._since, self.loading = dict.fromkeys(self._gpus, self._env.now), True

    def give_back(self, gpus: Iterable[int]) -> None:
        back = [gpu for gpu in gpus if gpu in self._since]
        self._had_gpu_s += sum(self._env.now - self._since.pop(gpu) for gpu in back)
        self._pool.release(back)

    def end(self) -> None:
        """The rollout is over: all that it has goes back, once nothing is loaded there any more."""
        self._on_wanted = None
        if not self.loading:
            self.give_back([*self._since])

    def take_gpu_s(self) -> float:
        """GPU-seconds that generation has had since this was last asked."""
        now = self._env.now
        had_gpu_s = self._had_gpu_s + sum(now - since for since in self._since.values())
        self._had_gpu_s, self._since = 0.0, dict.fromkeys(self._since, now)
        return had_gpu_s
