"""Seconds of training and of inference (log-probability) calls over sequences of uneven length.

Sources of the formulas: FLOPs as in Megatron-LM (Narayanan et al. 2021) with the exact causal sum over every sequence;
tensor, sequence and pipeline parallelism as there and in Korthikanti et al. 2023; expert parallelism as Megatron Core
has it (Liu et al. 2025, arXiv 2504.14960; Yan et al. 2026, arXiv 2603.07685): no token is dropped, tokens go to their
experts and back by all-to-alls; ZeRO as in Rajbhandari et al. 2020 with FSDP's prefetching of one layer; micro-batching
by token budget as in veRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsim.base.refusals import refuse
from rlsim.cost.collectives import CollectiveTime, Groups
from rlsim.cost.flops import Floats, Reach, attention_work, moved_elements
from rlsim.cost.layout import Layout
from rlsim.cost.memory import BF16, FP32, layer_parts, stage_parts
from rlsim.cost.micro_batches import MicroBatches, MicroBatching
from rlsim.cost.strategy import CHUNKED_FLOP_PER_S, TrainEfficiency, TrainStrategy
from rlsim.cost.transfer import allocated_copy_s, host_copy_s
from rlsim.models.hardware import Cluster
from rlsim.models.layers import Experts, FullAttention, Layer, Recurrent
from rlsim.models.model import Model

#: FLOPs of the backward pass over those of the forward pass. Flash attention recomputes the scores on the way back:
#: five matrix products for the forward pass's two (Dao et al. 2022). A gated delta net's takes 3.1 times as long
#: (flash-linear-attention 0.5.1 on H200, 32 value heads: 1.444 and 0.472 ms; QwenLM/FlashQLA@6e5d2ea, benchmark).
BACKWARD_LINEAR = 2.0
BACKWARD_ATTENTION = 2.5
BACKWARD_CHUNKED = 3.1
BACKWARD_MEMORY = 2.0

#: Memory traffic of an Adam step per parameter: read gradient, master and two moments (16), write master and
#: moments (12) and the bf16 weight (2); clipping reads the gradient (4) and scales it in place (8).
OPTIMIZER_BYTES = 42.0

#: Host memory traffic of the same on the CPU: read gradient, master and two moments (16), write the latter three (12).
CPU_OPTIMIZER_BYTES = 28.0

#: Share of the data sheet's bandwidth that plain copies in memory reach (additions: see `TrainEfficiency.memory`).
COPY_SHARE = 0.9

#: Memory traffic per logit and pass: bf16 logits (4), an fp32 copy (8), log-softmax (4).
LOGIT_BYTES = 16.0


@dataclass(frozen=True)
class TrainTime:
    """Seconds of one call; the parts add up to `total_s`.

    `compute_s` is the mean over data-parallel ranks (of the slowest pipeline stage), `imbalance_s` what they wait for
    the slowest rank, `communication_s` collectives that compute does not hide, `sends_s` what pipeline stages send from
    one to the next, `bubble_s` the pipeline's fill and drain.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0
    optimizer_s: float = 0.0
    offload_s: float = 0.0
    imbalance_s: float = 0.0
    sends_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The call from start to end."""
        work = self.compute_s + self.communication_s + self.bubble_s
        return work + self.sends_s + self.optimizer_s + self.offload_s + self.imbalance_s

    @property
    def named(self) -> list[tuple[str, float]]:
        """The parts that take time: names and seconds."""
        return [(name.removesuffix("_s"), seconds) for name, seconds in vars(self).items() if seconds]

    def __add__(self, other: TrainTime) -> TrainTime:
        """Both, one after the other."""
        return TrainTime(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> TrainTime:
        """The call, that many times over."""
        return TrainTime(*(part * times for part in vars(self).values()))


@dataclass(frozen=True)
class _Layers:
    """Equal layers of the busiest stage: how many, and one's times per token, and of reading its weights, forward.

    `expert_s` and `expert_weights_s` are those of experts that are apart, which are not in the rest; `adapters_s` of
    LoRA's, forward and backward; `sent_bytes` what a GPU sends of a token to its experts. `blocks`: parts of the layer,
    attention and feed-forward, under TP. `parts`: parameters on one GPU, those of experts that are apart last.
    """

    count: int
    reach: Reach
    linear_s: float
    weights_s: float
    memory_s: float
    pair_s: float
    attention_token_s: float
    adapters_s: tuple[float, float]
    kv_bytes: float
    query_bytes: float
    parts: tuple[float, ...]
    blocks: int
    expert_s: float = 0.0
    expert_weights_s: float = 0.0
    sent_bytes: float = 0.0
    launch_s: float = 0.0


@dataclass(frozen=True)
class _Passes:
    """How often each kind of work is done in one micro-batch, relative to one forward pass."""

    launches: float
    linear: float
    attention: float
    chunked: float
    memory: float
    adapters: float  # forward
    tensor_parallel: float
    head: float
    backward: bool


_FORWARD = _Passes(1, linear=1, attention=1, chunked=1, memory=1, adapters=1, tensor_parallel=1, head=1, backward=False)


class TrainCost:
    """Cost of one model's training and inference calls under one strategy.

    `lengths` are tokens of prompt and response together, one per sequence, in the order in which they are trained on.
    `first_gpu` is the GPU at which its mesh begins: it decides how groups lie over nodes. Raises `ConfigError` if the
    strategy suits neither model nor cluster.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        collectives: CollectiveTime,
        strategy: TrainStrategy,
        efficiency: TrainEfficiency,
        first_gpu: int = 0,
    ) -> None:
        strategy.check_model(model)
        refuse("strategy of a cluster", strategy=strategy, cluster=cluster)
        self.model, self.cluster, self.strategy, self.efficiency = model, cluster, strategy, efficiency
        self._collectives = collectives
        self._adapters = model.adapters(strategy.lora_rank)
        self._trained = self._adapters if strategy.lora_rank else 1.0  # of the weights
        layout = Layout.of(first_gpu, strategy)
        self._groups = Groups(collectives, cluster, layout)
        self._expert_groups = Groups(collectives, cluster, layout.experts)
        # EP is the second of the degrees by which a stage's experts are cut, as CP is of the others.
        dispatch = replace(layout.experts, tp=strategy.expert_tp_degree, cp=strategy.ep)
        self._dispatch = Groups(collectives, cluster, dispatch)
        gpu = cluster.gpu
        split = strategy.tp * strategy.cp
        flops, memory = gpu.bf16_flop_per_s, gpu.memory_bytes_per_s * efficiency.memory
        self._memory_bytes_per_s = memory
        # The busiest stage; the head is the last one's.
        *others, last = model.stages(strategy.pp)
        head = 1 if model.scalar_head else model.vocab_size
        work = [sum(n * layer.active_weights for layer, n in stage.items()) for stage in (*others, last)]
        at_head = not others or work[-1] + head * model.hidden_size >= max(work[:-1])
        busiest = last if at_head else others[work.index(max(work[:-1]))]
        # Seconds per token (or per query-key pair) of one layer's forward pass on one GPU.
        self._layers = tuple(self._of_layer(layer, count, flops, memory) for layer, count in busiest.items())
        self._batching = MicroBatching(model, strategy)
        logit_s = 2.0 * model.hidden_size / (flops * efficiency.flop) + LOGIT_BYTES / memory
        self._head_s = head / split * logit_s if at_head else 0.0

    def _of_layer(self, layer: Layer, count: int, flops: float, memory: float) -> _Layers:
        strategy, efficiency, work = self.strategy, self.efficiency, attention_work(layer.attention)
        split, gpu = strategy.tp * strategy.cp, self.cluster.gpu
        attention = flops * efficiency.attention_on(gpu, strategy.attention)
        slower = efficiency.recurrent if isinstance(layer.attention, Recurrent) else 1.0
        forth, back = layer.adapter_moved(strategy.lora_rank, strategy.tp) if strategy.lora_rank else (0, 0)
        moved = self._elementwise_bytes(layer) + (slower - 1.0) * BF16 * work.moved / strategy.tp
        linear_flops, (own, routed) = 2.0 * layer.active_weights, layer_parts(layer, strategy)
        apart: dict[str, Any] = {"blocks": layer.blocks}
        launch_s = efficiency.expert_launch_s if isinstance(layer.mlp, Experts) else 0.0
        if strategy.looped_experts and isinstance(layer.mlp, Experts):
            launch_s = efficiency.looped_expert_s * layer.mlp.experts / strategy.ep
        repeated = 1  # Ulysses has a head of keys for every GPU
        if strategy.context_parallel == "ulysses" and isinstance(layer.attention, FullAttention):
            repeated = max(strategy.cp // layer.attention.kv_heads_per_gpu(strategy.tp), 1)
        if strategy.experts_apart and isinstance(layer.mlp, Experts):
            mlp = layer.mlp
            expert_flops = 2.0 * mlp.routed_weights(layer.hidden)
            linear_flops -= expert_flops
            apart = {
                "expert_s": expert_flops / split / (flops * efficiency.layers),
                "expert_weights_s": BF16 * routed / memory,
                "sent_bytes": BF16 * mlp.active * mlp.token_width(layer.hidden) / split,
                "blocks": layer.blocks if mlp.shared_width else layer.attention.blocks,
            }
        return _Layers(
            count,
            work.reach,
            linear_s=linear_flops / split / (flops * efficiency.layers),
            weights_s=BF16 * own / memory,
            memory_s=moved / strategy.cp / memory,
            pair_s=work.pair_flops / split / attention,
            attention_token_s=slower * work.token_flops / split / (CHUNKED_FLOP_PER_S * gpu.sm_count),
            adapters_s=(BF16 * forth / strategy.cp / memory, BF16 * back / strategy.cp / memory),
            kv_bytes=repeated * work.exchanged * BF16 / strategy.tp,
            query_bytes=work.queried * BF16 / strategy.tp,
            parts=(own, *([routed] if routed else [])),
            launch_s=launch_s,
            **apart,
        )

    def _elementwise_bytes(self, layer: Layer) -> float:
        """Memory traffic per token of a layer's element-wise kernels, fused, forward: `moved_elements`, and of experts
        the sorting of tokens.

        A token is copied for each of its experts, sorted by expert where it arrives, sorted back, and its outputs are
        added up: 2 hidden widths, and 6 of a token as its experts take it for each of them (Megatron Core's
        dispatchers, EP or not).
        """
        strategy, mlp, (around, latent, inside) = self.strategy, layer.mlp, moved_elements(layer)
        if isinstance(mlp, Experts):
            inside += 2 * layer.hidden + 6 * mlp.active * mlp.token_width(layer.hidden)
        return BF16 * (around / (strategy.tp if strategy.sequence_parallel else 1) + latent + inside / strategy.tp)

    # Calls -----------------------------------------------------------------------------------------------------------

    def forward_s(self, lengths: npt.ArrayLike) -> TrainTime:
        """An inference call: log-probabilities (or a critic's values) of every token, no gradient."""
        micro = self._batching.of_call(lengths, 1, backward=False)
        time = self._mini_batch(micro[0], self._passes(backward=False))
        return time + TrainTime(offload_s=sum(self.copied_s(backward=False, out=out) for out in (False, True)))

    def train_s(self, lengths: npt.ArrayLike, mini_batches: int = 1, epochs: int = 1) -> TrainTime:
        """A training call: `epochs` passes over the batch in `mini_batches` optimizer steps each.

        Micro-batches are those of `MicroBatching.of_call`. Raises `ValueError` for counts below 1.
        """
        if mini_batches < 1 or epochs < 1:
            raise ValueError("mini_batches and epochs must be at least 1")
        passes = self._passes(backward=True)
        total = TrainTime()
        update = self.update_time()
        for micro in self._batching.of_call(lengths, mini_batches, backward=True):
            total += self._mini_batch(micro, passes) + update
        return total * epochs + TrainTime(offload_s=sum(self.copied_s(backward=True, out=out) for out in (False, True)))

    # A call in pieces: samples as they come, on one data-parallel replica after another ------------------------------

    def part_time(self, lengths: npt.ArrayLike, *, backward: bool) -> TrainTime:
        """One data-parallel replica's work on some sequences of a call, packed into micro-batches.

        With `backward` it accumulates their gradients; reduction and update come once, see `update_time`.
        """
        micro = self._batching.of_part(lengths, backward=backward)
        return self._mini_batch(micro, self._passes(backward=backward))

    def update_time(self) -> TrainTime:
        """Reducing the accumulated gradients and one optimizer step."""
        return TrainTime(communication_s=self._reduce_s(), optimizer_s=self._optimizer_s())

    # Work ------------------------------------------------------------------------------------------------------------

    def _passes(self, *, backward: bool) -> _Passes:
        if not backward:
            own = self.efficiency
            forward = replace(own, flop=own.forward or own.flop)
            return replace(_FORWARD, linear=own.layers / forward.layers, head=own.flop / forward.flop)
        # Under LoRA weights have no gradients, what they are multiplied with has, and adapters have both.
        again, gradients = 1 if self.strategy.recompute == "full" else 0, 0 if self.strategy.lora_rank else 1
        elementwise = 0 if self.strategy.recompute == "none" else 1
        return _Passes(
            launches=1 + BACKWARD_LINEAR + again,
            linear=(1 + again) * (1 + self._adapters) + BACKWARD_LINEAR / 2 * (1 + gradients + 2 * self._adapters),
            attention=1 + BACKWARD_ATTENTION + again,
            chunked=1 + BACKWARD_CHUNKED + again,
            memory=1 + BACKWARD_MEMORY + elementwise,
            adapters=1 + again,
            tensor_parallel=2 + again,
            head=2 + gradients + (self.strategy.logits == "fused"),  # fused: the backward pass computes logits again
            backward=True,
        )

    def _mini_batch(self, micro: MicroBatches, passes: _Passes) -> TrainTime:
        tokens = micro.tokens
        if not tokens.any():
            return TrainTime()
        strategy = self.strategy
        busy, communication = np.zeros_like(tokens), np.zeros_like(tokens)
        for layer in self._layers:
            compute, exposed = self._layer_s(layer, micro, passes)
            busy += layer.count * compute
            communication += layer.count * exposed
        busy += tokens * (self._head_s * passes.head)
        if strategy.zero_stage == 3 and strategy.sharded_over > 1:
            # The ranks meet at every layer: each micro-batch takes as long as its slowest rank. Under HSDP those of one
            # group do, and groups at the end of the mini-batch.
            together = math.gcd(max(strategy.sharded_over // strategy.cp, 1), len(busy))
            groups = (busy + communication).reshape(-1, together, busy.shape[1])
            slowest_s = float(groups.max(axis=1).sum(axis=1).max())
            late_s = self._late_gathers_s(micro, passes)
            mean_s, talk_s = float(busy.mean(axis=0).sum()), float(communication.mean(axis=0).sum())
            return TrainTime(compute_s=mean_s, communication_s=talk_s + late_s, imbalance_s=slowest_s - mean_s - talk_s)
        # The ranks meet at the end of the mini-batch, those that share experts at every layer. Micro-batches of unequal
        # size pass equal stages in the sum of their times and, for every further stage, the time of the largest: a
        # proportionate flow shop's makespan.
        work = self._together(busy + communication, np.max)
        bubbles = (strategy.pp - 1) * work.max(axis=1)
        mean_s, talk_s = float(busy.sum(axis=1).mean()), float(communication.sum(axis=1).mean())
        bubble_s = float(bubbles.mean())
        return TrainTime(
            compute_s=mean_s,
            communication_s=talk_s,
            sends_s=self._stage_sends_s(tokens, passes),
            bubble_s=bubble_s,
            imbalance_s=float((work.sum(axis=1) + bubbles).max()) - mean_s - talk_s - bubble_s,
        )

    def _together(self, rows: Floats, over: Callable[..., Floats]) -> Floats:
        """Rows of data-parallel ranks, `over` those that share experts (their greatest, their mean)."""
        own, cut = self.strategy.tp * self.strategy.cp, self.strategy.expert_cut
        ranks = math.lcm(cut, own) // own if any(layer.expert_s for layer in self._layers) else 1
        groups = rows.reshape(-1, min(ranks, len(rows)), rows.shape[1])  # one row: a replica's part, taken as all alike
        return np.broadcast_to(over(groups, axis=1, keepdims=True), groups.shape).reshape(rows.shape)

    def _late_gathers_s(self, micro: MicroBatches, passes: _Passes) -> float:
        """ZeRO-3: what gathers and scatters last longer than the compute of the layer they hide behind.

        In the forward pass a layer's gather hides behind the layer before it, taken as one like itself; in the backward
        pass a gather and the scatter of the gradient. The first layer, embedding and head are gathered, and scattered,
        in the open, and nothing hides that what is gathered is copied out of the buffer, and gradients into theirs.
        """
        ends = (self.model.embedding_parameters / self.strategy.tp,)
        gather_s, scatter_s = partial(self._unit_s, "all_gather"), partial(self._unit_s, "reduce_scatter")
        total_s, opened = 0.0, gather_s(self._layers[0].parts) + gather_s(ends)
        for layer in self._layers:
            forward, exposed = self._layer_s(layer, micro, _FORWARD)
            forward += exposed
            gather, scatter = gather_s(layer.parts), scatter_s(layer.parts)
            late = np.maximum(gather - forward.max(axis=0), 0.0) + self._copied_units_s(layer.parts, passes)
            if passes.backward:
                compute, exposed = self._layer_s(layer, micro, passes)
                late += np.maximum(gather + scatter - (compute + exposed - forward).max(axis=0), 0.0)
            total_s += late.sum() * layer.count
        if passes.backward:
            opened += scatter_s(ends)
        return float(total_s + opened * micro.tokens.shape[1])

    def _layer_s(self, layer: _Layers, micro: MicroBatches, passes: _Passes) -> tuple[Floats, Floats]:
        """One layer of every micro-batch: seconds of compute, and of TP, CP and EP communication that nothing hides."""
        strategy, tokens = self.strategy, micro.tokens
        linear = np.maximum(tokens * layer.linear_s, layer.weights_s * (tokens > 0))
        overhead = 0.5 * self.efficiency.overhead_tokens * tokens
        attention = (micro.pairs[layer.reach] + overhead) * (layer.pair_s * passes.attention)
        attention += tokens * (layer.attention_token_s * passes.chunked)
        forth_s, back_s = layer.adapters_s
        moved_s = layer.memory_s * passes.memory + forth_s * passes.adapters + back_s * passes.backward
        compute = linear * passes.linear + attention + tokens * moved_s
        exposed = np.zeros_like(tokens)
        local = tokens / strategy.cp
        if strategy.tp > 1:
            ops = ("all_gather", "reduce_scatter") if strategy.sequence_parallel else ("all_reduce",)
            for op in ops:
                time = _interpolated(
                    partial(self._groups.time_s, op, group="tp"), local * (self.model.hidden_size * BF16)
                )
                exposed += layer.blocks * passes.tensor_parallel * time
        if strategy.cp > 1 and layer.kv_bytes:
            exposed += self._exchange_s(layer, tokens, attention / passes.tensor_parallel) * passes.tensor_parallel
        if layer.expert_s:
            routed = self._together(tokens, np.mean) * strategy.expert_imbalance
            compute += np.maximum(routed * layer.expert_s, layer.expert_weights_s * (routed > 0)) * passes.linear
            exposed += self._dispatch_s(routed * layer.sent_bytes) * passes.tensor_parallel
        launched_s = layer.launch_s * passes.launches * (tokens > 0)
        return np.maximum(compute, launched_s - exposed), exposed

    def _exchange_s(self, layer: _Layers, tokens: Floats, attention_s: Floats) -> Floats:
        """CP's communication of one pass that nothing hides. A ring moves keys and values beside attention; Ulysses
        sends queries, keys and values to the GPUs of their heads before it, and outputs back after it (veRL, SkyRL and
        AReaL: `_ulysses_flash_attention_forward`)."""
        if self.strategy.context_parallel == "ring":
            exchange = _interpolated(partial(self._groups.time_s, "all_gather", group="cp"), tokens * layer.kv_bytes)
            return np.maximum(exchange - attention_s, 0.0)
        send_s, local = partial(self._groups.time_s, "all_to_all", group="cp"), tokens / self.strategy.cp
        queries_s, keys_s = (_interpolated(send_s, local * n / 2) for n in (layer.query_bytes, layer.kv_bytes))
        return 2.0 * (queries_s + keys_s)  # and outputs, and values

    def _dispatch_s(self, sent_bytes: Floats) -> Floats:
        """Seconds of bringing tokens to their experts and back, once each, where a GPU sends `sent_bytes`.

        An all-to-all each way; GPUs that cut the same expert gather what any of them got, and scatter the sums.
        """
        degree, total = self.strategy.expert_tp_degree, np.zeros_like(sent_bytes)
        if self.strategy.ep > 1:
            total += 2 * _interpolated(partial(self._dispatch.time_s, "all_to_all", group="cp"), sent_bytes)
        for op in ("all_gather", "reduce_scatter") if degree > 1 else ():
            total += _interpolated(partial(self._dispatch.time_s, op, group="tp"), degree * sent_bytes)
        return total

    def _unit_s(self, op: str, parts: Sequence[float]) -> float:
        """ZeRO-3: gathering one unit of the model in bf16, or reducing its gradient to its shards; `parts` are its
        parameters on one GPU, those of experts that are apart last."""
        width = BF16 if op == "all_gather" else self.strategy.gradient_bytes * self._trained
        spread = zip(parts, (self._groups, self._expert_groups), strict=False)
        return sum(groups.time_s(op, n * width, "sharded") for n, groups in spread)

    def _copied_units_s(self, parts: Sequence[float], passes: _Passes) -> float:
        """ZeRO-3: copying a unit's gathered weights out of the buffer in each direction, and its gradients into one."""
        size = 2 * BF16 + passes.backward * (2 * BF16 + (BF16 + self.strategy.gradient_bytes) * self._trained)
        return sum(parts) * size / (COPY_SHARE * self.cluster.gpu.memory_bytes_per_s)

    def _stage_sends_s(self, tokens: Floats, passes: _Passes) -> float:
        """Sends of activations (and gradients): all micro-batches over a slowest boundary, the largest over others."""
        strategy = self.strategy
        if strategy.pp == 1:
            return 0.0
        width = self.model.hidden_size * BF16 / (strategy.tp if strategy.sequence_parallel else 1)
        senders = min(strategy.shards * strategy.tp, self.cluster.domain_gpus)
        sizes, (inside, across) = tokens * (width / strategy.cp), self._groups.boundaries
        (most, slowest), *others = [
            (count, _interpolated(partial(self._collectives.time_s, "send_recv", gpus=2 * senders, nodes=nodes), sizes))
            for count, nodes in ((across, 2), (inside, 1))
            if count
        ]
        way_s = slowest.sum(axis=1) + (most - 1) * slowest.max(axis=1)
        for count, sends in others:
            way_s += count * sends.max(axis=1)
        return float(way_s.mean()) * (2 if passes.backward else 1)

    # Updates ---------------------------------------------------------------------------------------------------------

    def _reduce_s(self) -> float:
        """Gradient reduction of one optimizer step; experts that are apart have ranks of their own to share theirs.

        Under ZeRO-3 it has happened layer by layer within a group of `shard_gpus`; replicas of the group add theirs up.
        """
        return sum(
            self._reduce_part_s(local, strategy, groups)
            for (local, strategy), groups in zip(self._parts, (self._groups, self._expert_groups), strict=False)
        )

    def _reduce_part_s(self, local: float, strategy: TrainStrategy, groups: Groups) -> float:
        group, width = strategy.sharded_over, strategy.gradient_bytes * self._trained
        if strategy.shards == 1 or (strategy.zero_stage == 3 and group == strategy.shards):
            return 0.0
        if strategy.zero_stage == 3:
            return groups.time_s("all_reduce", local / group * width, "replicas")
        if strategy.zero_stage == 0:
            return groups.time_s("all_reduce", local * width, "shards")
        scatter_s = groups.time_s("reduce_scatter", local * width, "shards")
        return scatter_s + groups.time_s("all_gather", local * BF16 * self._trained, "shards")

    def _optimizer_s(self) -> float:
        """One Adam step over this GPU's share, bound by memory; what steps on the host by that of the node.

        Its gradients go there in fp32, its new weights come back in fp32 (Megatron's `HybridDeviceOptimizer`); nothing
        hides that.
        """
        local = sum(n / (spread.sharded_over if spread.zero_stage >= 1 else 1) for n, spread in self._parts)
        own = local * self._trained
        strategy, moved = self.strategy, OPTIMIZER_BYTES * own
        if strategy.fsdp:
            moved *= strategy.shard_bytes / FP32
        on_gpu_s = moved / self._memory_bytes_per_s
        if not strategy.cpu_optimizer:
            return on_gpu_s
        on_node = min(strategy.gpus, self.cluster.gpus_per_node)
        step_s = CPU_OPTIMIZER_BYTES * own * strategy.cpu_optimizer * on_node / strategy.cpu_optimizer_rate
        copied_s = 2 * host_copy_s(FP32 * own * strategy.cpu_optimizer, self.cluster.host)
        return on_gpu_s * (1 - strategy.cpu_optimizer) + step_s + copied_s

    def copied_s(self, *, backward: bool, out: bool) -> float:
        """Seconds to bring this GPU's weights, and with `backward` the optimizer's states, in from host memory or out
        to it; 0 without offload.

        Weights are bf16, of FSDP fp32 shards that are as pageable as the states, or alone (`pageable_weights`);
        Megatron's have a pinned buffer (`offload_to_cpu`). torch_memory_saver parks all that training has allocated,
        gradients too.
        """
        strategy, host = self.strategy, self.cluster.host
        if not strategy.offload:
            return 0.0
        saver, weights, states = backward and strategy.host_memory == "saver", 0.0, 0.0
        for local, spread in self._parts:
            weights += strategy.shard_bytes * local / (spread.sharded_over if strategy.fsdp else 1)
            on_gpus = backward * strategy.states_bytes * local * (1 - strategy.cpu_optimizer)
            states += on_gpus / (spread.sharded_over if strategy.zero_stage >= 1 else 1)
            states += saver * strategy.gradient_bytes * local / (spread.sharded_over if strategy.zero_stage >= 2 else 1)
        states *= self._trained
        pageable = strategy.fsdp and strategy.host_memory.startswith("pageable")
        slow = states * (saver or strategy.host_memory == "pageable") + weights * (saver or pageable)
        slow_s = allocated_copy_s(slow, host, "saver" if saver else "pageable", out=out)
        return host_copy_s(weights + states - slow, host) + slow_s

    @cached_property
    def _parts(self) -> list[tuple[float, TrainStrategy]]:
        return stage_parts(self.model, self.strategy)


def _interpolated(time_s: Callable[[float], float], sizes: Floats) -> Floats:
    """Seconds for messages of these sizes, interpolated between 16 that span them: a look-up for each would be slow."""
    low, high = float(sizes[sizes > 0].min()), float(sizes.max())
    grid = np.geomspace(low, high, 16) if high > low else np.array([high])
    return np.where(sizes > 0, np.interp(sizes, grid, [time_s(float(size)) for size in grid]), 0.0)
