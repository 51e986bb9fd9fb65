"""Layers of a language model: a kind of attention and a kind of feed-forward, with their weights and what they cache.

Either part may be missing: a layer of nemotron_h is one of the two (`NoAttention`, `NoFeedForward`). What stands in the
place of attention and keeps a state in the place of a KV cache is a kind of attention too (`Recurrent`).

Every quantity is that of one GPU under tensor parallelism of degree `tp`, which cuts heads and widths and replicates
what has neither (norms, routers, the latent projections); degree 1 gives the whole. Formulas are sums over the tensors
of transformers' modelling code (`models/*/modeling_*.py`, version 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix multiplication of a layer on one GPU: (tokens × `k_in`) · (`k_in` × `n_out`).

    `quantised`: its weights have the precision in which an engine serves the model. Those of a router and of the LM
    head never do (vLLM: `ignored_layers` of published checkpoints, and `Fp8Config` quantises no `ParallelLMHead`).
    """

    name: str
    n_out: int
    k_in: int
    quantised: bool = True

    @property
    def weights(self) -> int:
        return self.n_out * self.k_in


class Attention(ABC):
    """What a layer must say about its attention; `kv_heads` are heads that cache keys and values."""

    kv_heads: int
    #: Blocks that it is: each has a residual connection, and an all-reduce under TP.
    blocks: int = 1
    #: Whether the tokens that a query sees are those of its own chunk of `window_tokens`, not the last ones.
    chunked: bool = False

    @property
    def window_tokens(self) -> int | None:
        """The most tokens that are kept of a sequence; None for all of them."""
        return None

    @property
    def state_elements(self) -> float:
        """Numbers of the model's type kept for each sequence, whatever its length."""
        return 0

    @abstractmethod
    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        """The matrix multiplications, in order."""

    @abstractmethod
    def parameters(self, hidden: int, tp: int) -> int:
        """Weights, with all that is no matrix multiplication: biases, norms, sinks, convolutions."""

    @property
    @abstractmethod
    def head_elements(self) -> int:
        """Numbers cached by each of `kv_heads` for each token that is kept."""

    @property
    @abstractmethod
    def tensors(self) -> int:
        """Weights and biases that have a name of their own in a checkpoint."""

    @property
    @abstractmethod
    def split(self) -> dict[str, int]:
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


def _weights(linears: tuple[Linear, ...]) -> int:
    return sum(linear.weights for linear in linears)


@dataclass(frozen=True)
class NoAttention(Attention):
    """That of a layer which is a feed-forward alone."""

    kv_heads = 0
    blocks = 0
    head_elements = 0
    tensors = 0

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:  # noqa: ARG002
        return ()

    def parameters(self, hidden: int, tp: int) -> int:  # noqa: ARG002
        return 0

    @property
    def split(self) -> dict[str, int]:
        return {}

    @property
    def special(self) -> tuple[str, ...]:
        return ("layers without attention",)


