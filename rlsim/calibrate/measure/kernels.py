"""What is timed of kernels: copies, matrix products, attention and elementwise kernels of one device, and communication
between the workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from rlsim.calibrate.measure.bench import Bench, Call, Timing, measure
from rlsim.calibrate.measure.plan import contexts, elementwise_shape
from rlsim.calibrate.measure.workers import Worker


def copy(bench: Bench, kind: str, size: int) -> list[Call]:
    """`size` bytes copied on the device, or between it and pinned host memory."""

    def buffer(device: str) -> Any:
        pinned = device == "cpu" and bench.device != "cpu"
        return torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned)

    ends = {"device": (bench.device, bench.device), "host_to_device": ("cpu", bench.device)}
    ends["device_to_host"] = ends["host_to_device"][::-1]
    source, target = ends[kind]
    pairs = [(buffer(target), buffer(source)) for _ in range(bench.copies(2 * size))]
    return [partial(to.copy_, origin, non_blocking=True) for to, origin in pairs]


def gemm(bench: Bench, m: int, n: int, k: int) -> list[Call]:
    """`m` tokens through a linear layer with an (n, k) weight."""
    copies = bench.copies(n * k * bench.dtype_bytes)
    weights, tokens = bench.tensor(copies, n, k), bench.tensor(m, k)
    return [partial(functional.linear, tokens, weights[i]) for i in range(copies)]


def layer_elementwise(bench: Bench, _kernels: int, tokens: int, _bytes: int) -> list[Call]:
    """All of a layer on `tokens` tokens that is neither product nor attention: twice residual and norm, the rotary
    embedding of queries and keys with the KV write, and the activation of a gated MLP."""
    heads, kv_heads, width = elementwise_shape(bench.model, bench.tp)
    hidden, head_dim = bench.model.hidden_size, bench.model.head_dim
    x, residual, scale = bench.tensor(tokens, hidden), bench.tensor(tokens, hidden), bench.tensor(hidden)
    rotated, values = bench.tensor(tokens, heads + kv_heads, head_dim), bench.tensor(tokens, kv_heads, head_dim)
    cosine, sine = bench.tensor(tokens, 1, head_dim), bench.tensor(tokens, 1, head_dim)
    cache, slots = bench.tensor(2, tokens, kv_heads, head_dim), torch.arange(tokens, device=bench.device)
    gate_up = bench.tensor(tokens, 2 * width)

    def layer() -> None:
        functional.rms_norm(x, (hidden,), scale, 1e-6)
        turned = rotated * cosine + rotated.roll(head_dim // 2, -1) * sine
        cache[0][slots] = turned[:, heads:]
        cache[1][slots] = values
        functional.rms_norm(x + residual, (hidden,), scale, 1e-6)
        gate, up = gate_up.chunk(2, dim=-1)
        _ = functional.silu(gate) * up
        _ = x + residual

    return [layer]


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


def collective(worker: Worker, bench: Bench, op: str, gpus: int, size: int) -> Timing:
    """`op` in every group of `gpus` consecutive workers at once, on a tensor of `size` bytes; all must call this.

    The tensor is what every rank holds after an all-gather or before a reduce-scatter, all-reduce or all-to-all, and
    what travels in a broadcast or send. A send is half of a message there and back. On the CPU, all-reduce and
    all-gather are the decoder's own (`ranks.Ranks`), the others gloo's.
    """
    ranks = worker.ranks(gpus)
    distributed: Any = dist
    elements = max(size // bench.dtype_bytes // gpus, 1) * gpus
    whole, part = bench.tensor(elements).zero_(), bench.tensor(elements // gpus).zero_()  # sums stay what they are
    received = whole.clone()
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # newer, older name
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    first = worker.rank // gpus * gpus  # of our group

    def there_and_back() -> None:
        sends, other = worker.rank == first, 2 * first + 1 - worker.rank
        for turn in (sends, not sends):
            (dist.send if turn else dist.recv)(whole, other, group=ranks.group)

    on_cpu, group = worker.device == "cpu", ranks.group
    calls: dict[str, Call] = {
        "all_reduce": partial(ranks.all_reduce, whole),
        "all_gather": partial(ranks.all_gather, part) if on_cpu else partial(gather, whole, part, group=group),
        "reduce_scatter": partial(scatter, part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, received, whole, group=group),
        "broadcast": partial(dist.broadcast, whole, first, group=group),
        "send_recv": there_and_back,
    }
    return measure(
        calls[op],
        device=bench.device,
        effort=bench.effort,
        calls=2 if op == "send_recv" else 1,
        slowest=lambda seconds: max(worker.all.agree(seconds)),
    )
