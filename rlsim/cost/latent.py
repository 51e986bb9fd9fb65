"""Multi-head latent attention (MLA) on one GPU: what it takes beside the products with its projections.

DeepSeek-V2 (2024), section 2.1; the two ways to compute it as vLLM describes them (`mla/common.py`). *In the latent*,
as decode does, a head's query is multiplied into the latent by its part of kv_b, every head attends to the latents
themselves (one key and value of `kv_rank + rope_dim` numbers that all heads share), and the result is multiplied out
again. *Over keys and values*, as long prompts do, kv_b makes them of the latents first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rlsim.cost.attention_kernels import BF16_BYTES, bent
from rlsim.cost.fits import LatentAttentionFit
from rlsim.cost.kernel import Kernel, Work
from rlsim.cost.operators import Operators
from rlsim.models.layers import LatentAttention
from rlsim.models.precision import KV_BYTES

#: Axes of the tables, in order. `new`: of the prompt with as many keys for a query.
LATENT_AXES = ("batch", "context", "heads")
LATENT_PROMPT_AXES = ("batch", "new", "heads")
HEAD_BLOCK = 64  # rows of a block of the kernel: the queries of so many heads for one token
ABSORBING = 0.7  # share of both peaks that products into and out of the latent reach (assumed)


def padded_heads(heads: int) -> int:
    """The heads that a decode kernel computes, by whole blocks."""
    return -(-heads // HEAD_BLOCK) * HEAD_BLOCK


class LatentKernels:
    """Latent attention of `heads` heads on one GPU, in bf16 on the KV cache of `fit`.

    Raises `CalibrationError` for a table over other axes.
    """

    def __init__(self, operators: Operators, fit: LatentAttentionFit, attention: LatentAttention, heads: int) -> None:
        self._operators, self._heads = operators, heads
        self._rank = attention.kv_rank
        self._cached = attention.cached_elements()
        self._cached_bytes = self._cached * KV_BYTES[fit.kv_precision]
        self._norms = (attention.q_rank or 0) + attention.kv_rank
        self._rope = attention.rope_dim
        self._made = attention.nope_dim + attention.v_dim
        self._pair_flop = 2.0 * heads * (self._made + self._rope)
        self._decode_at = cache(Kernel(fit.decode, LATENT_AXES).at)
        self._prompts = Kernel(fit.prompts, LATENT_PROMPT_AXES).at(heads) if fit.prompts else None

    def decode_work(self, batch: int, tokens: float, queries: int = 1) -> Work:
        """Bytes of so many latents, and the FLOPs of all heads of all queries of a sequence: scores over all of a
        latent, values over its rank."""
        ref, heads = self._operators.reference, self._heads * queries
        flop = 2.0 * padded_heads(heads) * (self._cached + self._rank) * tokens
        read_s = tokens * self._cached_bytes / ref.memory_bytes_per_s
        resources = {"memory": read_s, "compute": flop / ref.bf16_flop_per_s}
        return Work(resources, {"sequences": batch, "heads": batch * heads})

    def decode_curve(self, batch: int, queries: int = 1) -> tuple[list[float], list[float]]:
        """Knots of T, the sum of the batch's context tokens, and one layer's seconds there; the heads of several
        `queries` of a sequence stand side by side in the kernel."""
        least = self._cached_bytes / self._operators.reference.memory_bytes_per_s
        kernel = self._decode_at(self._heads * queries)
        knots, times = bent(kernel, batch, batch, lambda total: self.decode_work(batch, total, queries), least)
        absorb = self.absorb_s(batch * queries)
        return knots, [time + absorb for time in times]

    def elementwise_s(self, tokens: float) -> float:
        """Seconds of the norms of the latents, and of rotary embedding and the KV write, for so many tokens."""
        each = (2 * self._norms, 2 * (self._heads + 1) * self._rope + self._cached)
        return sum([self._operators.memory_bound_s(tokens * one * BF16_BYTES, tokens) for one in each])

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
