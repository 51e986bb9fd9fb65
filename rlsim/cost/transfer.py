"""Seconds and peak bytes of moving weights and KV cache: between layouts, replicas, nodes, and to the host.

Every function is pure and takes what it needs: shapes from `Model`, rates as numbers or through a `CollectiveTime`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from rlsim.cost.collectives import CollectiveTime, Groups
from rlsim.cost.layout import Layout
from rlsim.cost.memory import RESERVED_BYTES, kv_page_bytes, rollout_activation_bytes, rollout_weight_bytes
from rlsim.cost.step import Chunk, StepCost
from rlsim.models.hardware import Cluster, Link
from rlsim.models.model import Model

# Host memory --------------------------------------------------------------------------------------------------------


def host_copy_s(bytes_per_gpu: float, host: Link) -> float:
    """Offload or onload of `bytes_per_gpu` on every GPU at once, one way: latency + bytes / rate (0 for no bytes)."""
    return host.latency_s + bytes_per_gpu * host.shared_by_gpus / host.bytes_per_s if bytes_per_gpu > 0 else 0.0


#: Out to host memory that is allocated for it, and back in, bytes/s of a GPU. Pageable: what Nsight Systems showed of
#: NeMo-RL's `offload_before_refit` on H100 (4.94 GB of Qwen2.5-0.5B's states, ten bytes a parameter), and a copy to
#: memory that was there before (github.com/NVIDIA-NeMo/RL issue 3976). Saver: torch_memory_saver on L20, which
#: allocates pinned memory for each pause and frees it (fzyzcjy/torch_memory_saver issue 111: 2.41 and 5.32 GiB/s).
ALLOCATED_BYTES_PER_S = {"pageable": (1.8e9, 16.1e9), "saver": (2.59e9, 5.71e9)}


def allocated_copy_s(bytes_per_gpu: float, host: Link, kind: str, *, out: bool) -> float:
    """As `host_copy_s`, out to memory of that kind that is allocated for it or back in."""
    return max(bytes_per_gpu / ALLOCATED_BYTES_PER_S[kind][not out], host_copy_s(bytes_per_gpu, host))


@dataclass(frozen=True)
class HostKv:
    """Host memory for KV pages that the GPUs of one replica have no room for: how many beside copies of those that the
    GPUs hold, and the way back."""

    pages: int = 0
    latency_s: float = 0.0
    page_s: float = 0.0  # of each page, by all GPUs of the replica at once

    def load_s(self, pages: int) -> float:
        """Seconds to load so many pages, as `host_copy_s`."""
        return self.latency_s + pages * self.page_s if pages else 0.0


NO_HOST_KV = HostKv()


# Weights ------------------------------------------------------------------------------------------------------------


def gather_s(
    model: Model, collectives: CollectiveTime, cluster: Cluster, source: Layout, *, over_tp: bool = True
) -> float:
    """Making whole tensors of a trainer's shards, layer by layer (and the embedding and head).

    Under ZeRO-3 all-gathered over the ranks that share it (under HSDP not all data-parallel ones);
    with PP broadcast from a layer's stage to the others; with `over_tp` all-gathered over the TP group. Experts that
    are apart are broadcast likewise, each GPU its own, and all-gathered over the GPUs that hold all of them once.
    """

    def unit(spread: Layout, over_tp: bool) -> Callable[[float], float]:
        tp, groups = spread.tp, Groups(collectives, cluster, spread)

        def unit_s(size: float) -> float:
            total = 0.0
            if spread.zero3 and spread.sharded_over > 1:
                total += groups.time_s("all_gather", size / tp, "sharded")
            if spread.pp > 1:
                total += groups.time_s("broadcast", size / tp, "pp")
            if tp > 1 and over_tp:
                total += groups.time_s("all_gather", size, "tp")
            return total

        return unit_s

    if source.expert_cut is None:
        return _over_units(model, unit(source, over_tp))
    return _over_units(model, unit(source, over_tp), unit(source.experts, True))


def reshard_s(
    model: Model,
    collectives: CollectiveTime,
    tp_src: int,
    tp_dst: int,
    bytes_per_s: float | None = None,
) -> float:
    """Rollout weights from TP `tp_src` to `tp_dst` inside a node: all-gather in the source group layer by layer, slice.

    With `bytes_per_s`, the measured rate at which one GPU receives what it lacks, the time is
    weights · (1 − 1/tp_src) / `bytes_per_s`; otherwise the collectives give the time of every layer. Nothing moves from
    TP 1 (every GPU has all weights), nor when the degree stays.
    """
    if tp_src in (1, tp_dst):
        return 0.0
    if bytes_per_s is not None:
        return model.weight_bytes * (1 - 1 / tp_src) / bytes_per_s
    return _over_units(model, lambda size: collectives.time_s("all_gather", size, tp_src, 1))


def _over_units(
    model: Model, unit_s: Callable[[float], float], experts_s: Callable[[float], float] | None = None
) -> float:
    """The sum of `unit_s(bytes)` over all layers, the embedding and the head; of their experts that of `experts_s`."""
    embedding = model.vocab_size * model.hidden_size * model.dtype_bytes
    head = model.head_parameters * model.dtype_bytes
    total = 0.0
    for layer, count in model.groups.items():
        experts = model.expert_bytes(layer) if experts_s else 0.0
        total += count * unit_s(model.layer_bytes(layer) - experts)
        if experts_s and experts:
            total += count * experts_s(experts)
    return total + unit_s(embedding) + (unit_s(head) if head else 0.0)


# KV cache -----------------------------------------------------------------------------------------------------------


def kv_rank_bytes(model: Model, context_tokens: float, tp_src: int) -> float:
    """KV bytes that one rank of a TP switch handles (PAT): those of a token · Σ context / tp_src.

    `context_tokens` is the sum over all sequences that move, in every replica that merges.
    """
    return model.kv_bytes_per_token * context_tokens / tp_src


def kv_migrate_s(
    model: Model,
    collectives: CollectiveTime,
    context_tokens: float,
    tp_src: int,
    tp_dst: int,
    bytes_per_s: float | None = None,
) -> float:
    """KV cache of `context_tokens` tokens from TP `tp_src` to `tp_dst` inside a node, layer by layer.

    With `bytes_per_s`, the measured one-way rate of a rank: `kv_rank_bytes` / rate (PAT's cost). Otherwise by
    collectives: to a larger TP, ranks holding the same heads all-gather over the tp_dst / tp_src replicas that merge;
    to a smaller one, the ranks of the source group exchange heads for sequences (all-to-all). Zero if the degree stays.
    """
    if tp_src == tp_dst or context_tokens <= 0:
        return 0.0
    volume = kv_rank_bytes(model, context_tokens, tp_src)
    if bytes_per_s is not None:
        return volume / bytes_per_s
    op, gpus = ("all_gather", tp_dst // tp_src) if tp_dst > tp_src else ("all_to_all", tp_src)
    return model.num_hidden_layers * collectives.time_s(op, volume / model.num_hidden_layers, gpus, 1)


def kv_send_s(
    model: Model, link: Link, context_tokens: float, tp: int, bytes_per_s: float | None = None, pp: int = 1
) -> float:
    """KV cache of `context_tokens` tokens from one replica to another of the same degrees: every rank sends its own.

    The `tp` · `pp` sends run side by side over `link` (PCIe or NVLink inside a node, the network across nodes) and
    share a port if the link says so. `bytes_per_s` replaces the link's peak rate by a measured one of a rank.
    """
    if context_tokens <= 0:
        return 0.0
    per_rank = kv_page_bytes(model, tp, 1, pp) * context_tokens
    sharing = min(tp * pp, link.shared_by_gpus)
    return link.latency_s + per_rank * sharing / (bytes_per_s or link.bytes_per_s)


def rms_context_tokens(contexts: Sequence[float]) -> float:
    """√(mean(context²)): the length at which equally many sequences of one length cost as much attention (PAT)."""
    return math.sqrt(sum(c * c for c in contexts) / len(contexts)) if contexts else 0.0


# A TP switch as a whole ---------------------------------------------------------------------------------------------


WeightHandling = Literal["reshard", "gather", "reload"]
GraphCapture = Literal["tail", "all"]


class SwitchWay(NamedTuple):
    """How a TP switch brings the weights and the decode graphs of the new layout; the KV cache is another matter."""

    weights: WeightHandling = "reshard"  # layer by layer, whole at once, or loaded again
    graphs: GraphCapture = "tail"  # for the batch sizes that the requests left may need, or all of the engine's
    restart: bool = False


IN_PLACE = SwitchWay()
#: The engine is ended and started again under the new layout, as one that cannot switch must be (PAT's naive switch):
#: weights are loaded, all graphs captured, and no KV cache outlives it.
RESTART = SwitchWay("reload", "all", restart=True)
WAYS = (RESTART, *itertools.starmap(SwitchWay, itertools.product(get_args(WeightHandling), get_args(GraphCapture))))


@dataclass(frozen=True)
class SwitchCost:
    """Seconds of one TP switch of one node, by part; the parts run one after another. And its memory on a GPU."""

    weights_s: float
    kv_s: float
    graph_s: float
    control_s: float
    peak_bytes: float = 0.0  # at most held beside what was there before, while it lasts (`switch_peak_bytes`)
    pool_bytes: float = 0.0  # by which the KV pool is larger afterwards

    @property
    def total_s(self) -> float:
        """The pause of decoding."""
        return self.weights_s + self.kv_s + self.graph_s + self.control_s


def captured_batch_sizes(largest: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The ascending `sizes` up to the first that holds `largest` sequences (PAT captures for the tail only)."""
    return tuple(size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < largest)


def switch_peak_bytes(
    model: Model, context_tokens: float, tp_src: int, tp_dst: int, way: SwitchWay = IN_PLACE
) -> float:
    """Extra bytes on one GPU at the peak of a TP switch that moves valid KV only.

    A full move (`gather`) first gathers all weights and all KV of the merging replicas, then slices: what is gathered
    beyond what the GPU already holds. Layer-wise, only one layer of each is gathered at a time; a layer's old weight
    slice is freed as its new one is written (growth to a smaller TP counts), while the new KV slices pile up until the
    old page pool can be released. To a smaller TP nothing is gathered of the KV: heads are exchanged for sequences.
    Weights that are loaded again come when the old ones are gone, in slices; a restart begins with an empty GPU.
    """
    layers = model.num_hidden_layers
    weights_held = rollout_weight_bytes(model, tp_src)
    kv_gathered = kv_rank_bytes(model, context_tokens, tp_src)
    kv_held = kv_gathered * min(tp_src / tp_dst, 1.0)
    kv_new = model.kv_bytes_per_token * context_tokens / max(tp_src, tp_dst)
    growth = max(rollout_weight_bytes(model, tp_dst) - weights_held, 0.0)
    if way.restart:
        return 0.0
    if way.weights == "gather":
        return model.weight_bytes - weights_held + max(kv_gathered - kv_held, kv_new)
    largest = max(map(model.layer_bytes, model.groups)) * (way.weights == "reshard")
    one_layer = largest * (1 - 1 / tp_src) + (kv_gathered - kv_held) / layers
    before_last_layer = max(growth - largest * max(1 / tp_dst - 1 / tp_src, 0.0), 0.0)
    return one_layer + kv_new + before_last_layer


# Engines that share their GPUs ----------------------------------------------------------------------------------------


def layers_to_offload(model: Model, resident: StepCost, host: Link, batched_tokens: int, sequence_tokens: int) -> int:
    """Most layers of `model` whose copying from host memory hides behind one prefill iteration.

    The iteration is full: `batched_tokens` of sequences of `sequence_tokens`, the last one in part. The longer the
    sequences, the longer attention takes and the more layers can stay in host memory.
    """
    whole, rest = divmod(batched_tokens, sequence_tokens)
    chunks = [Chunk(sequence_tokens, 0)] * whole + ([Chunk(rest, 0)] if rest else [])
    hidden_s = resident.prefill_s(chunks)
    layers = model.num_hidden_layers
    return max((n for n in range(layers + 1) if stream_s(model, n, resident.tp, host) <= hidden_s), default=0)


def judge_bytes(model: Model, layers: int, tp: int, batched_tokens: int, sequences: int) -> float:
    """Bytes on each GPU of an engine with that many layers in host memory, without its KV cache.

    The weights that stay, buffers for two of those that are streamed, working memory, context and graphs.
    """
    streamed = _largest_bytes(model, min(2, layers)) - _largest_bytes(model, layers)
    weights = rollout_weight_bytes(model, tp) + streamed / tp
    return weights + rollout_activation_bytes(model, tp, batched_tokens, sequences) + RESERVED_BYTES


def stream_s(model: Model, layers: int, tp: int, host: Link) -> float:
    """Seconds to copy that many layers of a replica from host memory once, each GPU its share."""
    return host_copy_s(math.ceil(_largest_bytes(model, layers) / tp), host)


def _largest_bytes(model: Model, layers: int) -> float:
    """Weights of so many layers, the largest ones."""
    return sum(heapq.nlargest(layers, map(model.layer_bytes, model.layers)))
