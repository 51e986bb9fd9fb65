"""Rollout replicas on the GPUs of training (hybrid replicas): whether they fit there, and what they cost.

Between its calls training keeps what it keeps there anyway (all of its states, or nothing with `training.offload`); the
KV cache has what is left. Before a replica begins it gets the trainer's weights as the rollout engine lays them out:
the weight sync of a system whose calls all share their GPUs (`rlsim.cost.weight_sync`). While training has the GPUs the
engine sleeps: it keeps neither weights nor KV cache, and falling asleep takes no time.
"""

from __future__ import annotations

from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.system import System
from rlsim.sim.borrowing import HybridReplicas
from rlsim.sim.control import Controls, RolloutControl, divides_nodes
from rlsim.workflow import Call, Placement


def check_hybrid(placed: PlacedExperiment, system: System, tp: int) -> None:
    """Raises `ConfigError` if generation cannot have replicas of `tp` GPUs on those of training under this system.

    `CapacityError` if they do not fit there.
    """
    if not placed.workflow.hybrid:
        return
    for part in system.control.parts if isinstance(system.control, Controls) else (system.control,):
        if type(part).next_tp is not RolloutControl.next_tp:
            raise ConfigError(
                f"{type(part).__name__} plans another layout for the next rollout; replicas on GPUs of training have "
                "the one that the run begins with: leave one of the two out"
            )
    if system.judge and placed.loaded.scoring.judged.any():
        raise ConfigError(
            "a judge beside the other calls works on GPUs of training too, and what it costs a rollout replica there "
            "is not known: leave out colocated_judge, and the judge has GPUs of its own"
        )
    _, train = _calls(placed)
    there = placed.plan.of(train.name)
    if not set(there.gpus).isdisjoint(placed.generation.gpus):
        raise ConfigError(
            f"call {train.name} and generation share GPUs, so that there are none to borrow: add `split`, or a plan, "
            "that gives generation GPUs of its own"
        )
    if placed.rollout_pp > 1:
        raise ConfigError("replicas on GPUs of training have TP only: leave out engine.pp, or pp in generation's plan")
    sizes = [len(gpus) for gpus in there.nodes(placed.loaded.cluster)]
    if not divides_nodes(tp, sizes) or tp > sum(sizes):
        raise ConfigError(
            f"replicas of {tp} GPUs, as generation has them, do not divide the {sizes[0]} GPUs of a node that "
            f"{train.name} has: choose a tp that divides both"
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
