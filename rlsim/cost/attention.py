"""Attention of a model's layers on one GPU of a replica: one class for each kind that `rlsim.models.layers` knows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from rlsim.cost.curve import DecodeCurve, longer
from rlsim.cost.fits import LatentAttentionFit
from rlsim.cost.flops import attention_work
from rlsim.cost.kernel import Kernel, Work
from rlsim.cost.operators import BF16_BYTES, BLOCK_QUERIES, Operators, bent
from rlsim.errors import CalibrationError
from rlsim.models.layers import (
    Attention,
    FullAttention,
    Index,
    LatentAttention,
    Layer,
    Linear,
    Mamba2,
    NoAttention,
    Recurrent,
)
from rlsim.models.precision import KV_BYTES


class LayerAttention:
    """One layer's attention, its products over all tokens aside: nothing, where a layer is a feed-forward alone. Sizes
    are those of one GPU."""

    #: The most tokens of a sequence that decode reads; None for all of them.
    window_tokens: int | None = None
    #: Whether they are those of its last chunk of so many.
    chunked = False
    #: Elements of a token that each of its elementwise kernels moves, their bytes, and how many times their roofline
    #: these take.
    _moved: Sequence[float] = ()
    _bytes = BF16_BYTES
    _times = 1.0

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self.curve = cache(self._curve)

    @property
    def parts(self) -> tuple[LayerAttention, ...]:
        """What its attention is made of; each reads as many tokens as its own `window_tokens` says."""
        return (self,)

    def linears(self, layer: Layer, tp: int) -> tuple[Linear, ...]:
        """The products of a layer with this attention that run over all of an iteration's tokens."""
        return layer.linears(tp)

    def elementwise_s(self, tokens: float) -> float:
        """Seconds of the norms, rotary embedding and other elementwise kernels of `tokens` tokens."""
        each = [self._operators.memory_bound_s(tokens * moved * self._bytes, tokens) for moved in self._moved]
        return self._times * sum(each)

    def _curve(self, batch: int, queries: int = 1) -> DecodeCurve:  # noqa: ARG002
        """What `curve` keeps: seconds of `batch` sequences over the sum of the tokens that they read. Each has as many
        `queries` in the step, which share what they read."""
        return DecodeCurve(batch, [0.0], [0.0])

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:  # noqa: ARG002
        """Seconds over `chunks` of (new tokens, tokens already cached)."""
        return 0.0

    def decode_shape(self, batch: int, read_tokens: float) -> tuple[str, dict[str, float]] | None:  # noqa: ARG002
        """The operator that decode of `batch` sequences asks for, if any, and what its measured ranges bound."""
        return None


