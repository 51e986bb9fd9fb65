"""A plan: for every call the GPUs it runs on, and how it is spread over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.hardware import Cluster
from rlsim.workflow.graph import Workflow


@dataclass(frozen=True)
class Placement:
    """GPUs of one call (none: it runs on CPUs) and, for inference and training, its parallel strategy.

    How a `generate` call uses its GPUs is decided while the clock runs, by the rollout control. A call holds its GPUs
    alone unless it is `shared`: then it runs beside whatever else is on them.
    """

    gpus: tuple[int, ...]
    strategy: TrainStrategy | None = None
    shared: bool = False

    def replicas(self, gpus: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Neighbouring GPUs for every data-parallel replica of the strategy, or for replicas of so many GPUs."""
        if gpus is None:
            gpus = self.strategy.gpus // self.strategy.dp if self.strategy else 1
        return tuple(self.gpus[first : first + gpus] for first in range(0, len(self.gpus) - gpus + 1, gpus))

    def nodes(self, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
        """The placement's GPUs node by node."""
        by_node: dict[int, list[int]] = {}
        for gpu in self.gpus:
            by_node.setdefault(cluster.node_of(gpu), []).append(gpu)
        return tuple(tuple(gpus) for gpus in by_node.values())


@dataclass(frozen=True)
class Plan:
    """The placement of every call of a workflow, by call name."""

    placements: Mapping[str, Placement]

    def of(self, call: str) -> Placement:
        """The placement of a call; raises `ConfigError` if the plan has none."""
        try:
            return self.placements[call]
        except KeyError:
            raise ConfigError(f"the plan places no call {call!r}") from None


def colocated(
    workflow: Workflow,
    gpus: tuple[int, ...],
    inference: TrainStrategy,
    train: TrainStrategy,
    reward: Placement | None = None,
) -> Plan:
    """Every call on all of `gpus`, one after another; reward calls on CPUs, or where `reward` says."""
    strategies = {"inference": inference, "train": train, "sync": train}
    scored = reward or Placement(())
    return Plan(
        {
            call.name: scored if call.kind == "reward" else Placement(gpus, strategies.get(call.kind))
            for call in workflow.calls
        }
    )
