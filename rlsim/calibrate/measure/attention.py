"""Attention of one layer on one device: decode over cached contexts, and prefill."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from rlsim.calibrate.measure.bench import Bench, Call
from rlsim.calibrate.measure.plan import contexts


def decode_attention(
    bench: Bench, batch: int, context: int, longest: int, q_heads: int, kv_heads: int, head_dim: int
) -> list[Call]:
    """One new token of each of `batch` sequences over cached contexts of mean `context` and maximum `longest`, as the
    decoder of the whole steps does it (`decoder.Decoder`): every sequence is read as far as the longest on the CPU, as
    far as it goes by CUDA's flash kernel."""
    copies = bench.copies(2 * batch * longest * kv_heads * head_dim * bench.dtype_bytes, kv=True)
    ends = torch.tensor(contexts(batch, context, longest), device=bench.device)
    if bench.device != "cpu":
        flat = bench.tensor(copies, 2, batch * longest, kv_heads, head_dim)
        one = torch.arange(batch + 1, device=bench.device, dtype=torch.int32)
        query, starts = bench.tensor(batch, q_heads, head_dim), (one, one * longest)
        return [partial(flash, query, flat[i][0], flat[i][1], starts, (1, longest), ends.int()) for i in range(copies)]
    cache = bench.tensor(copies, 2, batch, kv_heads, longest, head_dim)
    query = bench.tensor(batch, kv_heads, q_heads // kv_heads, head_dim)
    mask = padding_mask(ends, longest, bench.torch_dtype)
    return [partial(attend_padded, query, cache[i][0], cache[i][1], mask) for i in range(copies)]


def padding_mask(contexts: torch.Tensor, longest: int, dtype: torch.dtype) -> torch.Tensor:
    """What `attend_padded` adds to scores: minus infinity beyond each sequence's context."""
    beyond = torch.arange(longest) >= contexts[:, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None]


def attend_padded(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Decode attention of (batch, KV heads, query heads of each, head size) over (batch, KV heads, tokens, head size)
    as two batched products, in which the query heads of one KV head are rows."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, keys.transpose(-1, -2))
    scores += mask
    return torch.matmul(scores.softmax(-1), values)


def flash(
    query: torch.Tensor, keys: Any, values: Any, starts: tuple[Any, Any], longest: tuple[int, int], used: Any = None
) -> torch.Tensor:
    """CUDA's flash kernel over packed (tokens, heads, head size) tensors.

    `starts` and `longest` are the sequences' in queries and keys. With `used`, the tokens filled of each sequence's
    keys, it is a decode step; without, causal.
    """
    forward: Any = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(query, keys, values, *starts, *longest, 0.0, used is None, False, seqused_k=used)[0]
    return out


def prefill_attention(
    bench: Bench, batch: int, new: int, prior: int, q_heads: int, kv_heads: int, head_dim: int
) -> list[Call]:
    """`new` tokens of each of `batch` sequences over themselves, causally, and over `prior` cached tokens."""
    total = prior + new
    # without cached tokens, keys and values come straight from their product
    copies = bench.copies(batch * total * kv_heads * head_dim * 2 * bench.dtype_bytes, kv=True) if prior else 1
    if bench.device != "cpu":
        query = bench.tensor(batch * new, q_heads, head_dim)
        flat = bench.tensor(copies, 2, batch * total, kv_heads, head_dim)
        one = torch.arange(batch + 1, device=bench.device, dtype=torch.int32)
        return [
            partial(flash, query, flat[i][0], flat[i][1], (one * new, one * total), (new, total)) for i in range(copies)
        ]
    queries = bench.tensor(batch, 1, q_heads, new, head_dim)
    cache = bench.tensor(copies, 2, batch, 1, kv_heads, total, head_dim)
    mask = torch.ones(new, total, dtype=torch.bool).tril(diagonal=prior) if prior else None

    def attend(keys: Any, values: Any) -> None:
        for i in range(batch):  # one after another, as the decoder goes through its prompts
            causal_attention(queries[i], keys[i], values[i], mask)

    return [partial(attend, *cache[i]) for i in range(copies)]


def causal_attention(query: Any, keys: Any, values: Any, mask: Any = None) -> Any:
    """Torch's causal attention, (batch, heads, tokens, head size) each. KV heads may be fewer than query heads. With
    cached tokens in front, `mask` says what each query sees."""
    group = query.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