class GroupedQueries(LayerAttention):
    """Grouped-query attention over all tokens before, or over a window or a chunk of them.

    A window's kernel is that of as many tokens where it was not measured; chunks are sequences of their own, as in
    vLLM's `make_local_attention_virtual_batches`. Attention sinks and soft-capped logits cost nothing; an output gate
    is one more elementwise kernel (its projection is part of the queries').
    """

    def __init__(self, operators: Operators, attention: FullAttention, tp: int, dtype_bytes: float) -> None:
        super().__init__(operators)
        self._attention, self._bytes = attention, dtype_bytes
        self._q_heads, self._kv_heads = attention.heads // tp, attention.kv_heads_per_gpu(tp)
        self.window_tokens, self.chunked = attention.window_tokens, attention.chunked
        heads = self._q_heads + self._kv_heads
        kernels = (  # rotary embedding and KV write, norms, the output's gate
            2 * heads + self._kv_heads,
            2 * heads * (attention.head_norms or attention.whole_norms),
            3 * self._q_heads * attention.gated,
        )
        self._moved = [each * attention.head_dim for each in kernels if each]

    def _curve(self, batch: int, queries: int = 1) -> DecodeCurve:
        """With several queries no less than their FLOPs take, by whole blocks of rows, at the rate of prompts."""
        operators, size = self._operators, self._attention.head_elements // 2
        window = None if self.chunked else self.window_tokens
        curve = operators.decode_kernels.curve(batch, self._kv_heads, size, window)
        if queries == 1:
            return curve
        rows = self._kv_heads * padded_heads(queries * self._q_heads // self._kv_heads)
        each_s = 4.0 * size * rows / (operators.reference.bf16_flop_per_s * operators.prompt_kernels.reached(size))
        return longer(curve, DecodeCurve(batch, [0.0, 1e6], [0.0, 1e6 * each_s]))

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        shape = self._q_heads, self._kv_heads, self._attention.head_elements // 2
        if self.window_tokens is not None and self.chunked:
            apart = [piece for new, prior in chunks for piece in _in_chunks(new, prior, self.window_tokens)]
            return self._operators.prefill_attention_s(apart, *shape)
        return self._operators.prefill_attention_s(chunks, *shape, self.window_tokens)

    def decode_shape(self, batch: int, read_tokens: float) -> tuple[str, dict[str, float]]:
        group, context = self._q_heads / self._kv_heads, read_tokens / batch
        return "decode_attention", {"batch": batch, "context": context, "kv_heads": self._kv_heads, "group": group}


def _in_chunks(new: float, prior: float, chunk_tokens: int) -> Iterator[tuple[float, float]]:
    """New tokens behind so many cached ones, by the chunk that they are in: (new tokens, cached ones) of each."""
    end = prior + new
    while prior < end:
        cached = prior % chunk_tokens
        here = min(chunk_tokens - cached, end - prior)
        yield here, cached
        prior += here


#: Axes of the tables, in order. `new`: of the prompt with as many keys for a query.
LATENT_AXES = ("batch", "context", "heads")
LATENT_PROMPT_AXES = ("batch", "new", "heads")
HEAD_BLOCK = 64  # rows of a block of the kernel: the queries of so many heads for one token
ABSORBING = 0.7  # share of both peaks that products into and out of the latent reach (assumed)


def padded_heads(heads: int) -> int:
    """The heads that a decode kernel computes, by whole blocks."""
    return -(-heads // HEAD_BLOCK) * HEAD_BLOCK


class Latent(LayerAttention):
    """Latent attention of `heads` heads on one GPU, in bf16 on the KV cache of `fit`; kv_b is part of it, as decode and
    prompts use it differently.

    DeepSeek-V2 (2024), section 2.1; the two ways to compute it as vLLM describes them (`mla/common.py`). *In the
    latent*, as decode does, a head's query is multiplied into the latent by its part of kv_b, every head attends to the
    latents themselves (one key and value of `kv_rank + rope_dim` numbers that all heads share), and the result is
    multiplied out again. *Over keys and values*, as long prompts do, kv_b makes them of the latents first.

    Raises `CalibrationError` where there is no fit, or for a table over other axes.
    """

    def __init__(
        self, operators: Operators, attention: LatentAttention, heads: int, fit: LatentAttentionFit | None
    ) -> None:
        super().__init__(operators)
        if fit is None:
            raise CalibrationError(
                "latent attention (MLA) is not in this calibration: its GPU or engine has no measured tables of it"
            )
        self._heads, self._rank = heads, attention.kv_rank
        self._cached = attention.cached_elements()
        self._cached_bytes = self._cached * KV_BYTES[fit.kv_precision]
        self._rope = attention.rope_dim
        # The norms of the latents; rotary embedding and the KV write.
        self._moved = (2 * ((attention.q_rank or 0) + self._rank), 2 * (heads + 1) * self._rope + self._cached)
        self._made = attention.nope_dim + attention.v_dim
        self._pair_flop = 2.0 * heads * (self._made + self._rope)
        self._decode_at = cache(Kernel(fit.decode, LATENT_AXES).at)
        self._prompts = Kernel(fit.prompts, LATENT_PROMPT_AXES).at(heads) if fit.prompts else None

    def linears(self, layer: Layer, tp: int) -> tuple[Linear, ...]:
        return tuple(linear for linear in layer.linears(tp) if linear.name != "kv_b")

    def decode_shape(self, batch: int, read_tokens: float) -> tuple[str, dict[str, float]]:
        return "latent_attention", {"batch": batch, "context": read_tokens / batch, "heads": self._heads}

    def decode_work(self, batch: int, tokens: float, queries: int = 1) -> Work:
        """Bytes of so many latents, and the FLOPs of all heads of all queries of a sequence: scores over all of a
        latent, values over its rank."""
        ref, heads = self._operators.reference, self._heads * queries
        flop = 2.0 * padded_heads(heads) * (self._cached + self._rank) * tokens
        read_s = tokens * self._cached_bytes / ref.memory_bytes_per_s
        resources = {"memory": read_s, "compute": flop / ref.bf16_flop_per_s}
        return Work(resources, {"sequences": batch, "heads": batch * heads})

    def _curve(self, batch: int, queries: int = 1) -> DecodeCurve:
        """The heads of several `queries` of a sequence stand side by side in the kernel."""
        least = self._cached_bytes / self._operators.reference.memory_bytes_per_s
        kernel = self._decode_at(self._heads * queries)
        curve = bent(kernel, batch, batch, lambda total: self.decode_work(batch, total, queries), least)
        return curve.mapped(1.0, self.absorb_s(batch * queries))

    def absorb_s(self, tokens: float) -> float:
        """Seconds in which the queries of so many tokens go into the latent and their results come out: each head's
        part of kv_b is read once, in one of two products, and multiplied with all of them."""
        ref, weights = self._operators.reference, self._heads * self._rank * self._made
        slowest = max(BF16_BYTES * weights / ref.memory_bytes_per_s, 2.0 * weights * tokens / ref.bf16_flop_per_s)
        return 2 * self._operators.fits.gemm.launch_s + slowest / ABSORBING

    def prompt_work(self, chunks: Sequence[tuple[float, float]]) -> tuple[Work, float]:
        """FLOPs of making keys and values of all latents, as vLLM does, and of all pairs; kv_b's bytes; new tokens of
        all heads. And the new tokens of a prompt with as many keys for a query."""
        ref, heads = self._operators.reference, self._heads
        tokens = sum([new for new, _ in chunks])
        pairs = sum([new * (prior + new / 2) for new, prior in chunks])
        weights = heads * self._made * self._rank
        flop = self._pair_flop * pairs + 2.0 * weights * sum([new + prior for new, prior in chunks])
        read_s = BF16_BYTES * weights / ref.memory_bytes_per_s
        resources = {"compute": flop / ref.bf16_flop_per_s, "memory": read_s}
        return Work(resources, {"heads": tokens * heads}), 2.0 * pairs / tokens

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        """Seconds of one layer's attention over `chunks` of (new tokens, tokens already cached), kv_b included."""
        operators, heads = self._operators, self._heads
        if self._prompts is not None:
            work, new = self.prompt_work(chunks)
            return self._prompts.time_s(work, len(chunks), new)
        made_s = operators.gemm_s(sum([new + prior for new, prior in chunks]), heads * self._made, self._rank)
        return made_s + operators.prefill_attention_s(chunks, heads, heads, (self._made + self._rope) / 2)


class SparseLatent(Latent):
    """Latent attention over the tokens that an index chooses, beside the index (DeepSeek-V3.2): neither is measured.

    Decode is latent attention over no more than `topk` tokens. In a prompt each FLOP takes as long as one of latent
    attention over all tokens before; prompts that reach beyond `topk` tokens work in the latent.
    """

    def __init__(
        self, operators: Operators, attention: LatentAttention, heads: int, fit: LatentAttentionFit | None
    ) -> None:
        super().__init__(operators, attention, heads, fit)
        assert attention.index is not None
        self._index, self.window_tokens = attention.index, attention.index.topk
        self._made_flop = 2.0 * self._heads * self._made * self._rank
        self._flop = 2.0 * self._heads * (self._cached + self._rank)
        self._least_s = max(map(float, self.decode_work(1, 1.0).resources.values()))

    @property
    def parts(self) -> tuple[LayerAttention, ...]:
        return (self,) if self._index.shared else (self, SparseIndex(self._operators, self._index, self))

    def elementwise_s(self, tokens: float) -> float:
        """With the index's queries, of which FP8 is made."""
        if self._index.shared:
            return super().elementwise_s(tokens)
        made = tokens * 3 * self._index.heads * self._index.head_dim
        return super().elementwise_s(tokens) + self._operators.memory_bound_s(made, tokens)

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        topk, flop = self._index.topk, 0.0
        for new, prior in chunks:
            latent = self._flop * _pairs(new, prior, topk) + self._made_flop * new
            flop += latent if new + prior > topk else self._dense_flop(new, prior)
        return self.prompt_flop_s(chunks) * flop

    def _curve(self, batch: int, queries: int = 1) -> DecodeCurve:
        """Every query reads tokens of its own choice, as a sequence of its own would."""
        return super()._curve(batch * queries).stretched(1 / queries, batch)

    def reached(self, batch: int) -> float:
        """Share of its roofline that decode of `batch` sequences reaches over long contexts."""
        curve, long = self.curve(batch), batch * _LONG_TOKENS
        return self._least_s * long / (curve.step_s(2 * long) - curve.step_s(long))

    def prompt_flop_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        """Seconds of a FLOP of these prompts over all tokens before, those that make keys of latents among them."""
        return super().prefill_s(chunks) / sum([self._dense_flop(new, prior) for new, prior in chunks])

    def _dense_flop(self, new: float, prior: float) -> float:
        return self._pair_flop * _pairs(new, prior) + self._made_flop * (new + prior)


_LONG_TOKENS = 65_536


def _pairs(new: float, prior: float, most: float = math.inf) -> float:
    """Pairs of new queries and the keys that they see, at most so many each."""
    below = min(max(most - prior, 0.0), new)
    return below * (prior + (below + 1) / 2) + (new - below) * (most if below < new else 0.0)


class SparseIndex(LayerAttention):
    """The scores of all tokens before and the choice among them, on every GPU of a TP group whole.

    Keys are read in FP8, a score of four bytes for each is written and read; it reaches the share of its roofline that
    latent attention does.
    """

    def __init__(self, operators: Operators, index: Index, latent: SparseLatent) -> None:
        super().__init__(operators)
        self._index, self._latent, ref = index, latent, operators.reference
        self._pair_s = 2.0 * index.heads * index.head_dim / (ref.fp8_flop_per_s or ref.bf16_flop_per_s)

    def _curve(self, batch: int, queries: int = 1) -> DecodeCurve:
        read_s = (self._index.key_bytes + 8 * queries) / self._operators.reference.memory_bytes_per_s
        each_s = max(read_s, self._pair_s * queries) / self._latent.reached(batch)
        launches_s = 2 * self._operators.memory_bound_s(batch * queries * self._index.topk * 4, batch * queries)
        return DecodeCurve(batch, [0.0, 1e6], [launches_s, launches_s + 1e6 * each_s])

    def decode_shape(self, batch: int, read_tokens: float) -> tuple[str, dict[str, float]]:
        return "sparse_attention", {"batch": batch, "context": read_tokens / batch}

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        self._operators.count("sparse_attention", tokens=sum([new for new, _ in chunks]))
        slower = self._pair_s * self._operators.reference.bf16_flop_per_s
        return slower * self._latent.prompt_flop_s(chunks) * sum([_pairs(new, prior) for new, prior in chunks])


class State(LayerAttention):
    """Linear attention and state-space mixers: a roofline, as no fit has their kernels.

    It takes `times` as long as that. Decode reads and writes each sequence's state. A prompt goes through in chunks;
    the FLOPs for each token, within the chunk and with the state, are those of `attention_work`.
    """

    def __init__(
        self, operators: Operators, attention: Recurrent, tp: int, dtype_bytes: float, times: float = 1.0
    ) -> None:
        super().__init__(operators)
        self._times = times
        self._operator = "state_space" if isinstance(attention, Mamba2) else "linear_attention"
        self._bytes = dtype_bytes
        self._state_bytes = attention.state_elements / tp * dtype_bytes
        self._token_flop = attention_work(attention).token_flops / tp
        self._channels = attention.inner / tp
        # The convolution with its activation; the output's norm with its gate.
        self._moved = (2 * (attention.convolved / tp), 3 * self._channels)
        # What attention reaches on many prompts of one block, whose pairs it computes all.
        blocks_s = operators.prompt_kernels.time_s([(BLOCK_QUERIES, 0)] * 256, 16, 4, 128)
        self._rate = 4.0 * 128 * 16 * 256 * BLOCK_QUERIES**2 / blocks_s

    def _curve(self, batch: int, queries: int = 1) -> DecodeCurve:
        """The state is read once, and written behind every query (vLLM keeps one for each token to verify): it is many
        short rows, one for each channel of the output."""
        size, rows = (1 + queries) * batch * self._state_bytes, batch * queries * self._channels
        return DecodeCurve(batch, [0.0], [self._times * self._operators.memory_bound_s(size, rows)])

    def decode_shape(self, batch: int, read_tokens: float) -> tuple[str, dict[str, float]]:  # noqa: ARG002
        return self._operator, {"batch": batch}

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        tokens = sum([new for new, _ in chunks])
        self._operators.count(self._operator, tokens=tokens)
        computed = tokens * self._token_flop / self._rate
        return self._times * max(computed, self._operators.memory_bound_s(2 * len(chunks) * self._state_bytes, tokens))


def layer_attention(
    operators: Operators, attention: Attention, tp: int, dtype_bytes: float, recurrent: float = 1.0
) -> LayerAttention:
    """What `attention` costs at TP `tp`; raises `CalibrationError` if the calibration lacks its kernels.

    `recurrent`: how many times their roofline linear attention and state-space mixers take.
    """
    match attention:
        case LatentAttention():
            kind = SparseLatent if attention.index else Latent
            return kind(operators, attention, attention.heads // tp, operators.fits.latent_attention)
        case Recurrent():
            return State(operators, attention, tp, dtype_bytes, recurrent)
        case FullAttention():
            return GroupedQueries(operators, attention, tp, dtype_bytes)
        case _:
            assert isinstance(attention, NoAttention)
            return LayerAttention(operators)
