"""Layers of a transformer: a kind of attention and a kind of feed-forward, with their weights and what they cache.

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
        """What TP must divide, by name."""

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


def _weights(linears: tuple[Linear, ...]) -> int:
    return sum(linear.weights for linear in linears)


@dataclass(frozen=True, kw_only=True)
class FullAttention(Attention):
    """Grouped-query attention (Ainslie et al. 2023) over all tokens before, or over the last `window_tokens`.

    `chunked`: not over the last tokens, but over those of the same chunk of `window_tokens` (llama4). `head_norms`: an
    RMS norm over each query and key head (qwen3). `gated`: the queries' projection also gives a gate of the output
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
        small = biases + self.head_norms * 2 * self.head_dim + self.sinks * (self.heads // tp)
        return _weights(self.linears(hidden, tp)) + small

    @property
    def head_elements(self) -> int:
        """A key and a value."""
        return 2 * self.head_dim

    @property
    def tensors(self) -> int:
        return 4 + 3 * self.qkv_bias + self.o_bias + 2 * self.head_norms + self.sinks

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
class LinearAttention(Attention):
    """A gated delta net (Yang et al. 2024; qwen3_next): a state of constant size in the place of a KV cache."""

    key_heads: int
    value_heads: int
    key_dim: int  # of one head
    value_dim: int
    kernel: int  # taps of the convolution over the last tokens' queries, keys and values
    state_scale: float = 1  # bytes of a number of the state over those of the model's type

    kv_heads = 0
    head_elements = 0

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
    def state_elements(self) -> float:
        """The state of every value head, key_dim × value_dim, and the last kernel − 1 inputs of the convolution.

        As vLLM keeps them: `gated_delta_net_state_shape` and `gated_delta_net_state_dtype` of its `mamba_utils.py`.
        """
        key, value = self._widths(1)
        state = self.value_heads * self.key_dim * self.value_dim * self.state_scale
        return state + (self.kernel - 1) * (2 * key + value)

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
class Dense:
    """A gated MLP."""

    width: int
    bias: bool = False

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        width = self.width // tp
        return Linear("gate_up", 2 * width, hidden), Linear("down", hidden, width)

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights on one GPU."""
        biases = self.bias * (2 * (self.width // tp) + hidden)
        return _weights(self.linears(hidden, tp)) + biases

    @property
    def active_width(self) -> int:
        """Width that one token passes."""
        return self.width

    @property
    def tensors(self) -> int:
        """Weights and biases by name."""
        return 3 * (1 + self.bias)

    stacked_tensors = tensors

    @property
    def widths(self) -> tuple[int, ...]:
        """What TP must divide."""
        return (self.width,)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs of `width`: every token passes `active` of `experts`, and one of `shared_width` besides.

    `shared_gate`: the shared expert's output has a gate of one number per token (qwen2_moe). `router_bias`: of the
    router (gpt_oss), or what balances the load of its experts (deepseek_v3). `bias`: of every expert (gpt_oss).
    """

    experts: int
    active: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False

    def linears(self, hidden: int, tp: int) -> tuple[Linear, ...]:
        """The router and the shared expert; the experts themselves are grouped products."""
        found = [Linear("router", self.experts, hidden, quantised=False)]
        if self.shared_width:
            found += Dense(width=self.shared_width).linears(hidden, tp)
        if self.shared_gate:
            found.append(Linear("shared_gate", 1, hidden, quantised=False))
        return tuple(found)

    def grouped_weights(self, hidden: int, tp: int = 1) -> int:
        """Weights of all experts' matrices on one GPU."""
        return 3 * self.experts * (self.width // tp) * hidden

    def idle_parameters(self, hidden: int) -> int:
        """Weights and biases of the experts that a token is not routed to."""
        return (self.experts - self.active) * (3 * hidden * self.width + self.bias * (2 * self.width + hidden))

    def parameters(self, hidden: int, tp: int = 1) -> int:
        """Weights on one GPU."""
        biases = self.experts * (self.router_bias + self.bias * (2 * (self.width // tp) + hidden))
        return _weights(self.linears(hidden, tp)) + self.grouped_weights(hidden, tp) + biases

    @property
    def active_width(self) -> int:
        """Width of all experts together that one token passes."""
        return self.active * self.width + self.shared_width

    @property
    def tensors(self) -> int:
        """Weights and biases by name, those of every expert apart."""
        return self.stacked_tensors + (3 * self.experts - 2) * (1 + self.bias)

    @property
    def stacked_tensors(self) -> int:
        """The same where a layer's experts are two tensors (and two biases)."""
        return 1 + self.router_bias + 2 * (1 + self.bias) + 3 * bool(self.shared_width) + self.shared_gate

    @property
    def widths(self) -> tuple[int, ...]:
        """What TP must divide."""
        return (self.width, self.shared_width) if self.shared_width else (self.width,)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: attention and feed-forward, and `norms` RMS norms over the hidden state around them."""

    hidden: int
    attention: Attention
    mlp: Dense | Experts
    norms: int = 2

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
        return self.mlp.grouped_weights(self.hidden, tp) if isinstance(self.mlp, Experts) else 0

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.parameters_per_gpu(1)

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes: without those of the experts that it is not routed to."""
        idle = self.mlp.idle_parameters(self.hidden) if isinstance(self.mlp, Experts) else 0
        return self.parameters - idle

    @property
    def active_weights(self) -> int:
        """Weights of the matrices that one token passes (biases and norms are not multiplications)."""
        plain = _weights(self.linears())
        if not isinstance(self.mlp, Experts):
            return plain
        return plain + 3 * self.mlp.active * self.mlp.width * self.hidden

    def tensors(self, *, stacked: bool = False) -> int:
        """Weights and biases that have a name of their own in a checkpoint; `stacked`: experts of a layer are two."""
        mlp = self.mlp.stacked_tensors if stacked else self.mlp.tensors
        return self.attention.tensors + self.norms + mlp

    def splits(self, tp: int, expert_tp: int | None = None) -> bool:
        """Whether heads and widths split evenly over `tp` GPUs (KV heads are replicated when there are too few), and
        experts over `expert_tp` if that is another number."""
        for name, count in self.attention.split.items():
            if count % tp and not (name == "KV heads" and tp % count == 0):
                return False
        if isinstance(self.mlp, Experts):
            return self.mlp.width % (expert_tp or tp) == 0 and self.mlp.shared_width % tp == 0
        return self.mlp.width % tp == 0
