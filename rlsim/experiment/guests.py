"""Training on GPUs that generation lends: what a further data-parallel replica there costs, and whether it fits.

Such a replica has all of the model (under TP and PP a replica's share on each GPU) and its gradients, but no optimizer
states, beside the weights of the rollout engine, whose KV cache is empty then. It gets the trainer's weights once a
training call, by broadcast (`rlsim.cost.reallocation`), works on its own, and its gradients are added to the others' by
one all-reduce over all replicas that there may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlsim.cost.layout import Layout
from rlsim.cost.ledger import does_not_fit
from rlsim.cost.memory import RESERVED_BYTES, call_bytes, rollout_weight_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.experiment.placed import PlacedExperiment, layout_of
from rlsim.experiment.refusals import refuse
from rlsim.sim.elastic import Guests
from rlsim.workflow import Call


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
