"""A rollout engine: one model on one cluster under one calibration; what the clock asks about time and memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

from rlsim.cost.calibration import Calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.layout import PLAIN, ReplicaLayout
from rlsim.cost.memory import RolloutMemory, kv_page_bytes, rollout_memory
from rlsim.cost.roofline import step_cost
from rlsim.cost.speculation import Drafts, speculative
from rlsim.cost.step import Lookups, StepCost
from rlsim.cost.transfer import (
    IN_PLACE,
    NO_HOST_KV,
    HostKv,
    SwitchCost,
    SwitchWay,
    captured_batch_sizes,
    kv_migrate_s,
    kv_send_s,
    reshard_s,
    switch_peak_bytes,
)
from rlsim.errors import CapacityError, ConfigError
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model


class RolloutCostModel:
    """Times and sizes of a rollout: decoding, prefill, KV cache, TP switches. The same question has the same answer.

    `page_tokens`, `max_batched_tokens` and `max_sequences` are the engine's, `memory_utilization` the share of GPU
    memory it may use, `resident_bytes` what others keep on each GPU meanwhile (training states, a judge). `gpus` are
    those of the cluster that generate (default: all). Every `tp` of a method counts all GPUs of a replica: with `pp`
    stages its tensor parallelism is tp / pp. Its stages lie side by side, or with `planned` as in a plan (`step_cost`).
    `layout` says what else cuts it. `kv_offloading_bytes` is host memory for the KV cache, of each GPU (0: none).
    `drafts`: what it speculates with. `running`: what else `step_cost` takes of how it runs (`largest_graph`).
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        calibration: Calibration,
        *,
        page_tokens: int = 16,
        max_batched_tokens: int = 8192,
        max_sequences: int = 1024,
        memory_utilization: float = 0.9,
        resident_bytes: float = 0.0,
        gpus: Sequence[int] | None = None,
        pp: int = 1,
        planned: bool = False,
        layout: ReplicaLayout = PLAIN,
        kv_offloading_bytes: float = 0.0,
        drafts: Drafts | None = None,
        **running: Any,
    ) -> None:
        self.model, self.cluster, self.calibration = model, cluster, calibration
        self.page_tokens = page_tokens
        self._collectives = Collectives(calibration.collectives, calibration.reference, cluster)
        self._resident_bytes = resident_bytes
        self._gpus = range(cluster.gpus) if gpus is None else gpus
        self._pp, self._planned, self._layout = pp, planned, layout
        self._running = running
        self._limits = (memory_utilization, max_batched_tokens, max_sequences)
        self._kv_offloading_bytes, self._drafts = kv_offloading_bytes, drafts
        self._steps: list[StepCost] = []
        self.step = cache(self._step)
        self.capacity_pages = cache(lambda tp, min_tokens=1: self.memory(tp, min_tokens).pages)
        self.host_kv = cache(self._host_kv)
        self.switch_bytes = cache(self._switch_bytes)

    def lookups(self) -> Lookups:
        """The shapes asked for so far, by operator and by how far they rest on measurements."""
        return self._collectives.lookups.merge(step.lookups() for step in self._steps)

    def _step(self, tp: int) -> StepCost:
        step = (step_cost if self._drafts is None else partial(speculative, drafts=self._drafts))(
            self.model,
            self._stage_tp(tp),
            self.cluster,
            self.calibration,
            self._layout,
            pp=self._pp,
            dp=max(len(self._gpus) // tp, 1) if self._planned else 1,
            first_gpu=self._gpus[0],
            **self._running,
        )
        self._steps.append(step)
        return step

    def _stage_tp(self, tp: int) -> int:
        """GPUs of each stage; raises `ConfigError` if the stages do not share a replica's evenly."""
        if tp < 1:
            raise ConfigError(f"a replica has 1 GPU or more, not {tp}")
        if tp % self._pp:
            raise ConfigError(f"engine.pp {self._pp} does not divide the {tp} GPUs of a replica")
        return tp // self._pp

    def memory(self, tp: int, min_tokens: int = 1) -> RolloutMemory:
        """What a replica at `tp` keeps on each GPU, and its KV pages (`capacity_pages`); raises `CapacityError` if it
        cannot hold `min_tokens`."""
        utilization, batched, sequences = self._limits
        return rollout_memory(
            self.model,
            self.cluster.gpu,
            self._stage_tp(tp),
            pp=self._pp,
            layout=self._layout,
            page_tokens=self.page_tokens,
            memory_utilization=utilization,
            max_batched_tokens=batched,
            max_sequences=sequences,
            rule=self.calibration.memory_rule,
            nvlink=self.cluster.nvlink,
            resident_bytes=self._resident_bytes,
            min_tokens=min_tokens,
            draft_bytes=self._drafts.memory(self._stage_tp(tp), self._layout) if self._drafts else (0.0, 0.0),
        )

    def _switch_bytes(self, from_tp: int, to_tp: int, way: SwitchWay) -> tuple[float, float, float]:
        """Of a switch, on a GPU: `switch_peak_bytes` without KV, and by token; by how much the KV pool grows."""
        none, one = (switch_peak_bytes(self.model, tokens, from_tp, to_tp, way) for tokens in (0, 1))
        pages = {tp: kv_page_bytes(self.model, tp, self.page_tokens) for tp in (from_tp, to_tp)}
        old, new = (self.capacity_pages(tp) * page for tp, page in pages.items())
        return none, one - none, new - old

    def share_for(self, tp: int, pages: float) -> float:
        """The `memory_utilization` with which each group of a replica at `tp` has so many KV pages, be it above 1."""
        memory, rule = self.memory(tp, min_tokens=-sys.maxsize), self.calibration.memory_rule
        engine = memory.weight_bytes, memory.activation_bytes, memory.reserved_bytes, self._resident_bytes
        return rule.share_for(pages * memory.page_bytes, self.cluster.gpu.memory_bytes, *engine)

    def _host_kv(self, tp: int) -> HostKv:
        if not self._kv_offloading_bytes:
            return NO_HOST_KV
        own, groups = self._layout.attention_tp(self._stage_tp(tp)), self._layout.attention_dp
        page_bytes = kv_page_bytes(self.model, own, self.page_tokens, self._pp) / groups
        pages, host = math.floor(self._kv_offloading_bytes / page_bytes), self.cluster.host
        page_s = page_bytes * host.shared_by_gpus / host.bytes_per_s
        return HostKv(max(pages - self.capacity_pages(tp), 0), host.latency_s, page_s)

    def feasible_tps(
        self, sequence_tokens: int, degrees: Iterable[int] | None = None
    ) -> tuple[tuple[int, ...], dict[int, str]]:
        """Degrees whose replica holds one sequence of so many tokens; the others and why not.

        Of `degrees`, by default the powers of two that divide a whole NVLink domain.
        """
        feasible, infeasible = [], {}
        for tp in powers_of_two(self.cluster.domain_gpus) if degrees is None else degrees:
            try:
                self.capacity_pages(tp, sequence_tokens)
                feasible.append(tp)
            except (CapacityError, ConfigError) as error:
                infeasible[tp] = str(error)
        return tuple(feasible), infeasible

    def switch(
        self,
        gpus: int,
        from_tp: int,
        to_tp: int,
        contexts: Sequence[int],
        sequences: int,
        kv: str,
        first_use: bool,
        way: SwitchWay = IN_PLACE,
    ) -> SwitchCost:
        """Pause of `gpus` GPUs of a node, going to another TP with `sequences` unfinished requests.

        Weights are resharded, or loaded again as a whole. The KV of `contexts` migrates (`kv` = "migrate") inside
        groups of max(from, to) GPUs side by side, each moving its share, or is left to be recomputed by the engine
        (then it costs nothing here). Decode graphs, where the engine has any, are captured for the batch sizes up to a
        target replica's share of the requests only, unless all that it may run at once are wanted. Communication groups
        are created at their first use; in a restart they are among what the engine's start takes. Raises `ConfigError`
        for replicas across nodes, and for those that share a model by more than TP: engines do not change such a layout
        while they run.
        """
        if not self._layout.plain or self._pp > 1 or max(from_tp, to_tp) > self.cluster.domain_gpus:
            raise ConfigError(
                f"TP {from_tp} cannot become TP {to_tp} during a run: a replica keeps its layout under engine.ep, "
                "engine.pp, engine.data_parallel_attention, and across nodes"
            )
        runtime = self.calibration.runtime
        sizes = [size for size in runtime.graph_batch_sizes if size <= self._running.get("largest_graph", math.inf)]
        largest = self._limits[2]
        if way.graphs == "tail":
            largest = min(largest, max(math.ceil(sequences * to_tp / gpus), 1))
        graphs = captured_batch_sizes(largest, sizes)
        moved_s = share = 0.0
        if kv == "migrate":
            share = self._kept_tokens(contexts) * max(from_tp, to_tp) / gpus
            moved_s = kv_migrate_s(self.model, self._collectives, share, from_tp, to_tp, runtime.migrate_bytes_per_s)
        if way.weights == "reload":
            weights_s = self.model.weight_bytes / runtime.reload_bytes_per_s
        else:
            weights_s = reshard_s(self.model, self._collectives, from_tp, to_tp, runtime.reshard_bytes_per_s)
        base_bytes, token_bytes, pool_bytes = self.switch_bytes(from_tp, to_tp, way)
        control_s = runtime.switch_control_s + (runtime.group_create_s if first_use else 0.0)
        return SwitchCost(
            weights_s=weights_s,
            kv_s=moved_s,
            graph_s=runtime.graph_capture_s * len(graphs),
            control_s=runtime.restart_s if way.restart else control_s,
            peak_bytes=base_bytes + share * token_bytes,
            pool_bytes=pool_bytes,
        )

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:
        """Seconds to move the KV of these contexts from one replica to another: every rank sends its heads.

        At the measured rate of a migrating rank where the calibration has one, else as NCCL's send and receive.
        """
        tp, pp = self._layout.attention_tp(self._stage_tp(min(from_tp, to_tp))), self._pp
        rate = self.calibration.runtime.migrate_bytes_per_s
        if same_node and rate is not None:
            return kv_send_s(self.model, self.cluster.intra, self._kept_tokens(contexts, tp), tp, rate, pp)
        per_rank = kv_page_bytes(self.model, tp, 1, pp) * self._kept_tokens(contexts, tp)
        ranks = 2 * self._stage_tp(min(from_tp, to_tp))
        return self._collectives.time_s("send_recv", per_rank, ranks, 1 if same_node else 2) if per_rank else 0.0

    def _kept_tokens(self, contexts: Sequence[int], tp: int = 1) -> float:
        """The tokens whose KV in all layers is as large as what these sequences keep on one of `tp` GPUs."""
        return self.model.sequence_bytes(*contexts, tp=tp) / kv_page_bytes(self.model, tp, 1)


def powers_of_two(gpus: int) -> list[int]:
    """Those that divide a number of GPUs, in ascending order."""
    return [1 << i for i in range(gpus.bit_length()) if gpus % (1 << i) == 0]
