"""Durations of an experiment's calls, as the engine asks for them, and of replicas on GPUs that are lent.

Generation and training lend each other GPUs.

Training on GPUs of generation: a further data-parallel replica there has all of the model (under TP and PP a replica's
share on each GPU) and its gradients, but no optimizer states, beside the weights of the rollout engine, whose KV cache
is empty then. It gets the trainer's weights once a training call, by broadcast (`rlsim.cost.reallocation`), works on
its own, and its gradients are added to the others' by one all-reduce over all replicas that there may be.

Rollout on GPUs of training (hybrid replicas): between its calls training keeps what it keeps there anyway (all of its
states, or nothing with `training.offload`); the KV cache has what is left. Before a replica begins it gets the
trainer's weights as the rollout engine lays them out: the weight sync of a system whose calls all share their GPUs
(`rlsim.cost.weight_sync`). While training has the GPUs the engine sleeps: it keeps neither weights nor KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rlsim.base.refusals import refuse
from rlsim.cost.layout import Layout
from rlsim.cost.ledger import does_not_fit
from rlsim.cost.memory import RESERVED_BYTES, call_bytes, rollout_weight_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainTime
from rlsim.cost.transfer import host_copy_s
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.placed import PlacedExperiment, layout_of
from rlsim.experiment.refusals import planner
from rlsim.experiment.systems import System
from rlsim.sim.control import divides_nodes
from rlsim.sim.elastic import Guests, Pieces
from rlsim.sim.gpus import HybridReplicas
from rlsim.sim.request import Request
from rlsim.sim.simulation import Relay
from rlsim.workflow import Call, Placement
from rlsim.workflow.graph import CallKind
from rlsim.workflow.plan import same_weights


def handed_on_bytes(kind: CallKind, tokens: float) -> float:
    """Bytes that a call of this kind hands on for so many tokens: token numbers (int64) and log-probs (fp32) of
    generation, fp32 numbers of inference."""
    return (12 if kind == "generate" else 4) * tokens


class ExperimentTimes:
    """The `CallTimes` of a system with its plan."""

    def __init__(self, placed: PlacedExperiment) -> None:
        self._placed, self._workflow, self._training = placed, placed.workflow, placed.loaded.experiment.training

    def parts(
        self, call: Call, placement: Placement, samples: Sequence[Request], rollout_tp: int, windows: int = 1
    ) -> list[tuple[str, float]]:
        if call.kind == "sync":
            return [("weights", self._weights_s(call, rollout_tp))]
        return self.of_lengths(call, placement, self.lengths(samples), rollout_tp, windows)

    def of_lengths(
        self, call: Call, placement: Placement, lengths: npt.NDArray[np.int64], rollout_tp: int, windows: int = 1
    ) -> list[tuple[str, float]]:
        """The parts of a training or inference call on sequences of these lengths (tokens)."""
        time, driver_s = self.alone(call, placement, lengths, windows)
        data_s = self._data_s(call, float(lengths.sum()), rollout_tp) + driver_s
        return [*time.named, *([("data", data_s)] if data_s else ())]

    def alone(
        self, call: Call, placement: Placement, lengths: npt.NDArray[np.int64], windows: int = 1
    ) -> tuple[TrainTime, float]:
        """The same without the way of its data: on its GPUs, and the driver's seconds."""
        calls = self._placed.calls_on(placement.gpus)
        cost = calls.of(call.model, placement.spread, placement.gpus[0])
        if call.kind == "train":
            time = cost.train_s(lengths, self._training.mini_batches // windows, self._placed.epochs_of(call))
            time *= self._placed.trained_along(call)
        else:
            time = cost.forward_s(lengths)
        padded = len(lengths) * self._placed.loaded.longest_sequence
        return time, self._training.driver_per_token * padded + calls.call_s

    def lengths(self, samples: Sequence[Request]) -> npt.NDArray[np.int64]:
        """Tokens of the sequences that are trained on: of a response, or of each of its turns what it ends with."""
        if self._training.sequences == "responses":
            return np.fromiter((r.prompt_tokens + r.generated for r in samples), np.int64, len(samples))
        turns = [[*(call.after_tokens for call in r.tool_calls[: r.called]), r.generated] for r in samples]
        return np.array(
            [r.prompt_tokens + end for r, ends in zip(samples, turns, strict=True) for end in ends], np.int64
        )

    def pieces(self, call: Call) -> Pieces:
        placement = self._placed.plan.of(call.name)
        strategy = placement.spread
        cost = self._placed.calls_on(placement.gpus).of(call.model, strategy, placement.gpus[0])
        train = call.kind == "train"
        longer = self._placed.trained_along(call) if train else 1.0
        # Every part fills and drains the pipeline: with several times as many micro-batches as stages that is little.
        each, mean_tokens = strategy.sequences(backward=train), self._placed.loaded.batch.mean_tokens
        tokens = round(each * mean_tokens) if each else strategy.budget(backward=train)
        tokens *= 1 if strategy.pp == 1 else 4 * strategy.pp
        weights_s, load_s = (cost.copied_s(backward=backward, out=False) for backward in (False, train))
        unload_s, swap_s, gradients_s = cost.copied_s(backward=train, out=True), 0.0, 0.0
        if train and self._workflow.host_gradients:
            gradients = call_bytes(cost.model, strategy, backward=True)["gradients"]
            gradients_s = host_copy_s(gradients, cost.cluster.host)
            unload_s += load_s - weights_s  # the optimizer's states come in for the update
            load_s = weights_s
        if self._workflow.swaps:
            load_s, swap_s = load_s - weights_s, weights_s
            unload_s *= train  # host memory still has weights that nobody changes
        finish = [*(cost.update_time().named if train else ()), *([("offload", unload_s)] if unload_s else ())]
        guests = guests_of(self._placed, call, tokens) if train and self._workflow.elastic else None
        return Pieces(
            lambda lengths: (cost.part_time(lengths, backward=train) * longer).named,
            *(tokens, load_s, finish, guests, swap_s, gradients_s),
        )

    def relay(self, call: Call) -> Relay:
        placed, (source, *_) = self._placed, self._workflow.beside(call.name)[0]
        training, rollout = placed.plan.of(source), placed.generation
        sync = placed.weight_sync(call.model, training, rollout.gpus, "bucketed")  # each replica takes them alone
        start, pp = layout_of(training), placed.rollout_pp
        return Relay(sync.push_s(start), sync.spread_s(start, layout_of(rollout)), lambda tp: sync.pull_s(tp // pp, pp))

    def _weights_s(self, call: Call, rollout_tp: int) -> float:
        """New weights on their way from a training call to the other calls of the model, one after the other."""
        sources, targets = self._workflow.beside(call.name)
        plan, source = self._placed.plan, self._placed.plan.of(sources[0])
        total = 0.0
        engines = {plan.of(name): name for name in targets if self._workflow.call(name).kind == "generate"}
        for name in [name for name in targets if engines.get(plan.of(name), name) == name]:  # an engine's come once
            target = plan.of(name)
            if target.strategy is None and (target.gpus == source.gpus or self._placed.placing is None):
                total += self._placed.colocated_sync_s(call.model, source.spread, rollout_tp, source.gpus[0])
            elif self._placed.loads(name) or not same_weights(source, target):
                both = (layout_of(one, rollout_tp, self._placed.rollout_pp) for one in (source, target))
                total += self._placed.moving(call.model, source, name, target)(*both)
            total += self._placed.asleep_s(name)
        return total

    def _data_s(self, call: Call, tokens: float, rollout_tp: int) -> float:
        """What the calls before it have made on its way to this call; nothing to speak of where all are colocated."""
        if self._placed.placing is None:
            return 0.0
        target, total, pp = self._placed.plan.of(call.name), 0.0, self._placed.rollout_pp
        receiver, to = self._placed.calls_on(target.gpus), layout_of(target, rollout_tp, pp)
        for edge in self._workflow.into(call.name):
            source = self._placed.plan.of(edge.source)
            kind = self._workflow.call(edge.source).kind
            carries = edge.lag == 0 and not edge.barrier and kind != "reward"  # a reward is one number a response
            if carries and source.gpus:
                data = self._placed.calls_on(source.gpus).data(receiver)
                total += data.time_s(handed_on_bytes(kind, tokens), layout_of(source, rollout_tp, pp), to)
        return total


# ---- training on GPUs of generation ---------------------------------------------------------------------------------


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
        own = there.spread
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
        "a micro-batch": max(sum(one.values()) - one["parameters"] - one["gradients"] for one in memory),
        "the rollout engine's weights": rollout_weight_bytes(loaded.model, *degrees, loaded.replica),
        "context and communication": RESERVED_BYTES,
    }
    gpu = loaded.cluster.gpu_at(rollout.gpus[0])
    if sum(parts.values()) > gpu.memory_bytes:
        what = f"the states of {', '.join(call.name for call in calls)} do not fit on a GPU that generation lends"
        raise does_not_fit(what, parts, gpu.memory_bytes, f"of {gpu.name}")


def _guest_strategy(strategy: TrainStrategy) -> TrainStrategy:
    """The strategy of one data-parallel replica alone, which has no optimizer."""
    return replace(strategy, dp=1, shard_gpus=None, offload=False, cpu_optimizer=1.0)


def _replicas(placed: PlacedExperiment, size: int) -> list[tuple[int, ...]]:
    """Neighbouring GPUs of generation for each replica of this size, on no more nodes than it needs."""
    cluster = placed.loaded.cluster
    most = -(-size // cluster.gpus_per_node)
    return [gpus for gpus in placed.generation.replicas(size) if len({cluster.node_of(gpu) for gpu in gpus}) <= most]


def guests_of(placed: PlacedExperiment, call: Call, tokens: int) -> Guests:
    """The replicas of a training call on the GPUs of generation, in parts of so many tokens."""
    training, rollout, calls = placed.plan.of(call.name), placed.generation, placed.calls_on(placed.generation.gpus)
    own = training.spread
    strategy = _guest_strategy(own)
    replicas = _replicas(placed, strategy.gpus)
    cost = calls.of(call.model, strategy, rollout.gpus[0])
    there = Layout.of(rollout.gpus[0], replace(strategy, dp=len(replicas), zero_stage=0))
    load_s = calls.reallocation(call.model, calls).time_s(layout_of(training), there)
    together = replace(strategy, dp=own.dp + len(replicas), zero_stage=0)
    reduce_s = calls.of(call.model, together, min(rollout.gpus + training.gpus)).update_time().communication_s
    longer = placed.trained_along(call)
    rate = tokens / (cost.part_time([tokens], backward=True) * longer).total_s  # of one replica, in tokens a second
    return Guests(
        replicas,
        lambda lengths: (cost.part_time(lengths, backward=True) * longer).named,
        load_s,
        own.dp * rate,
        reduce_s,
    )


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
    load_s = placed.colocated_sync_s(train.model, there.spread, tp, there.gpus[0])
    load_s += placed.remapped_s(placed.call.name, None, there.gpus[0])
    mesh = Placement(there.gpus).rollout_mesh(placed.loaded.cluster, tp)
    return HybridReplicas(mesh, tp, placed.hybrid_costs, load_s, sync.name, placed.loaded.cluster.domain_of)


def _calls(placed: PlacedExperiment) -> tuple[Call, Call]:
    """The sync before generation, and the train call whose weights it brings."""
    graph = placed.workflow
    edges = [edge for call in graph.generating for edge in graph.into(call.name)]
    sync = next((graph.call(edge.source) for edge in edges if graph.call(edge.source).kind == "sync"), None)
    if sync is None:
        raise ConfigError(f"{graph.name}: no weight sync goes before generation, which could borrow GPUs of training")
    return sync, graph.call(graph.beside(sync.name)[0][0])