@dataclass(frozen=True, kw_only=True)
class FullAttention(Attention):
    """Grouped-query attention (Ainslie et al. 2023) over all tokens before, or over the last `window_tokens`.

    `chunked`: not over the last tokens, but over those of the same chunk of `window_tokens` (llama4). `head_norms`: an
    RMS norm over each query and key head (qwen3). `whole_norms`: one over all query heads together and one over all key
    heads (olmo2). `gated`: the queries' projection also gives a gate of the output
    (qwen3_next). `sinks`: a learned logit per head that takes attention from the tokens (gpt_oss).
    """

    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    chunked: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    gated: bool = False
    sinks: bool = False

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together (as much again for values)."""
        return self.kv_heads * self.head_dim

    def _qkv_dim(self, tp: int) -> int:
        return (1 + self.gated) * (self.q_dim // tp) + 2 * self.kv_heads_per_gpu(tp) * self.head_dim

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        return Linear("qkv", self._qkv_dim(tp), hidden), Linear("o", hidden, self.q_dim // tp)

    def parameters(self, hidden: int, tp: int) -> int:
        biases = self.qkv_bias * self._qkv_dim(tp) + self.o_bias * hidden
        norms = self.head_norms * 2 * self.head_dim
        norms += self.whole_norms * (self.q_dim // tp + self.kv_heads_per_gpu(tp) * self.head_dim)
        small = biases + norms + self.sinks * (self.heads // tp)
        return _weights(self.linears(hidden, tp)) + small

    @property
    def head_elements(self) -> int:
        """A key and a value."""
        return 2 * self.head_dim

    @property
    def tensors(self) -> int:
        norms = 2 * (self.head_norms or self.whole_norms)
        return 4 + 3 * self.qkv_bias + self.o_bias + norms + self.sinks

    @property
    def split(self) -> dict[str, int]:
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
class LatentAttention(Attention):
    """Multi-head latent attention (MLA, DeepSeek-V2 2024, section 2.1): keys and values are made of a cached latent.

    Queries come through a latent of `q_rank`, or straight from the hidden state where that is None. A key head has
    `nope_dim` numbers of its own and `rope_dim`, with the position, that all heads share.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False  # of the projections from the hidden state and of o

    kv_heads = 1  # the latent, which every GPU of a TP group needs whole

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        heads = self.heads // tp
        q_dim = heads * (self.nope_dim + self.rope_dim)
        cached, made = Linear("kv_a", self.kv_rank + self.rope_dim, hidden), self.kv_b(tp)
        output = Linear("o", hidden, heads * self.v_dim)
        if self.q_rank is None:
            return Linear("q", q_dim, hidden), cached, made, output
        return Linear("q_a", self.q_rank, hidden), Linear("q_b", q_dim, self.q_rank), cached, made, output

    def kv_b(self, tp: int) -> Linear:
        """The product that makes keys and values of latents."""
        return Linear("kv_b", self.heads // tp * (self.nope_dim + self.v_dim), self.kv_rank)

    def parameters(self, hidden: int, tp: int) -> int:
        q_rank = self.q_rank or 0
        biases = self.bias * (q_rank + self.kv_rank + self.rope_dim + hidden)
        return _weights(self.linears(hidden, tp)) + q_rank + self.kv_rank + biases

    @property
    def head_elements(self) -> int:
        """The latent, and the part of the key that all heads share."""
        return self.kv_rank + self.rope_dim

    @property
    def tensors(self) -> int:
        through_latent = self.q_rank is not None
        return 5 + 2 * through_latent + self.bias * (2 + through_latent)

    @property
    def split(self) -> dict[str, int]:
        return {"heads": self.heads}

    @property
    def special(self) -> tuple[str, ...]:
        return ("latent attention (MLA)",)


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
    """A gated delta net (Yang et al. 2024; qwen3_next)."""

    key_heads: int
    value_heads: int
    key_dim: int  # of one head
    value_dim: int

    def _widths(self, tp: int) -> tuple[int, int]:
        return self.key_heads // tp * self.key_dim, self.value_heads // tp * self.value_dim

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        key, value = self._widths(tp)
        into = Linear("qkvz", 2 * key + 2 * value, hidden), Linear("ba", 2 * (self.value_heads // tp), hidden)
        return (*into, Linear("o", hidden, value))

    def parameters(self, hidden: int, tp: int) -> int:
        key, value = self._widths(tp)
        small = self.kernel * (2 * key + value) + 2 * (self.value_heads // tp) + self.value_dim
        return _weights(self.linears(hidden, tp)) + small

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
    def tensors(self) -> int:
        return 7

    @property
    def split(self) -> dict[str, int]:
        return {"key heads": self.key_heads, "value heads": self.value_heads}

    @property
    def special(self) -> tuple[str, ...]:
        return ("linear attention (gated delta net)",)


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

    def _convolved(self, tp: int) -> int:
        """A single group is on every GPU; more are cut, as vLLM's `MambaMixer2` and Megatron Core do."""
        return self.heads // tp * self.head_dim + 2 * max(self.groups // tp, 1) * self.state_dim

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        heads = self.heads // tp
        into = heads * self.head_dim + self._convolved(tp) + heads  # gate, what is convolved, time steps
        return Linear("in", into, hidden), Linear("o", hidden, heads * self.head_dim)

    def parameters(self, hidden: int, tp: int) -> int:
        """With taps and bias of the convolution, three numbers a head (A, D, dt_bias) and the norm of the output."""
        heads = self.heads // tp
        small = (self.kernel + 1) * self._convolved(tp) + 3 * heads + heads * self.head_dim
        return _weights(self.linears(hidden, tp)) + small

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
    def tensors(self) -> int:
        return 8

    @property
    def split(self) -> dict[str, int]:
        return {"Mamba heads": self.heads} | ({"groups": self.groups} if self.groups > 1 else {})

    @property
    def special(self) -> tuple[str, ...]:
        return ("state-space layers (Mamba-2)",)


class FeedForward(ABC):
    """What a layer must say about its feed-forward part."""

    blocks: int = 1
    #: Whether a gate is multiplied with what goes in: a third matrix (SwiGLU, Shazeer 2020).
    gated: bool = True

    @property
    def projections(self) -> int:
        """Matrices from the hidden state to the width."""
        return 1 + self.gated

    @abstractmethod
    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        """The matrix multiplications that every token takes part in, in order."""

    @abstractmethod
    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights on one GPU."""

    def grouped_weights(self, hidden: int, tp: int = 1) -> int:  # noqa: ARG002
        """Weights of all experts' matrices on one GPU."""
        return 0

    def routed_weights(self, hidden: int) -> int:  # noqa: ARG002
        """Those of the experts that one token is routed to."""
        return 0

    def idle_parameters(self, hidden: int) -> int:  # noqa: ARG002
        """Weights and biases of the experts that a token is not routed to."""
        return 0

    @property
    @abstractmethod
    def active_width(self) -> int:
        """Width that one token passes."""

    @property
    @abstractmethod
    def tensors(self) -> int:
        """Weights and biases by name, those of every expert apart."""

    @property
    def stacked_tensors(self) -> int:
        """The same where a layer's experts are stacked."""
        return self.tensors

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """What TP must divide."""


@dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """That of a layer which is attention alone."""

    blocks = 0
    active_width = 0
    tensors = 0
    widths = ()

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:  # noqa: ARG002
        return ()

    def parameters(self, hidden: int, tp: int = 1) -> int:  # noqa: ARG002
        return 0


@dataclass(frozen=True, kw_only=True)
class Dense(FeedForward):
    """An MLP; without a gate it has two matrices instead of three (nemotron_h)."""

    width: int
    bias: bool = False
    gated: bool = True

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        width = self.width // tp
        name = "gate_up" if self.gated else "up"
        return Linear(name, self.projections * width, hidden), Linear("down", hidden, width)

    def parameters(self, hidden: int, tp: int = 1) -> int:
        biases = self.bias * (self.projections * (self.width // tp) + hidden)
        return _weights(self.linears(hidden, tp)) + biases

    @property
    def active_width(self) -> int:
        return self.width

    @property
    def tensors(self) -> int:
        return (self.projections + 1) * (1 + self.bias)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True, kw_only=True)
class Experts(FeedForward):
    """A mixture of MLPs of `width`: every token passes `active` of `experts`, and one of `shared_width` besides.

    `shared_gate`: the shared expert's output has a gate of one number per token (qwen2_moe). `router_bias`: of the
    router (gpt_oss), or what balances the load of its experts (deepseek_v3). `bias`: of every expert (gpt_oss).
    `latent_width`: tokens are brought to it before their experts, and back after them (Nemotron 3 Super's LatentMoE,
    on every GPU whole; the shared expert has its own input); 0: they are not.
    """

    experts: int
    active: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    gated: bool = True
    latent_width: int = 0

    def token_width(self, hidden: int) -> int:
        """Numbers of a token as experts take it and give it back."""
        return self.latent_width or hidden

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        """The router, the way to the experts' latent and back, and the shared expert; the experts themselves are
        grouped products."""
        found = [Linear("router", self.experts, hidden, quantised=False)]
        if self.latent_width:
            found += [Linear("latent_in", self.latent_width, hidden), Linear("latent_out", hidden, self.latent_width)]
        if self.shared_width:
            found += Dense(width=self.shared_width, gated=self.gated).linears(hidden, tp)
        if self.shared_gate:
            found.append(Linear("shared_gate", 1, hidden, quantised=False))
        return tuple(found)

    def _expert_weights(self, hidden: int, tp: int = 1) -> int:
        return (self.projections + 1) * (self.width // tp) * self.token_width(hidden)

    def _expert_biases(self, hidden: int, tp: int = 1) -> int:
        return self.bias * (self.projections * (self.width // tp) + self.token_width(hidden))

    def grouped_weights(self, hidden: int, tp: int = 1) -> int:
        return self.experts * self._expert_weights(hidden, tp)

    def routed_weights(self, hidden: int) -> int:
        return self.active * self._expert_weights(hidden)

    def idle_parameters(self, hidden: int) -> int:
        return (self.experts - self.active) * (self._expert_weights(hidden) + self._expert_biases(hidden))

    def parameters(self, hidden: int, tp: int = 1) -> int:
        biases = self.experts * (self.router_bias + self._expert_biases(hidden, tp))
        return _weights(self.linears(hidden, tp)) + self.grouped_weights(hidden, tp) + biases

    @property
    def active_width(self) -> int:
        """Width of all experts together that one token passes."""
        return self.active * self.width + self.shared_width

    @property
    def tensors(self) -> int:
        matrices = (self.projections + 1) * self.experts
        return self.stacked_tensors + (matrices - 2) * (1 + self.bias)

    @property
    def stacked_tensors(self) -> int:
        """Where a layer's experts are two tensors (and two biases)."""
        shared = (self.projections + 1) * bool(self.shared_width) + self.shared_gate
        return 1 + self.router_bias + 2 * (1 + self.bias) + 2 * bool(self.latent_width) + shared

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width, self.shared_width) if self.shared_width else (self.width,)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: attention and feed-forward, and `norms` RMS norms over the hidden state around them."""

    hidden: int
    attention: Attention
    mlp: FeedForward
    norms: int = 2

    @property
    def blocks(self) -> int:
        """Parts with a residual connection: two, or one where attention or feed-forward is missing."""
        return self.attention.blocks + self.mlp.blocks

    def linears(self, tp: int = 1) -> tuple[Linear, ...]:
        """The matrix multiplications on one GPU, in order (Megatron's column-row split); experts are not among them."""
        return (*self.attention.linears(self.hidden, tp), *self.mlp.linears(self.hidden, tp))

    def parameters_per_gpu(self, tp: int) -> int:
        """Weights on one GPU of a TP group."""
        around = self.norms * self.hidden
        return self.attention.parameters(self.hidden, tp) + self.mlp.parameters(self.hidden, tp) + around

    def quantised_weights(self, tp: int = 1) -> int:
        """Those of them that have the precision of the layers' matrices; experts are not among them."""
        return _weights(tuple(linear for linear in self.linears(tp) if linear.quantised))

    def expert_weights(self, tp: int = 1) -> int:
        """Those of them that are matrices of experts; 0 for a dense layer."""
        return self.mlp.grouped_weights(self.hidden, tp)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.parameters_per_gpu(1)

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes: without those of the experts that it is not routed to."""
        return self.parameters - self.mlp.idle_parameters(self.hidden)

    @property
    def active_weights(self) -> int:
        """Weights of the matrices that one token passes (biases and norms are not multiplications)."""
        return _weights(self.linears()) + self.mlp.routed_weights(self.hidden)

    def tensors(self, *, stacked: bool = False) -> int:
        """Weights and biases that have a name of their own in a checkpoint; `stacked`: experts of a layer are two."""
        mlp = self.mlp.stacked_tensors if stacked else self.mlp.tensors
        return self.attention.tensors + self.norms + mlp

    def splits(self, tp: int, expert_tp: int | None = None) -> bool:
        """Whether heads and widths split evenly over `tp` GPUs (KV heads are replicated when there are too few), and
        experts over `expert_tp` if that is another number."""
        for name, count in self.attention.split.items():
            if count % tp and not (name in REPLICATED and tp % count == 0):
                return False
        first, *others = self.mlp.widths or (0,)
        degree = expert_tp or tp if isinstance(self.mlp, Experts) else tp
        return first % degree == 0 and not any(width % tp for width in others)
