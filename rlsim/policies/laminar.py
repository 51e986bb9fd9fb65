"""Laminar (Sheng et al. 2025): every replica works through prompts of its own, and takes new weights when it is free.

The trainer puts new weights into host memory, from where relays bring them to all nodes, and goes on. A replica
generates a batch of prompts to its end, takes the newest weights that are there, and begins the next batch. So
one version of the weights generates a response, and nobody waits for anybody. Where few responses are left on a
replica, *repack* moves them to another one with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, PrivateAttr

from rlsim.policies.continuous import BoundedStaleness
from rlsim.policies.parts import Informed
from rlsim.policies.rlhfuse import memory_bound_batch
from rlsim.sim.actions import Migrate
from rlsim.sim.continuous import OpenView
from rlsim.sim.control import Action, KvHandling, ReplicaView, RolloutView
from rlsim.units import Seconds

#: At the ridge of the roofline a decode step computes for as long as it reads the weights: it takes twice as long.
RIDGE = 2.0


class ReplicaBatches(BoundedStaleness):
    """A replica that has nothing left takes the newest weights, and then so many prompts; bounded as its base is."""

    per_replica: int | None = Field(default=None, ge=1)
    interrupt: bool = False
    rolling: bool = True

    def room(self, view: OpenView) -> Mapping[int, int]:
        left, each = self.left(view), self.per_replica or max(view.prompts // view.replicas, 1)
        rooms = {}
        for replica in view.free:
            rooms[replica] = min(each, left)
            left -= rooms[replica]
        return rooms


class Repack(Informed):
    """Move the last responses of replicas together, onto others with the same weights, so that these become free.

    A replica ends its batch once its KV cache is used less than it was, and none of its responses waits. What is left
    there moves to the fullest replica that ends too, has room for it (best fit), and is still bound by reading the
    weights then.
    """

    utilization: float = Field(default=0.9, gt=0, le=1)
    max_batch: int | Literal["auto"] = "auto"
    every: Seconds = Field(default=5.0, ge=0, le=86_400)
    kv: KvHandling = "recompute"

    #: By replica: its responses when last seen, and the most tokens of KV cache seen since others began there.
    _seen: dict[int, tuple[frozenset[int], int]] = PrivateAttr(default_factory=dict)

    @property
    def every_s(self) -> float | None:
        return self.every or None

    def on_finish(self, view: RolloutView) -> list[Action]:
        """See how much each replica holds."""
        if not self.every:
            return self.on_timer(view)
        for node in view.finished_nodes:
            self._see(view.replicas(node))
        return []

    def _see(self, replicas: Sequence[ReplicaView]) -> dict[int, int]:
        """By replica that has responses: the tokens of KV cache that they have, or are to have."""
        used = {r.index: sum(one.context_tokens for one in r.requests) for r in replicas if r.requests}
        for replica in replicas:
            ids = frozenset(r.id for r in replica.requests)
            known, most = self._seen.get(replica.index, (ids, 0))
            self._seen[replica.index] = ids, max(used.get(replica.index, 0), most if ids <= known else 0)
        return used

    def on_timer(self, view: RolloutView) -> list[Action]:
        """Each replica that ends, the emptiest first, to the fullest that can take what it has."""
        replicas = view.replicas()
        used = self._see(replicas)
        ending = [
            r
            for r in replicas
            if r.requests and used[r.index] < self._seen[r.index][1] and all(one.has_kv for one in r.requests)
        ]
        held, receiving = {r.index: len(r.requests) for r in ending}, set[int]()
        moves: list[Action] = []
        for source in sorted(ending, key=lambda r: used[r.index]):
            fits = [to for to in ending if to is not source and held[to.index] and self._fits(source, to, used, held)]
            if fits and source.index not in receiving:
                to = max(fits, key=lambda r: used[r.index]).index
                receiving.add(to)
                used[to] += used[source.index]
                held[to] += held[source.index]
                held[source.index] = 0
                known, most = self._seen[to]
                self._seen[to] = known | self._seen[source.index][0], most + used[source.index]
                moves.append(Migrate(tuple(r.id for r in source.requests), to, self.kv))
        return moves

    def _fits(self, source: ReplicaView, to: ReplicaView, used: Mapping[int, int], held: Mapping[int, int]) -> bool:
        room = self.utilization * self._context.costs.capacity_pages(to.tp) * self._context.page_tokens
        most = memory_bound_batch(self._context, to.tp, 1, RIDGE) if self.max_batch == "auto" else self.max_batch
        together = held[source.index] + held[to.index]
        return source.version == to.version and together <= most and used[source.index] + used[to.index] <= room
