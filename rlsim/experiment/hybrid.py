"""Rollout replicas on the GPUs of training (hybrid replicas): whether they fit there, and what they cost.

Between its calls training keeps what it keeps there anyway (all of its states, or nothing with `training.offload`); the
KV cache has what is left. Before a replica begins it gets the trainer's weights as the rollout engine lays them out:
the weight sync of a system whose calls all share their GPUs (`rlsim.cost.weight_sync`). While training has the GPUs the
engine sleeps: it keeps neither weights nor KV cache, and falling asleep takes no time.
"""

from __future__ import annotations

from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.refusals import planner, refuse
from rlsim.experiment.system import System
from rlsim.sim.borrowing import HybridReplicas
from rlsim.sim.control import divides_nodes
from rlsim.workflow import Call, Placement


def check_hybrid(placed: PlacedExperiment, system: System, tp: int) -> None:
    """Raises `ConfigError` if generation cannot have replicas of `tp` GPUs on those of training under this system.

    `CapacityError` if they do not fit there.
    """
    if not placed.workflow.hybrid:
        return
    _, train = _calls(placed)
    there = placed.plan.of(train.name)
    sizes = [len(gpus) for gpus in there.nodes(placed.loaded.cluster)]
    refuse(
        "borrowing",
        placed=placed,
        system=system,
        call=train,
        planner=planner(system),
        shares_gpus=placed.shares_generation(train.name),
        tp=tp,
        node_gpus=sizes[0],
        divides=divides_nodes(tp, sizes) and tp <= sum(sizes),
    )
    try:
        placed.hybrid_costs.capacity_pages(tp, placed.loaded.longest_sequence)
    except CapacityError as error:
        held = placed.ledger.staying(there.gpus)[1] / 1e9
        raise CapacityError(
            f"no rollout replica fits on the GPUs of call {train.name}, where {held:.2f} GB stay between calls: {error}"
        ) from None


def hybrid_of(placed: PlacedExperiment, tp: int) -> HybridReplicas | None:
    """The replicas of `tp` GPUs that a checked system may have on GPUs of training; None if it borrows none."""
    if not placed.workflow.hybrid:
        return None
    sync, train = _calls(placed)
    there = placed.plan.of(train.name)
    assert there.strategy is not None
    load_s = placed.colocated_sync_s(train.model, there.strategy, tp, there.gpus[0])
    mesh = Placement(there.gpus).rollout_mesh(placed.loaded.cluster, tp)
    return HybridReplicas(mesh, tp, placed.hybrid_costs, load_s, sync.name, placed.loaded.cluster.domain_of)


def _calls(placed: PlacedExperiment) -> tuple[Call, Call]:
    """The sync before generation, and the train call whose weights it brings."""
    graph = placed.workflow
    generate = next((call.name for call in graph.calls if call.kind == "generate"), None)
    edges = graph.into(generate) if generate else ()
    sync = next((graph.call(edge.source) for edge in edges if graph.call(edge.source).kind == "sync"), None)
    if sync is None:
        raise ConfigError(f"{graph.name}: no weight sync goes before generation, which could borrow GPUs of training")
    return sync, graph.call(graph.beside(sync.name)[0][0])
