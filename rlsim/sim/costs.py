"""What the engine asks of the machine that generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from rlsim.cost.step import StepCost
from rlsim.cost.transfer import IN_PLACE, HostKv, SwitchCost, SwitchWay

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
