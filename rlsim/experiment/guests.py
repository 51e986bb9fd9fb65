"""GPUs that generation and training lend each other: what replicas there cost, and whether they fit.

Training on GPUs of generation: a further data-parallel replica there has all of the model (under TP and PP a replica's
share on each GPU) and its gradients, but no optimizer states, beside the weights of the rollout engine, whose KV cache
is empty then. It gets the trainer's weights once a training call, by broadcast (`rlsim.cost.reallocation`), works on
its own, and its gradients are added to the others' by one all-reduce over all replicas that there may be.

Rollout on GPUs of training (hybrid replicas): between its calls training keeps what it keeps there anyway (all of its
states, or nothing with `training.offload`); the KV cache has what is left. Before a replica begins it gets the
trainer's weights as the rollout engine lays them out: the weight sync of a system whose calls all share their GPUs
(`rlsim.cost.weight_sync`). While training has the GPUs the engine sleeps: it keeps neither weights nor KV cache, and
falling asleep takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsim.cost.layout import Layout
from rlsim.cost.ledger import does_not_fit
from rlsim.cost.memory import RESERVED_BYTES, call_bytes, rollout_weight_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.placed import PlacedExperiment, layout_of
from rlsim.experiment.refusals import planner
from rlsim.experiment.systems import System
from rlsim.refusals import refuse
from rlsim.sim.borrowing import HybridReplicas
from rlsim.sim.control import divides_nodes
from rlsim.sim.elastic import Guests
from rlsim.workflow import Call, Placement


def check_elastic(placed: PlacedExperiment, tp: int) -> None:
    """Raises `ConfigError` if generation's GPUs cannot help training, `CapacityError` if its states do not fit there.

    `tp`: GPUs of a rollout replica, whose weights stay there.
    """
    if not placed.workflow.elastic:
        return
    rollout, loaded = placed.generation, placed.loaded
    calls = [call for call in placed.workflow.calls if call.kind == "train"]
    memory = []
    for call in calls:
        there = placed.plan.of(call.name)
        own = there.strategy
        assert own is not None
        replica_gpus = own.gpus // own.dp
        refuse(
            "lending",
            placed=placed,
            call=call,
            there=there,
            strategy=own,
            stage_gpus=own.tp * own.cp,
            replica_gpus=replica_gpus,
            rollout_gpus=len(rollout.gpus),
            shares_gpus=placed.shares_generation(call.name),
            replicas=_replicas(placed, replica_gpus),
        )
        strategy = _guest_strategy(own)
        tokens = placed.memory.micro_batch_tokens(call, strategy)
        memory.append(call_bytes(loaded.models[call.model], strategy, tokens, backward=True))
    planned = rollout.strategy
    degrees = (tp, 1) if planned is None else (planned.tp, planned.pp)
    parts = {
        "weights": sum(one["parameters"] for one in memory),  # of all that are trained at a time
        "gradients": sum(one["gradients"] for one in memory),
        "activations and logits": max(one["activations"] + one["logits"] for one in memory),
        "the rollout engine's weights": rollout_weight_bytes(loaded.model, *degrees, loaded.replica),
        "context and communication": RESERVED_BYTES,
    }
    gpu = loaded.cluster.gpu_at(rollout.gpus[0])
    if sum(parts.values()) > gpu.memory_bytes:
        what = f"the states of {', '.join(call.name for call in calls)} do not fit on a GPU that generation lends"
        raise does_not_fit(what, parts, gpu.memory_bytes, f"of {gpu.name}")


def _guest_strategy(strategy: TrainStrategy) -> TrainStrategy:
    """Of one data-parallel replica alone."""
    return replace(strategy, dp=1, zero_stage=0, shard_gpus=None, offload=False)


def _replicas(placed: PlacedExperiment, size: int) -> list[tuple[int, ...]]:
    """Neighbouring GPUs of generation for each replica of this size, on no more nodes than it needs."""
    cluster = placed.loaded.cluster
    most = -(-size // cluster.gpus_per_node)
    return [gpus for gpus in placed.generation.replicas(size) if len({cluster.node_of(gpu) for gpu in gpus}) <= most]


def guests_of(placed: PlacedExperiment, call: Call, tokens: int) -> Guests:
    """The replicas of a training call on the GPUs of generation, in parts of so many tokens."""
    training, rollout, calls = placed.plan.of(call.name), placed.generation, placed.calls_on(placed.generation.gpus)
    own = training.strategy
    assert own is not None
    strategy = _guest_strategy(own)
    replicas = _replicas(placed, strategy.gpus)
    cost = calls.of(call.model, strategy, rollout.gpus[0])
    there = Layout.of(rollout.gpus[0], replace(strategy, dp=len(replicas)))
    load_s = calls.reallocation(call.model, calls).time_s(layout_of(training), there)
    together = replace(strategy, dp=own.dp + len(replicas))
    reduce_s = calls.of(call.model, together, min(rollout.gpus + training.gpus)).update_time().communication_s
    rate = tokens / cost.part_time([tokens], backward=True).total_s  # of one replica, in tokens a second

    def part(lengths: Sequence[int]) -> list[tuple[str, float]]:
        return cost.part_time(lengths, backward=True).named

    return Guests(replicas, part, load_s, own.dp * rate, reduce_s)


# ---- rollout on GPUs of training ------------------------------------------------------------------------------------


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
