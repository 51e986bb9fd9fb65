"""Copies, matrix products and elementwise kernels of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlsim.calibrate.measure.bench import Bench, Call


def copy(bench: Bench, kind: str, size: int) -> list[Call]:
    """`size` bytes copied on the device, or between it and pinned host memory."""
    import torch

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
    from torch.nn import functional

    copies = bench.copies(n * k * bench.dtype_bytes)
    weights, tokens = bench.tensor(copies, n, k), bench.tensor(m, k)
    return [partial(functional.linear, tokens, weights[i]) for i in range(copies)]


def layer_elementwise(
    bench: Bench, tokens: int, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int
) -> list[Call]:
    """All of a layer on `tokens` tokens that is neither product nor attention: twice residual and norm, the rotary
    embedding of queries and keys with the KV write, and the activation of a gated MLP of `width`."""
    import torch
    from torch.nn import functional

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
