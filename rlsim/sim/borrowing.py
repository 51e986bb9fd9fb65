"""GPUs of training that generate while training waits for its batch.

The other direction of `rlsim.sim.elastic`: there training has replicas on GPUs of generation, here generation has
*hybrid* replicas on those of training. A control says when they come (`Borrow`) and go (`Release`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import simpy

from rlsim.sim.costs import RolloutCosts
from rlsim.sim.pool import GpuPool


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

    @property
    def size(self) -> int:
        return sum(len(gpus) // self.tp for gpus in self.mesh)


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
        return Borrowable(self.there.size, self.there.load_s)

    def take(self) -> None:
        self._pool.acquire(self._gpus, "generate", guest=True)
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
