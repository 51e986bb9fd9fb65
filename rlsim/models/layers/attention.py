"""Kinds of attention, and what stands in its place and keeps a state in the place of a KV cache (`Recurrent`).

A layer may have none (`NoAttention`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlsim.models.layers.linear import Linear, Part


class Attention(Part):
    """What a layer must say about its attention; `kv_heads` are heads that cache keys and values."""

    kv_heads: int
    #: Whether the tokens that a query sees are those of its own chunk of `window_tokens`, not the last ones.
    chunked: bool = False

    @property
    def window_tokens(self) -> int | None:
        """The most tokens that are kept of a sequence; None for all of them."""
        return None

    @property
    def read_tokens(self) -> int | None:
        """The most of them that a query sees; None for all."""
        return self.window_tokens

    @property
    def state_elements(self) -> float:
        """Numbers of the model's type kept for each sequence, whatever its length."""
        return 0

    @property
    def index_bytes(self) -> float:
        """Bytes cached for each token that is kept, on every GPU and whatever the precision of the KV cache."""
        return 0

    @property
    @abstractmethod
    def head_elements(self) -> int:
        """Numbers cached by each of `kv_heads` for each token that is kept."""

    @property
    @abstractmethod
    def split(self) -> Mapping[str, int]:
        """What TP must divide, by name; it may be a multiple of those in `REPLICATED`."""

    @property
    @abstractmethod
    def special(self) -> tuple[str, ...]:
        """What sets it apart from plain grouped-query attention over all tokens before, by name."""

    def kv_heads_per_gpu(self, tp: int) -> int:
        """KV heads on one GPU; at least one, so that heads are replicated when `tp` exceeds their number."""
        return max(self.kv_heads // tp, 1)

    def cached_elements(self, tp: int = 1) -> int:
        """Numbers cached on one GPU for each token that is kept."""
        return self.kv_heads_per_gpu(tp) * self.head_elements


#: What each GPU has a copy of where there are fewer than GPUs.
REPLICATED = ("KV heads",)


@dataclass(frozen=True)
class NoAttention(Attention):
    """That of a layer which is a feed-forward alone."""

    kv_heads = 0
    blocks = 0
    head_elements = 0
    split = MappingProxyType[str, int]({})
    special = ("layers without attention",)

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:  # noqa: ARG002
        return ()


@dataclass(frozen=True, kw_only=True)
class FullAttention(Attention):
    """Grouped-query attention (Ainslie et al. 2023) over all tokens before, or over the last `window_tokens`.

    `chunked`: not over the last tokens, but over those of the same chunk of `window_tokens` (llama4). `head_norms`: an
    RMS norm over each query and key head (qwen3). `whole_norms`: one over all query heads together and one over all key
    heads (olmo2). `gated`: the queries' projection also gives a gate of the output (qwen3_next). `sinks`: a learned
    logit per head that takes attention from the tokens (gpt_oss). `v_dim`: numbers of a value, if not as many as of a
    key (mimo_v2_flash). `one_kv`: one projection makes keys and values (gemma4), which are cached apart.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int = 0
    window_tokens: int | None = None
    chunked: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    gated: bool = False
    sinks: bool = False
    one_kv: bool = False

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def out_dim(self) -> int:
        """Width of what all query heads give."""
        return self.heads * (self.v_dim or self.head_dim)

    def _qkv_dim(self, tp: int) -> int:
        made = self.head_dim if self.one_kv else self.head_elements
        return (1 + self.gated) * (self.q_dim // tp) + self.kv_heads_per_gpu(tp) * made

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        into = Linear("qkv", self._qkv_dim(tp), hidden, bias=self.qkv_bias, matrices=3 - self.one_kv)
        return into, Linear("o", hidden, self.out_dim // tp, bias=self.o_bias)

    def vectors(self, tp: int) -> tuple[int, ...]:
        of_heads = (self.head_dim,) * 2 * self.head_norms
        of_all = (self.q_dim // tp, self.kv_heads_per_gpu(tp) * self.head_dim) * self.whole_norms
        return of_heads + of_all + (self.heads // tp,) * self.sinks

    @property
    def head_elements(self) -> int:
        """A key and a value."""
        return self.head_dim + (self.v_dim or self.head_dim)

    @property
    def split(self) -> Mapping[str, int]:
        return {"heads": self.heads, "KV heads": self.kv_heads}

    @property
    def special(self) -> tuple[str, ...]:
        kind = "chunked" if self.chunked else "sliding-window"
        found = {
            f"{kind} attention ({self.window_tokens} tokens)": self.window_tokens is not None,
            "attention with an output gate": self.gated,
            "attention sinks": self.sinks,
        }
        return tuple(name for name, there in found.items() if there)


@dataclass(frozen=True, kw_only=True)
class Index:
    """What chooses the `topk` tokens that a query of sparse attention sees (DeepSeek-V3.2 2025, section 2).

    `heads` queries of `head_dim`, made of the queries' latent, meet one key of each token before, in FP8; how much each
    of them counts is a number for each head. Every GPU of a TP group does all of it (vLLM: `Indexer`). `shared`: the
    tokens are those that a layer before has chosen (GLM-5.2).
    """

    heads: int
    head_dim: int
    topk: int
    shared: bool = False

    def linears(self, hidden: int, q_rank: int) -> tuple[Linear, ...]:
        """Its products over all tokens."""
        if self.shared:
            return ()
        queries, key = Linear("index_q", self.heads * self.head_dim, q_rank), Linear("index_k", self.head_dim, hidden)
        return queries, key, Linear("index_weights", self.heads, hidden, quantised=False)

    @property
    def key_bytes(self) -> float:
        """Bytes cached of a token: its key in FP8, and a scale of four for each 128 numbers."""
        return 0 if self.shared else self.head_dim + 4 * -(-self.head_dim // 128)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (MLA, DeepSeek-V2 2024, section 2.1): keys and values are made of a cached latent.

    Queries come through a latent of `q_rank`, or straight from the hidden state where that is None. A key head has
    `nope_dim` numbers of its own and `rope_dim`, with the position, that all heads share. With an `index` a query sees
    no more than its `topk` tokens.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False  # of the projections from the hidden state and of o
    index: Index | None = None

    kv_heads = 1  # the latent, which every GPU of a TP group needs whole

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        heads = self.heads // tp
        q_dim = heads * (self.nope_dim + self.rope_dim)
        cached, made = Linear("kv_a", self.kv_rank + self.rope_dim, hidden, bias=self.bias), self.kv_b(tp)
        output = Linear("o", hidden, heads * self.v_dim, bias=self.bias)
        if self.q_rank is None:
            return Linear("q", q_dim, hidden), cached, made, output
        chosen = self.index.linears(hidden, self.q_rank) if self.index else ()
        queries = Linear("q_a", self.q_rank, hidden, bias=self.bias), Linear("q_b", q_dim, self.q_rank)
        return (*queries, cached, *chosen, made, output)

    def kv_b(self, tp: int) -> Linear:
        """The product that makes keys and values of latents."""
        return Linear("kv_b", self.heads // tp * (self.nope_dim + self.v_dim), self.kv_rank)

    def vectors(self, tp: int) -> tuple[int, ...]:  # noqa: ARG002
        norms = (self.kv_rank,) if self.q_rank is None else (self.q_rank, self.kv_rank)
        return norms + ((self.index.head_dim,) * 2 if self.index and not self.index.shared else ())

    @property
    def head_elements(self) -> int:
        """The latent, and the part of the key that all heads share."""
        return self.kv_rank + self.rope_dim

    @property
    def index_bytes(self) -> float:
        return self.index.key_bytes if self.index else 0

    @property
    def read_tokens(self) -> int | None:
        return self.index.topk if self.index else None

    @property
    def split(self) -> Mapping[str, int]:
        return {"heads": self.heads}

    @property
    def special(self) -> tuple[str, ...]:
        return ("latent attention (MLA)", *(["sparse attention"] if self.index else []))


@dataclass(frozen=True, kw_only=True)
class Recurrent(Attention):
    """A state of constant size in the place of a KV cache, behind a convolution over the last `kernel` tokens."""

    kernel: int
    state_scale: float = 1  # bytes of a number of the state over those of the model's type

    kv_heads = 0
    head_elements = 0

    @property
    @abstractmethod
    def state(self) -> int:
        """Numbers of the state of all heads."""

    @property
    @abstractmethod
    def convolved(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def inner(self) -> int:
        """Width of the output before its projection."""

    @property
    def state_elements(self) -> float:
        """The state, and the last kernel − 1 inputs of the convolution.

        As vLLM keeps them: `gated_delta_net_state_shape`, `mamba2_state_shape` and the types of its `mamba_utils.py`.
        """
        return self.state * self.state_scale + (self.kernel - 1) * self.convolved


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Recurrent):
    """A gated delta net (Yang et al. 2024; qwen3_next).

    `gate_rank`: the decay is one of each channel of a key, and it and the output's gate come through a latent of so
    many numbers (Kimi delta attention, Kimi Linear 2025); 0: one of each head, as products of the hidden state.
    """

    key_heads: int
    value_heads: int
    key_dim: int  # of one head
    value_dim: int
    gate_rank: int = 0
    special = ("linear attention (gated delta net)",)

    def _widths(self, tp: int) -> tuple[int, int]:
        return self.key_heads // tp * self.key_dim, self.value_heads // tp * self.value_dim

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        (key, value), heads, rank = self._widths(tp), self.value_heads // tp, self.gate_rank
        if not rank:
            into = Linear("qkvz", 2 * key + 2 * value, hidden), Linear("ba", 2 * heads, hidden)
            return (*into, Linear("o", hidden, value))
        into = Linear("qkv", 2 * key + value, hidden, matrices=3), Linear("b", heads, hidden)
        gates = Linear("fg_a", 2 * rank, hidden, matrices=2), Linear("f_b", key, rank), Linear("g_b", value, rank)
        return (*into, *gates, Linear("o", hidden, value))

    def vectors(self, tp: int) -> tuple[int, ...]:
        (key, value), heads = self._widths(tp), self.value_heads // tp
        if self.gate_rank:  # each of queries, keys and values has a convolution, and each channel a time step
            return self.kernel * key, self.kernel * key, self.kernel * value, heads, key, self.value_dim
        return self.kernel * (2 * key + value), heads, heads, self.value_dim

    @property
    def state(self) -> int:
        """key_dim × value_dim of every value head."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def split(self) -> Mapping[str, int]:
        return {"key heads": self.key_heads, "value heads": self.value_heads}


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrent):
    """A state-space mixer (Dao and Gu 2024, "Transformers are SSMs"; nemotron_h).

    Heads of `head_dim` channels keep `state_dim` numbers for each; those of a group share what writes and reads them.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    chunk_tokens: int  # of a chunk in which prompts and training go through
    special = ("state-space layers (Mamba-2)",)

    def _convolved(self, tp: int) -> int:
        """A single group is on every GPU; more are cut, as vLLM's `MambaMixer2` and Megatron Core do."""
        return self.heads // tp * self.head_dim + 2 * max(self.groups // tp, 1) * self.state_dim

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        heads = self.heads // tp
        into = heads * self.head_dim + self._convolved(tp) + heads  # gate, what is convolved, time steps
        return Linear("in", into, hidden), Linear("o", hidden, heads * self.head_dim)

    def vectors(self, tp: int) -> tuple[int, ...]:
        """Taps and bias of the convolution, three numbers a head (A, D, dt_bias) and the norm of the output."""
        heads, convolved = self.heads // tp, self._convolved(tp)
        return self.kernel * convolved, convolved, heads, heads, heads, heads * self.head_dim

    @property
    def state(self) -> int:
        return self.inner * self.state_dim

    @property
    def convolved(self) -> int:
        return self._convolved(1)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def split(self) -> Mapping[str, int]:
        return {"Mamba heads": self.heads} | ({"groups": self.groups} if self.groups > 1 else {})
