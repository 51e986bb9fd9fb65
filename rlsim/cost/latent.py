"""Multi-head latent attention (MLA) on one GPU: what it takes beside the products with its projections.

DeepSeek-V2 (2024), section 2.1; the two ways to compute it as vLLM describes them (`mla/common.py`). *In the latent*,
as decode does, a head's query is multiplied into the latent by its part of kv_b, every head attends to the latents
themselves (one key and value of `kv_rank + rope_dim` numbers that all heads share), and the result is multiplied out
again. *Over keys and values*, as long prompts do, kv_b makes them of the latents first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from rlsim.cost.fits import LatentAttentionFit
from rlsim.cost.operators import BF16_BYTES, Operators, bent, interpolate
from rlsim.cost.surface import surface_of
from rlsim.layers import LatentAttention
from rlsim.precision import KV_BYTES

#: Axes of the correction of decode, in order.
LATENT_AXES = ("batch", "context", "heads")
BLEND = 4.0  # how sharply the slower of latents' bytes and FLOPs hides the other


HEAD_BLOCK = 64  # rows of a block of the kernel: the queries of so many heads for one token


def padded_heads(heads: int) -> int:
    """The heads that a decode kernel computes, by whole blocks."""
    return -(-heads // HEAD_BLOCK) * HEAD_BLOCK


class LatentKernels:
    """Latent attention of `heads` heads on one GPU, in bf16 on the KV cache of `fit`.

    Raises `CalibrationError` for a correction over other axes than `LATENT_AXES`.
    """

    def __init__(self, operators: Operators, fit: LatentAttentionFit, attention: LatentAttention, heads: int) -> None:
        self._operators, self._fit, self._heads = operators, fit, heads
        self._rank = attention.kv_rank
        self._cached = attention.cached_elements()
        self._cached_bytes = self._cached * KV_BYTES[fit.kv_precision]
        self._norms = (attention.q_rank or 0) + attention.kv_rank
        self._rope = attention.rope_dim
        self._made = attention.nope_dim + attention.v_dim
        self._mean_dim = (attention.nope_dim + attention.rope_dim + attention.v_dim) / 2
        factor = surface_of(fit.correction, LATENT_AXES)
        self._factor = factor.sliced(heads) if factor is not None else None

    def decode_curve(self, batch: int) -> tuple[list[float], list[float]]:
        """Knots of T, the sum of the batch's context tokens, and one layer's seconds there."""
        fit, ref, heads = self._fit, self._operators.reference, self._heads
        launch = fit.launch_s + fit.sequence_s * batch + fit.head_s * batch * heads
        least = self._cached_bytes / ref.memory_bytes_per_s
        read = least / interpolate(fit.parallelism, fit.efficiency, log2(batch))
        computed = padded_heads(heads) / heads * self._token_flop / (ref.bf16_flop_per_s * fit.flop_efficiency)
        slope = float((read**BLEND + computed**BLEND) ** (1.0 / BLEND))
        factor = self._factor.along(batch) if self._factor is not None else None
        knots, times = bent(batch, 0.0, launch, slope, least, fit.correction, factor)
        absorb = self.absorb_s(batch)
        return knots, [time + absorb for time in times]

    def elementwise_s(self, tokens: float) -> float:
        """Seconds of the norms of the latents, and of rotary embedding and the KV write, for so many tokens."""
        each = (2 * self._norms, 2 * (self._heads + 1) * self._rope + self._cached)
        return sum([self._operators.memory_bound_s(tokens * one * BF16_BYTES, tokens) for one in each])

    @property
    def _token_flop(self) -> float:
        """FLOPs of all heads for one query and one latent: scores over all of it, values over its rank."""
        return 2.0 * self._heads * (self._cached + self._rank)

    def absorb_s(self, tokens: float) -> float:
        """Seconds in which the queries of so many tokens go into the latent and their results come out: each head's
        part of kv_b is read once, in one of two products, and multiplied with all of them."""
        ref, gemm, weights = self._operators.reference, self._operators.fits.gemm, self._heads * self._rank * self._made
        read = BF16_BYTES * weights / (ref.memory_bytes_per_s * gemm.memory_efficiency)
        computed = 2.0 * weights * tokens / (ref.bf16_flop_per_s * self._fit.flop_efficiency)
        return 2 * gemm.launch_s + max(read, computed)

    def prefill_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        """Seconds of one layer's attention over `chunks` of (new tokens, tokens already cached), kv_b included.

        For chunks with cached tokens keys and values are made of all latents anew, as vLLM does.
        """
        fit, operators, heads = self._fit, self._operators, self._heads
        short = [chunk for chunk in chunks if chunk[0] <= fit.latent_prompt_tokens]
        long = [chunk for chunk in chunks if chunk[0] > fit.latent_prompt_tokens]
        total = fit.prompt_launch_s + fit.prompt_head_s * heads * sum([new for new, _ in chunks])
        if short:
            pairs = sum([new * (prior + (new + 1) / 2) for new, prior in short])
            rate = operators.reference.bf16_flop_per_s * fit.flop_efficiency
            total += self.absorb_s(sum([new for new, _ in short])) + self._token_flop * pairs / rate
        if long:
            total += operators.gemm_s(sum([new + prior for new, prior in long]), heads * self._made, self._rank)
            keys = sum([new * (prior + new / 2) for new, prior in long]) / sum([new for new, _ in long])
            speed = interpolate(fit.prompt_keys, fit.prompt_speed, log2(keys))
            total += operators.prefill_attention_s(long, heads, heads, self._mean_dim) / speed
        return total
