"""Copies, matrix products, elementwise kernels and training of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from rlsim.calibrate.measure.attention import causal_attention
from rlsim.calibrate.measure.bench import Bench, Call
from rlsim.calibrate.measure.plan import elementwise_shape
from rlsim.models.model import Model


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


# Training -------------------------------------------------------------------------------------------------------------


def train_block(bench: Bench, model: Model, direction: str, tokens: int, length: int) -> list[Call]:
    """One decoder layer over `tokens` tokens in sequences of `length`: forward without gradients (as a log-prob pass
    runs it), or forward and backward to weights and input, nothing recomputed."""
    backward = direction == "forward_backward"
    sequences, attention = tokens // length, model.attention
    weights = {
        name: bench.tensor(*shape).requires_grad_(backward)
        for name, shape in {
            "qkv": (attention.q_dim + 2 * attention.kv_dim, model.hidden_size),
            "o": (model.hidden_size, attention.q_dim),
            "gate_up": (2 * model.intermediate_size, model.hidden_size),
            "down": (model.hidden_size, model.intermediate_size),
            "norm1": (model.hidden_size,),
            "norm2": (model.hidden_size,),
        }.items()
    }
    x = bench.tensor(sequences, length, model.hidden_size).requires_grad_(backward)
    angles = bench.tensor(length, model.head_dim // 2)
    rotation = (angles.cos(), angles.sin())
    gradient = bench.tensor(sequences, length, model.hidden_size)

    def forward() -> None:
        with torch.no_grad():
            block(x, weights, rotation, model)

    def forward_backward() -> None:
        block(x, weights, rotation, model).backward(gradient)
        for tensor in (x, *weights.values()):
            tensor.grad = None

    return [forward_backward if backward else forward]


def block(x: Any, weights: dict[str, Any], rotation: tuple[Any, Any], model: Model) -> Any:
    """One llama-like layer over (sequences, length, hidden) activations, causal attention within each sequence."""
    sequences, length, hidden = x.shape
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    normed = functional.rms_norm(x, (hidden,), weights["norm1"], 1e-6)
    qkv = functional.linear(normed, weights["qkv"]).view(sequences, length, heads + 2 * kv_heads, model.head_dim)
    qkv = qkv.transpose(1, 2)
    turned, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    cosine, sine = rotation
    first, second = turned.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    query, keys = turned[:, :heads], turned[:, heads:]
    seen = causal_attention(query, keys, values).transpose(1, 2).reshape(sequences, length, model.attention.q_dim)
    x = x + functional.linear(seen, weights["o"])
    normed = functional.rms_norm(x, (hidden,), weights["norm2"], 1e-6)
    gate, up = functional.linear(normed, weights["gate_up"]).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, weights["down"])
