"""What is timed, on all workers together: whole steps of a real decoder, kernels, collectives.

Each function runs on every worker (`Workers.call`) with the values of a point of `measurements.KEYS`, and all workers
must call it. With fewer ranks in a replica than there are workers, every replica does the same at the same time: the
condition of a rollout with several replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the usual name

from rlsim.calibrate.measure.bench import Bench, Call, Timing, measure
from rlsim.calibrate.measure.decoder import (
    Batch,
    Decoder,
    KvCache,
    attend_padded,
    causal_attention,
    flash,
    padding_mask,
    random_weights,
)
from rlsim.calibrate.measure.journal import Point, contexts, elementwise_shape, equal_contexts
from rlsim.calibrate.measure.workers import Worker
from rlsim.errors import RlsimError
from rlsim.models.model import Model

# Steps ----------------------------------------------------------------------------------------------------------------


ROOM = 8  # tokens of a slot beyond the context that is measured


def decode_step(
    worker: Any, bench: Bench, model: Model, tp: int, mode: str, batch: int, context_tokens: float
) -> Timing:
    """One token for each of `batch` sequences whose contexts, as equal as possible, add up to `context_tokens`.

    `mode` is "eager" or, on CUDA, "graph". The step ends when its tokens are known.
    """
    lengths = equal_contexts(batch, round(context_tokens))
    running = Batch(_decoder(worker, bench, model, tp, math.ceil(batch / tp), max(lengths) + ROOM))
    running.arrive(range(batch), lengths, [0] * batch)
    if mode == "graph":
        running.capture()
    return _timed(worker, bench, running.step, running.rewind)


def prefill_step(worker: Any, bench: Bench, model: Model, tp: int, tokens: int, length: int) -> Timing:
    """One prefill of `tokens` prompt tokens in sequences of `length` (a shorter last one takes what is left)."""
    lengths = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
    running = Batch(_decoder(worker, bench, model, tp, math.ceil(len(lengths) / tp), length + ROOM))
    prompts, ids = [[i % model.vocab_size for i in range(n)] for n in lengths], range(len(lengths))
    return _timed(worker, bench, lambda: running.prefill(ids, prompts), lambda: running.leave(ids))


#: Operators of `measurements.KEYS` by their function, which takes a point's values after worker and bench.
STEPS: Mapping[str, Callable[..., Timing]] = {
    "decode_step": decode_step,
    "prefill_step": prefill_step,
}


# ---- parts -----------------------------------------------------------------------------------------------------------


def _timed(worker: Any, bench: Bench, run: Call, undo: Call | None = lambda: None, calls: int = 1) -> Timing:
    """One run after the other, equally often on all workers; without `undo` short ones in batches."""
    return measure(
        run,
        device=worker.device,
        effort=bench.effort,
        calls=calls,
        undo=undo,
        slowest=lambda seconds: max(worker.all.agree(seconds)),
    )


def _decoder(worker: Any, bench: Bench, model: Model, tp: int, slots: int, max_tokens: int) -> Decoder:
    """A decoder whose cache has `slots` at TP 1. Weights stay for the next call; on a GPU those of one degree only."""
    kept = worker.state.setdefault("steps", {"weights": {}, "shape": None})
    if tp not in kept["weights"]:
        if worker.device != "cpu":
            kept["weights"].clear()
        kept["weights"][tp] = random_weights(model, tp, worker.rank % tp, worker.device, bench.torch_dtype)
    if kept["shape"] != (slots, max_tokens):
        kept["cache"] = None  # the old one goes before the new one comes
        kept["cache"] = KvCache(model, slots, max_tokens, worker.device, bench.torch_dtype)
        kept["shape"] = (slots, max_tokens)
    return Decoder(model, tp, worker.rank % tp, worker.ranks(tp), worker.device, kept["weights"][tp], kept["cache"])


# Kernels of one device, and communication between the workers -------------------------------------------------------


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
    return [partial(F.linear, tokens, weights[i]) for i in range(copies)]


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
        F.rms_norm(x, (hidden,), scale, 1e-6)
        turned = rotated * cosine + rotated.roll(head_dim // 2, -1) * sine
        cache[0][slots] = turned[:, heads:]
        cache[1][slots] = values
        F.rms_norm(x + residual, (hidden,), scale, 1e-6)
        gate, up = gate_up.chunk(2, dim=-1)
        _ = F.silu(gate) * up
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
    return _timed(worker, bench, calls[op], None, calls=2 if op == "send_recv" else 1)


# One point on all workers at once -------------------------------------------------------------------------------------

#: Benchmarks of one device: each gives the calls to time.
KERNELS: Mapping[str, Callable[..., list[Call]]] = {
    "copy": copy,
    "gemm": gemm,
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "memory_bound": layer_elementwise,
}


def warm_up(worker: Worker) -> None:
    """What torch does once only, seconds long, before the first point rather than in it."""
    ones = torch.ones(16, 16, device=worker.device)
    torch.nn.functional.linear(ones, ones)


def run_point(worker: Worker, bench: Bench, point: Point) -> Timing:
    """One point on this worker."""
    operator, bench = point.operator, replace(bench, device=worker.device)
    values: list[Any] = [bench.model if name == "model" else value for name, value in point.row().items()]
    try:
        with torch.inference_mode():  # as an engine does
            if operator in STEPS:
                return STEPS[operator](worker, bench, *values)
            if bench.device != "cpu":
                worker.state.pop("steps", None)  # the decoder's weights and cache: kernels need the memory
            if operator == "collective":
                return collective(worker, bench, *values)
            return bench.time(KERNELS[operator](bench, *values))
    except (RuntimeError, MemoryError, RlsimError) as error:  # out of memory, or what this build of torch lacks
        if bench.device != "cpu":
            torch.cuda.empty_cache()
        return Timing(0.0, 0.0, 0, impossible=(str(error).strip() or type(error).__name__).splitlines()[0][:200])


def joined(found: Sequence[Timing]) -> Timing:
    """The workers' times as one: their mean, with the spread of the repeats or the difference between the workers,
    whichever is larger. None if any of them could not."""
    if failed := [one for one in found if one.impossible]:
        return failed[0]
    seconds = np.array([one.seconds for one in found])
    mean = float(seconds.mean())
    apart = float(seconds.max() - seconds.min()) / 2.0 / mean if mean > 0.0 else 0.0
    spread = max(apart, float(np.mean([one.spread for one in found])))
    return Timing(mean, spread, min(one.repeats for one in found))
