"""Layers of a language model: a kind of attention and a kind of feed-forward, with their weights and what they cache.

Either part may be missing: a layer of nemotron_h is one of the two.

Every quantity is that of one GPU under tensor parallelism of degree `tp`, which cuts heads and widths and replicates
what has neither (norms, routers, the latent projections); degree 1 gives the whole. Formulas are sums over the tensors
of transformers' modelling code (`models/*/modeling_*.py`, version 5).
"""

from rlsim.models.layers.attention import (
    Attention,
    FullAttention,
    Index,
    LatentAttention,
    LinearAttention,
    Mamba2,
    NoAttention,
    Recurrent,
)
from rlsim.models.layers.feed_forward import Dense, Experts, FeedForward, NoFeedForward
from rlsim.models.layers.layer import Layer
from rlsim.models.layers.linear import Linear

__all__ = [
    "Attention",
    "Dense",
    "Experts",
    "FeedForward",
    "FullAttention",
    "Index",
    "LatentAttention",
    "Layer",
    "Linear",
    "LinearAttention",
    "Mamba2",
    "NoAttention",
    "NoFeedForward",
    "Recurrent",
]
