"""Engines that share their GPUs with others: how many layers stay in host memory, and what the rest takes."""

from __future__ import annotations

import heapq
import math

from rlsim.cost.memory import RESERVED_BYTES, rollout_activation_bytes, rollout_weight_bytes
from rlsim.cost.step import Chunk, StepCost
from rlsim.cost.transfer import host_copy_s
from rlsim.models.hardware import Link
from rlsim.models.model import Model


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
