"""FLOPs of a model's forward pass over sequences of uneven length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlsim.cost.attention_work import Reach, attention_work
from rlsim.models.model import Model


def forward_flops(model: Model, lengths: npt.ArrayLike) -> float:
    """FLOPs of one forward pass over sequences of `lengths` tokens, attention exactly causal.

    2 per token and active weight of the linear layers and the head, and in each layer those of its attention for each
    pair of a query and a key that it sees (`rlsim.cost.attention_work`: 4 · q_dim for each of n(n+1)/2 pairs). A
    training step without recomputation costs three times the linear part (and 3.5 times the attention part with a flash
    kernel).
    """
    n = np.asarray(lengths, dtype=np.float64)
    pairs = sum(flops * float(reach.pairs(n).sum()) for reach, flops in pair_flops(model).items())
    return float(n.sum()) * (linear_flops(model) + token_flops(model)) + pairs


def linear_flops(model: Model) -> float:
    """FLOPs of a token in the linear layers and the head."""
    head = model.hidden_size * (1 if model.scalar_head else model.vocab_size)
    return 2.0 * (sum(count * layer.active_weights for layer, count in model.groups.items()) + head)


def token_flops(model: Model) -> float:
    """FLOPs of a token in all attention, beside projections and pairs."""
    return sum(count * attention_work(layer.attention).token_flops for layer, count in model.groups.items())


def pair_flops(model: Model) -> dict[Reach, float]:
    """FLOPs of a pair of a query and a key in all layers, by the keys that their queries see."""
    found: dict[Reach, float] = {}
    for layer, count in model.groups.items():
        work = attention_work(layer.attention)
        found[work.reach] = found.get(work.reach, 0.0) + count * work.pair_flops
    return found
