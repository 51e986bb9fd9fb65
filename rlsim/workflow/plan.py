"""A plan: for every call the GPUs it runs on, and how it is spread over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.models.hardware import AnyCluster
from rlsim.workflow.graph import Call, Workflow


@dataclass(frozen=True)
class Placement:
    """GPUs of one call (none: it runs on CPUs, or there is nothing to do) and its parallel strategy.

    A `generate` call without a strategy uses its GPUs as the rollout control decides while the clock runs. A call holds
    its GPUs alone unless it is `shared`: then it runs beside whatever else is on them. `memory_share`: of each GPU's
    memory, what a `generate` call's engine takes while it runs (default: what others leave). `graphs`: whether that
    engine decodes from CUDA graphs, if the experiment's engines do.
    """

    gpus: tuple[int, ...]
    strategy: TrainStrategy | None = None
    shared: bool = False
    memory_share: float | None = None
    graphs: bool = True

    @property
    def spread(self) -> TrainStrategy:
        """The strategy of a call that has one, as all on GPUs have but those that the rollout control lays out."""
        assert self.strategy is not None
        return self.strategy

    @property
    def tp(self) -> int:
        """GPUs of a tensor-parallel group; 1 where the rollout control says it."""
        return self.strategy.tp if self.strategy else 1

    @property
    def micro_batches(self) -> int:
        """Of a `generate` call: parts of each replica's share that it generates one after the other."""
        return (self.strategy and self.strategy.micro_batches) or 1

    def replicas(self, gpus: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Neighbouring GPUs for every data-parallel replica of the strategy, or for replicas of so many GPUs."""
        if gpus is None:
            gpus = self.strategy.gpus // self.strategy.dp if self.strategy else 1
        return tuple(self.gpus[first : first + gpus] for first in range(0, len(self.gpus) - gpus + 1, gpus))

    def rollout_mesh(self, cluster: AnyCluster, tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """The GPUs node by node, as a rollout has them; where replicas do not divide nodes, replica by replica.

        `tp`: GPUs of a replica where the plan does not say it.
        """
        replica, nodes = self.strategy.gpus // self.strategy.dp if self.strategy else tp, self.nodes(cluster)
        return self.replicas(replica) if any(len(node) % replica for node in nodes) else nodes

    def nodes(self, cluster: AnyCluster) -> tuple[tuple[int, ...], ...]:
        """The placement's GPUs node by node, or by NVLink domain where that is larger."""
        by_domain: dict[int, list[int]] = {}
        for gpu in self.gpus:
            by_domain.setdefault(cluster.domain_of(gpu), []).append(gpu)
        return tuple(tuple(gpus) for gpus in by_domain.values())


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


def grouped(
    workflow: Workflow,
    groups: Mapping[str, tuple[tuple[int, ...], TrainStrategy]],
    reward: Placement | None = None,
) -> Plan:
    """Every call on the GPUs of its group and with that group's strategy; `groups` is by call name.

    The rollout control says how generation uses its GPUs. Models that are not trained wait in host memory, if others
    are trained on their GPUs.
    """
    trained = {call.model for call in workflow.calls if call.kind == "train"}
    crowded = {gpu for call in workflow.calls if call.kind == "train" for gpu in groups[call.name][0]}
    placed: dict[str, Placement] = {}
    for call in workflow.calls:
        if call.kind == "generate":
            placed[call.name] = Placement(groups[call.name][0])
        elif call.kind not in ("reward", "sync"):
            gpus, strategy = groups[call.name]
            frozen = call.model not in trained and not crowded.isdisjoint(gpus)
            placed[call.name] = Placement(gpus, replace(strategy, offload=True) if frozen else strategy)
    return with_transfers(workflow, placed, reward)


def with_transfers(workflow: Workflow, placed: Mapping[str, Placement], reward: Placement | None = None) -> Plan:
    """A plan from the placements of its generate, inference and train calls.

    New weights go over the GPUs of the calls on both sides; where these hold the same weights there is nothing to do,
    unless an engine has to load them.
    Reward calls run on CPUs, or where `reward` says.
    """
    placements = dict(placed)
    for call in workflow.calls:
        if call.kind == "reward":
            placements[call.name] = reward or Placement(())
        elif call.kind == "sync":
            sources, targets = workflow.beside(call.name)
            source = placed[sources[0]]
            moved = [
                placed[name]
                for name in targets
                if workflow.call(name).kind == "generate" or not same_weights(source, placed[name])
            ]
            gpus = {gpu for end in (source, *moved) for gpu in end.gpus} if moved else ()
            placements[call.name] = Placement(tuple(sorted(gpus)))
    return Plan(placements)


def same_weights(one: Placement, other: Placement) -> bool:
    """Whether every GPU needs just the weights under one placement that it has under the other."""
    a, b = one.strategy, other.strategy
    if one.gpus != other.gpus or a is None or b is None:
        return False
    sharded = [s.sharded_over if s.zero_stage == 3 else 1 for s in (a, b)]
    cut = [(s.shards, s.tp, s.pp, s.expert_cut) for s in (a, b)]
    return cut[0] == cut[1] and sharded[0] == sharded[1]


def check_meshes(workflow: Workflow, plan: Plan, cluster: AnyCluster) -> None:
    """Raises `ConfigError` for a call that `check_mesh` refuses, or whose weights nothing brings."""
    trained = {call.model: plan.of(call.name) for call in workflow.calls if call.kind == "train"}
    synced = {name for call in workflow.calls if call.kind == "sync" for name in workflow.beside(call.name)[1]}
    for call in workflow.calls:
        placement = plan.of(call.name)
        check_mesh(call, placement, cluster)
        source = trained.get(call.model)
        waits = call.kind in ("generate", "inference") and call.name not in synced
        if waits and source is not None and not same_weights(source, placement):
            raise ConfigError(
                f"call {call.name} has other GPUs or another layout than training of its model, and no sync call "
                f"of workflow {workflow.name} brings it new weights"
            )


def check_mesh(call: Call, placement: Placement, cluster: AnyCluster) -> None:
    """Raises `ConfigError` for a TP group on more nodes or NVLink domains than it needs, or for a call (no sync) on
    several kinds of GPU."""
    if placement.gpus and call.kind != "sync":
        cluster.around(placement.gpus, f"call {call.name}")
    tp = placement.tp
    for group in placement.replicas(tp):
        for what, number_of, gpus in (
            ("node", cluster.node_of, cluster.gpus_per_node),
            ("NVLink domain", cluster.domain_of, cluster.domain_gpus),
        ):
            numbers = sorted(set(map(number_of, group)))
            if len(numbers) > -(-tp // gpus):
                raise ConfigError(
                    f"call {call.name} has a TP {tp} group on GPUs {group[0]}-{group[-1]}, on {what}s {numbers[0]} and "
                    f"{numbers[-1]} of {gpus} GPUs each: a TP group needs GPUs of one {what}, or all of several"
                )


def colocated(
    workflow: Workflow,
    gpus: tuple[int, ...],
    strategy: TrainStrategy,
    reward: Placement | None = None,
    generating: tuple[int, ...] | None = None,
) -> Plan:
    """Every call on all of `gpus`, one after another; reward calls on CPUs, or where `reward` says.

    `generating`: those of the GPUs that generate, if not all do.
    """
    groups = {c.name: (generating or gpus if c.kind == "generate" else gpus, strategy) for c in workflow.calls}
    return grouped(workflow, groups, reward)
