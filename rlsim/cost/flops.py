"""FLOPs of a model's forward pass over sequences of uneven length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rlsim.models.layers import Attention, FullAttention, LatentAttention, Layer, LinearAttention, Mamba2, NoAttention
from rlsim.models.model import Model

Floats = npt.NDArray[np.float64]

# Attention ------------------------------------------------------------------------------------------------------------

# What the attention of one layer computes, moves and keeps in a pass over whole sequences (training, log-probs).
#
# FLOPs are exact counts of the matrix products of each kind in `rlsim.models.layers`; which share of the peak the
# kernels reach is measured for full attention with grouped queries (`TrainEfficiency.attention`) and for gated delta
# nets (`CHUNKED_FLOP_PER_S`), and assumed for the others.

#: Tokens of a chunk in the kernels of gated delta nets (flash-linear-attention, `chunk_gated_delta_rule`).
DELTA_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Reach:
    """Which keys a query sees, itself included: all before it, the last `window_tokens`, or those of its chunk."""

    window_tokens: int | None = None
    chunked: bool = False

    def pairs(self, lengths: Floats) -> Floats:
        """Pairs of a query and a key that it sees, for sequences of `lengths` tokens, as an array of their shape."""
        causal = 0.5 * lengths * (lengths + 1.0)
        if self.window_tokens is None:
            return causal
        window = float(self.window_tokens)
        whole = 0.5 * window * (window + 1.0)
        if self.chunked:
            rest = lengths % window
            return (lengths - rest) / window * whole + 0.5 * rest * (rest + 1.0)
        beyond = lengths - window
        return causal - 0.5 * beyond * (beyond + 1.0) * (beyond > 0)


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """One layer's attention in a forward pass, before TP and CP divide it; widths are elements for each token.

    - `pair_flops`: FLOPs of a pair of a query and a key: their product, and that of the probability and the value.
    - `token_flops`: FLOPs of a token beside the projections, whatever the length (linear attention).
    - `kept`: what the backward pass needs: queries, keys, values and output; `latent`: the same of what TP replicates.
    - `moved`: elements that element-wise kernels read and write; `latent_moved`: the same of what TP replicates.
    - `exchanged`: keys and values, which context parallelism exchanges; Ulysses queries and outputs too (`queried`).
    """

    reach: Reach = Reach()
    pair_flops: float = 0.0
    kept: float = 0
    moved: float = 0
    exchanged: float = 0
    queried: float = 0
    token_flops: float = 0.0
    latent: float = 0.0
    latent_moved: float = 0.0


@lru_cache(maxsize=512)
def attention_work(attention: Attention) -> AttentionWork:
    """The work of a layer with such attention.

    - Grouped queries: 4 · q_dim FLOPs a pair (Narayanan et al. 2021), fewer with smaller values; rotary embedding reads
      and writes queries and keys; a gate of the output (qwen3_next) reads both and writes one.
    - Latent attention (DeepSeek-V2 2024, section 2.1) is not absorbed in training: keys of nope + rope numbers and
      values of v_dim are made for every head, so that a pair costs 2 · heads · (nope + rope + v_dim) FLOPs. Queries and
      keys are put together and turned (read and written), both latents normed. Where an index chooses tokens, all pairs
      are computed and masked, as Megatron Core's `dsa.py` does, and 2 · heads · head_dim of the index come to each.
    - A gated delta net in chunks of C tokens (Yang et al. 2024, section 3): for each value head and token three
      products with the state, 6 · k_dim · v_dim, and inside the chunk 6 · C · k_dim + 4 · C · v_dim; inverting a
      chunk's triangle is left out. The convolution reads and writes queries, keys and values, the norm of queries and
      keys and the gated norm of the output likewise.
    - A state-space mixer in chunks of C tokens (Dao and Gu 2024, "Transformers are SSMs", section 6): for each token
      2 · C · state_dim a group (what is read with what is written), 2 · C · head_dim a head (that with the inputs) and
      4 · head_dim · state_dim a head (into the state and out of it). The convolution reads and writes its channels, the
      gated norm the output.

    Raises `TypeError` for a kind of attention that `rlsim.models.layers` does not have.
    """
    match attention:
        case FullAttention():
            q_dim, out_dim, both = attention.q_dim, attention.out_dim, attention.cached_elements()
            return AttentionWork(
                reach=Reach(attention.window_tokens, attention.chunked),
                pair_flops=2.0 * (q_dim + out_dim),
                kept=q_dim + out_dim + both + attention.gated * q_dim,
                moved=2 * (q_dim + attention.kv_dim) + attention.gated * 3 * q_dim,
                exchanged=both,
                queried=q_dim + out_dim,
            )
        case LatentAttention():
            q_dim, v_dim = (
                attention.heads * (attention.nope_dim + attention.rope_dim),
                attention.heads * attention.v_dim,
            )
            ranks, index = (attention.q_rank or 0) + attention.kv_rank, attention.index
            return AttentionWork(
                pair_flops=2.0 * (q_dim + v_dim + (index.heads * index.head_dim if index and not index.shared else 0)),
                kept=2 * (q_dim + v_dim),
                moved=4 * q_dim,
                exchanged=q_dim + v_dim,
                queried=q_dim + v_dim,
                latent=2 * ranks + attention.rope_dim,
                latent_moved=2 * ranks,
            )
        case LinearAttention():
            key, value = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            inside = DELTA_CHUNK_TOKENS * (6 * attention.key_dim + 4 * attention.value_dim)
            return AttentionWork(
                token_flops=attention.value_heads * (6.0 * attention.key_dim * attention.value_dim + inside),
                kept=2 * (2 * key + value) + 2 * value,
                moved=2 * (2 * key + value) + 4 * key + 3 * value,
                exchanged=key + value,
                queried=key + value,
            )
        case Mamba2():
            chunk, state = attention.chunk_tokens, attention.state_dim
            each = 2.0 * chunk * attention.head_dim + 4.0 * attention.head_dim * state
            return AttentionWork(
                token_flops=2.0 * chunk * state * attention.groups + attention.heads * each,
                kept=2 * attention.convolved + 2 * attention.inner,
                moved=2 * attention.convolved + 3 * attention.inner,
                exchanged=attention.convolved,
                queried=attention.inner,
            )
        case NoAttention():
            return AttentionWork()
        case _:
            raise TypeError(f"no work is known for {type(attention).__name__}")


def moved_elements(layer: Layer) -> tuple[float, float, float]:
    """Elements that a layer's element-wise kernels, fused, read and write for each token, forward.

    Those that sequence parallelism cuts are norms (2 hidden each) and residual additions (3 hidden for each block);
    those that nothing cuts latents; those that TP cuts attention's (`AttentionWork.moved`: rotary embedding reads and
    writes q and k) and gated activation (3 widths of the MLP, or of all experts that a token passes; 2 without a gate).
    """
    work, mlp = attention_work(layer.attention), layer.mlp
    around = (3 * layer.blocks + 2 * layer.norms) * layer.hidden
    return around, work.latent_moved, work.moved + (mlp.projections + 1) * mlp.active_width


# A model --------------------------------------------------------------------------------------------------------------


def forward_flops(model: Model, lengths: npt.ArrayLike) -> float:
    """FLOPs of one forward pass over sequences of `lengths` tokens, attention exactly causal.

    2 per token and active weight of the linear layers and the head, and in each layer those of its attention for each
    pair of a query and a key that it sees (`rlsim.cost.flops`: 4 · q_dim for each of n(n+1)/2 pairs). A training
    step without recomputation costs three times the linear part (and with a flash kernel 3.5 times that of attention).
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
