"""One model on one cluster under one calibration: everything the clock needs to ask about time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

import numpy.typing as npt

from rlsim.cost.calibration import Calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.lookups import Lookups
from rlsim.cost.memory import check_training, kv_page_bytes, resident_bytes, rollout_memory
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import StepCost
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost, TrainEfficiency, TrainTime
from rlsim.cost.transfer import (
    SwitchCost,
    captured_batch_sizes,
    kv_migrate_s,
    kv_send_s,
    reshard_s,
    weight_sync_s,
)
from rlsim.errors import CapacityError, ConfigError
from rlsim.hardware import Cluster
from rlsim.models import Model


class Machine:
    """Times and sizes of rollout, inference, training and weight movement. Pure: the same question has the same answer.

    `train` is the training strategy and `inference` that of log-prob passes; `backend` names the training framework
    whose efficiency the calibration gives, unless `train_efficiency` (share of the peak) does. `page_tokens`,
    `max_batched_tokens` and `max_sequences` are the engine's, `memory_utilization` the share of GPU memory it may use;
    training states that are not offloaded stay resident beside it, as do `beside_bytes` of others on each GPU.

    Raises `CapacityError` if training does not fit, `ConfigError` for a strategy that the model or cluster does not
    allow.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        calibration: Calibration,
        *,
        train: TrainStrategy,
        inference: TrainStrategy,
        backend: str,
        train_efficiency: float | None = None,
        page_tokens: int = 16,
        max_batched_tokens: int = 8192,
        max_sequences: int = 1024,
        memory_utilization: float = 0.9,
        beside_bytes: float = 0.0,
    ) -> None:
        known = calibration.training.flop_efficiency
        if backend not in known:
            raise ConfigError(
                f"calibration {calibration.name} has no training backend {backend!r}; it has: {', '.join(known)}"
            )
        check_training(model, cluster.gpu, train, beside_bytes=beside_bytes)
        self.model, self.cluster, self.calibration = model, cluster, calibration
        self.page_tokens = page_tokens
        self._collectives = Collectives(calibration.collectives, calibration.reference, cluster)
        self.train_strategy = train
        efficiency = TrainEfficiency(flop=train_efficiency or known[backend])
        self._train = TrainCost(model, cluster, self._collectives, train, efficiency)
        self._forward = TrainCost(model, cluster, self._collectives, inference, efficiency)
        self._beside_bytes = beside_bytes
        self._limits = (memory_utilization, max_batched_tokens, max_sequences)
        self._steps: list[StepCost] = []
        self.step = cache(self._step)
        self.capacity_pages = cache(self._capacity_pages)

    def lookups(self) -> Lookups:
        """The shapes asked for so far, by operator and by how far they rest on measurements."""
        return self._collectives.lookups.merge(step.lookups() for step in self._steps)

    # Rollout ----------------------------------------------------------------------------------------------------------

    def _step(self, tp: int) -> StepCost:
        step = step_cost(self.model, tp, self.cluster, self.calibration)
        self._steps.append(step)
        return step

    def _capacity_pages(self, tp: int, min_tokens: int = 1) -> int:
        """KV pages of a replica at `tp`; raises `CapacityError` if it cannot hold `min_tokens`."""
        utilization, batched, sequences = self._limits
        return rollout_memory(
            self.model,
            self.cluster.gpu,
            tp,
            page_tokens=self.page_tokens,
            memory_utilization=utilization,
            max_batched_tokens=batched,
            max_sequences=sequences,
            resident_bytes=resident_bytes(self.model, self.train_strategy) + self._beside_bytes,
            min_tokens=min_tokens,
        ).pages

    def feasible_tps(self, sequence_tokens: int) -> tuple[tuple[int, ...], dict[int, str]]:
        """Power-of-two degrees in a node whose replica holds one sequence of so many tokens; the others and why not."""
        feasible, infeasible = [], {}
        for tp in _degrees(self.cluster.gpus_per_node):
            try:
                self.capacity_pages(tp, sequence_tokens)
                feasible.append(tp)
            except (CapacityError, ConfigError) as error:
                infeasible[tp] = str(error)
        return tuple(feasible), infeasible

    def switch(
        self, from_tp: int, to_tp: int, contexts: Sequence[int], sequences: int, kv: str, first_use: bool
    ) -> SwitchCost:
        """Pause of a node that goes to another TP with `sequences` unfinished requests, some holding `contexts` of KV.

        Weights are resharded layer by layer. KV migrates (`kv` = "migrate") inside groups of max(from, to) GPUs side by
        side, each moving its share, or is left to be recomputed by the engine (then it costs nothing here). Decode
        graphs are captured for the batch sizes up to a target replica's share of the requests only. Communication
        groups are created at their first use.
        """
        runtime, gpus = self.calibration.runtime, self.cluster.gpus_per_node
        graphs = captured_batch_sizes(max(math.ceil(sequences * to_tp / gpus), 1), runtime.graph_batch_sizes)
        moved_s = 0.0
        if kv == "migrate":
            share = sum(contexts) * max(from_tp, to_tp) / gpus
            moved_s = kv_migrate_s(self.model, self._collectives, share, from_tp, to_tp, runtime.migrate_bytes_per_s)
        return SwitchCost(
            weights_s=reshard_s(self.model, self._collectives, from_tp, to_tp, runtime.reshard_bytes_per_s),
            kv_s=moved_s,
            graph_s=runtime.graph_capture_s * len(graphs),
            control_s=runtime.switch_control_s + (runtime.group_create_s if first_use else 0.0),
        )

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:
        """Seconds to move the KV of these contexts from one replica to another: every rank sends its heads.

        At the measured rate of a migrating rank where the calibration has one, else as NCCL's send and receive.
        """
        tp = min(from_tp, to_tp)
        rate = self.calibration.runtime.migrate_bytes_per_s
        if same_node and rate is not None:
            return kv_send_s(self.model, self.cluster.intra, float(sum(contexts)), tp, rate)
        per_rank = kv_page_bytes(self.model, tp, 1) * sum(contexts)
        return self._collectives.time_s("send_recv", per_rank, 2, 1 if same_node else 2) if per_rank else 0.0

    # Inference, training, weights -------------------------------------------------------------------------------------

    def inference_time(self, lengths: npt.ArrayLike) -> TrainTime:
        """A log-prob pass over sequences of these lengths (prompt and response tokens)."""
        return self._forward.forward_s(lengths)

    def train_time(self, lengths: npt.ArrayLike, mini_batches: int, epochs: int) -> TrainTime:
        """A training call over sequences of these lengths."""
        return self._train.train_s(lengths, mini_batches, epochs)

    def part_time(self, lengths: npt.ArrayLike, *, backward: bool) -> TrainTime:
        """One replica's share of a call: gradients of some sequences without the update (`backward`), or log-probs."""
        return (self._train if backward else self._forward).part_time(lengths, backward=backward)

    def update_time(self) -> TrainTime:
        """Reduction of the gradients and update, after the parts."""
        return self._train.update_time()

    def load_s(self, *, backward: bool) -> float:
        """One way between host memory and GPU, of what a training (`backward`) or inference call needs."""
        return (self._train if backward else self._forward).load_s(backward=backward)

    def sync_s(self, rollout_tp: int) -> float:
        """Seconds to bring the updated weights from the training layout to the rollout's."""
        return weight_sync_s(self.model, self._collectives, self.cluster, self.train_strategy, rollout_tp)


def _degrees(gpus: int) -> Iterable[int]:
    return (1 << i for i in range(gpus.bit_length()) if gpus % (1 << i) == 0)
