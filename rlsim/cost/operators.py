"""Seconds of single kernels on one GPU, from a calibration's few fitted constants.

Every formula is a roofline, `launch + |FLOPs / rate, bytes / bandwidth|` (a p-norm, near the larger: `cost.kernel`),
refined by what decides how much of the peak a kernel reaches: whole waves of blocks over the SMs for GEMMs, parallelism
for attention. What the formula's constants leave over is a factor fitted on a coarse grid (`Correction`), constant
beyond its edges.

Weights and KV are taken as **cold**: in a real decode step every layer's weights stream from device memory, because
the other layers have displaced them from L2 since the step before. Kernel microbenchmarks repeat one small kernel
and find its operands in L2, so bandwidths are fitted on footprints well beyond L2 and used for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from math import inf
from typing import NamedTuple

from rlsim.cost.calibration import Reference, Residual
from rlsim.cost.curve import DecodeCurve
from rlsim.cost.experts import ExpertLoad, FusedExperts
from rlsim.cost.fits import AttentionFit, KernelFit, OperatorFits
from rlsim.cost.kernel import Kernel, Work
from rlsim.cost.products import Products
from rlsim.cost.step import Lookups
from rlsim.models.precision import KV_BYTES, Precision

#: Columns of the widest blocks of products. What is narrower than that (a router) is one column of blocks.
BLOCK_COLUMNS = 256
#: Operators without a fit: what no calibration has measured of them counts as extrapolated.
ROOFLINES = ("linear_attention", "sparse_attention", "state_space")
#: Operators whose fits may be another engine's or precision's: without residuals of their own they are.
MAY_BE_LENT = ("experts_", "latent_attention")

#: Axes of the table of elementwise kernels, in order.
MEMORY_AXES = ("bytes", "tokens")


def gemm_of(precision: Precision) -> str:
    """The operator's name in tables of measurements, residuals and look-ups."""
    return "gemm" if precision == "bf16" else f"gemm_{precision}"


class Operators:
    """The kernels of one GPU; sizes are those one GPU sees, after tensor-parallel sharding.

    Activations are bf16; products are of any precision that was measured, attention on the KV cache of `fits`.

    `lookups` counts the shapes that were asked for, and which of them lay beyond the measured ranges of the
    calibration: the formula still holds its shape there, but its error is not known. Raises `CalibrationError` for a
    correction over other axes than the operator's.
    """

    def __init__(self, fits: OperatorFits, reference: Reference, residuals: dict[str, Residual] | None = None) -> None:
        self.fits = fits
        self.reference = reference
        self._lookups = Lookups()  # of all kernels but the products
        self._ranges = {name: residual.ranges for name, residual in (residuals or {}).items()}
        self._products = {precision: Products(fit, reference) for precision, fit in fits.gemms.items()}
        self.decode_kernels = DecodeKernels(fits.decode_attention, reference)
        self.prompt_kernels = PromptKernels(fits.prefill_attention, reference)
        self._memory = ElementwiseKernel(fits.memory_bound, reference)
        measured = self._ranges.get("prefill_attention", {})
        new, context = measured.get("new", (0.0, inf)), measured.get("context", (0.0, inf))
        self._prefill_range = (*new, context[1])
        self._experts = cache(self._experts_kernel)

    @property
    def lookups(self) -> Lookups:
        """Every shape asked for so far.

        A product narrower than a block counts as one of the narrowest measured width, if that is no more than a block:
        it takes no longer, no less than a launch, and its time by the formula lies between the two.
        """
        found = Lookups()
        for precision, products in self._products.items():
            operator = gemm_of(precision)
            measured = self._ranges.get(operator)
            narrowest = (measured or {}).get("n", (0.0, inf))[0]
            for m, n, k, groups in products.shapes:
                columns = max(n, narrowest) if narrowest <= BLOCK_COLUMNS else n
                found.add_within(operator, measured, m=m * groups, n=columns, k=k)
        return self._lookups.merge([found])

    def count(self, operator: str, lookups: Lookups | None = None, /, **values: float) -> None:
        """Counts a look-up of `operator` at these values, among `lookups` if they are given."""
        found, measured = self._lookups if lookups is None else lookups, self._ranges.get(operator)
        if operator in ROOFLINES and measured is None:
            found.add(operator, "extrapolated", "a roofline, not measured")
        elif operator.startswith(MAY_BE_LENT) and measured is None:
            found.add(operator, "extrapolated", "at the efficiencies of another precision, engine or GPU")
        else:
            found.add_within(operator, measured, **values)

    def gemm_s(self, m: float, n: int, k: int, groups: float = 1, precision: Precision = "bf16") -> float:
        """Seconds of `groups` products of an m×k activation and a k×n weight in one kernel: see `Products.time_s`."""
        return self._products[precision].time_s(m, n, k, groups)

    def experts_s(
        self, load: ExpertLoad, hidden: int, width: int, precision: Precision = "bf16", projections: int = 2
    ) -> float:
        """Seconds of a mixture's experts on one GPU: choice of the experts, both products, and the sum over a token's.

        `width` is that of an expert on this GPU; it has `projections` matrices from the hidden state to it (gate and
        up, or up alone). Their activation is among them. Experts in a precision that was not measured reach the
        efficiencies of those in bf16, and count as extrapolated.
        """
        rows, hit = load.rows / load.hit, float(load.hit)
        self.count(f"experts_{precision}", rows=float(rows), hit=hit, hidden=hidden, width=width)
        return self._experts(precision, bool(load.parallel))(load, hidden, width, projections)

    def _experts_kernel(self, precision: Precision, parallel: bool) -> FusedExperts:
        fits = {**self.fits.experts, **(self.fits.parallel_experts if parallel else {})}
        fit = fits.get(precision) or fits.get("bf16") or next(iter(fits.values()))
        return FusedExperts(fit, self.reference, precision)

    def prefill_attention_s(
        self,
        chunks: Sequence[tuple[float, float]],
        q_heads: int,
        kv_heads: int,
        head_dim: float,
        window_tokens: int | None = None,
    ) -> float:
        """Seconds of one layer's causal attention over `chunks` of (new tokens, tokens already cached), one kernel.

        With a window a query attends to its last `window_tokens` tokens. Chunks with cached tokens are derived
        (measured: none cached).
        """
        shortest, longest, furthest = self._prefill_range
        outside = [one for one in chunks if not shortest <= one[0] <= longest or one[0] + one[1] > furthest]
        if outside:
            self.count("prefill_attention", new=outside[-1][0], context=sum(outside[-1]))
        else:
            self._lookups.add("prefill_attention", "interpolated")
        return self.prompt_kernels.time_s(chunks, q_heads, kv_heads, head_dim, window_tokens)

    def memory_bound_s(self, size_bytes: float, tokens: float) -> float:
        """Seconds of an elementwise kernel or norm over `tokens` tokens that moves `size_bytes` to and from memory."""
        self.count("memory_bound", bytes=size_bytes)
        return self._memory.time_s(size_bytes, tokens)


class ElementwiseKernel:
    """A norm, rotary embedding or activation. Work: a launch, and the bytes that it moves to and from memory."""

    def __init__(self, fit: KernelFit, reference: Reference) -> None:
        self._rate = reference.memory_bytes_per_s
        self._kernel_at = lru_cache(1)(Kernel(fit, MEMORY_AXES).at)  # all kernels of an iteration have as many tokens

    def time_s(self, size_bytes: float, tokens: float) -> float:
        """Seconds over `tokens` tokens; no less than the data sheet allows."""
        peak_s = size_bytes / self._rate
        return max(self._kernel_at(tokens).time_s(Work({"memory": peak_s}, {"launches": 1.0}), size_bytes), peak_s)


# Attention with grouped queries ---------------------------------------------------------------------------------------


BF16_BYTES = 2.0
BLOCK_QUERIES = 128  # of one block of a prompt's kernel
#: Axes of the tables, in order. `tiles`: sequences times KV heads; `new`: of the prompt with as many keys for a query.
DECODE_AXES = ("tiles", "context", "kv_heads")
DECODE_WINDOW_AXES = ("tiles", "window")
PROMPT_AXES = ("sequences", "new", "q_heads", "group")
PROMPT_WINDOW_AXES = ("sequences", "new", "kv_heads", "group")


class _Kernels(dict[float, Kernel]):
    """By size of heads; of a size that was not measured the first."""

    def __init__(self, fits: Mapping[int, KernelFit], axes: Sequence[str]) -> None:
        super().__init__({size: Kernel(fit, axes) for size, fit in fits.items()})

    def __missing__(self, _: float) -> Kernel:
        return next(iter(self.values()))


def bent(kernel: Kernel, first: float, batch: int, work: Callable[[float], Work], least_slope: float) -> DecodeCurve:
    """The curve, over T, the sum of a batch's context tokens, of a kernel that works on `work(T)`.

    Its table is taken at `first` of its first axis; the knots of the second, the context (T / batch), bend the line.
    Times never fall with T and are never below `least_slope · T`.
    """
    contexts = (1.0,) if kernel.fit.table is None else kernel.fit.table.axes["context"]
    factors = [1.0 if kernel.surface is None else kernel.surface(first, context) for context in contexts]
    return _line(kernel, batch, [batch * context for context in contexts], factors, work, least_slope)


def _line(
    kernel: Kernel,
    batch: int,
    totals: Sequence[float],
    factors: Sequence[float],
    work: Callable[[float], Work],
    least_slope: float,
) -> DecodeCurve:
    last, times, longest = totals[-1], [], 0.0
    for total, factor in zip([0.0, *totals], [factors[0], *factors], strict=True):
        longest = max(longest, kernel.fit.launch_s + kernel.roofline_s(work(total)) * factor, total * least_slope)
        times.append(longest)
    more_s = (kernel.roofline_s(work(2.0 * last)) - kernel.roofline_s(work(last))) * factors[-1]
    return DecodeCurve(batch, [0.0, *totals, 2.0 * last], [*times, longest + max(more_s, last * least_slope)])


class DecodeKernels:
    """Attention of one new token for each sequence. Work: bytes of the KV; sequences times KV heads, and sequences.

    Raises `CalibrationError` for a table over other axes.
    """

    def __init__(self, fit: AttentionFit, reference: Reference) -> None:
        self._bytes, self._reference = KV_BYTES[fit.kv_precision], reference
        self._whole = _Kernels(fit.heads, DECODE_AXES)
        self._windows = _Kernels(fit.windows, DECODE_WINDOW_AXES)
        self._whole_at = cache(lambda kv_heads, head_dim: self._whole[head_dim].at(kv_heads))

    def work(self, batch: int, tokens: float, kv_heads: int, head_dim: int) -> Work:
        """That of reading so many tokens in all."""
        read = 2.0 * tokens * kv_heads * head_dim * self._bytes
        added = {"tiles": batch * kv_heads, "sequences": batch}
        return Work({"memory": read / self._reference.memory_bytes_per_s}, added)

    def curve(self, batch: int, kv_heads: int, head_dim: int, window_tokens: int | None = None) -> DecodeCurve:
        """One layer's curve over T, the sum of the tokens that the batch reads: see `bent`.

        A window's kernel is a straight line for any context: in a CUDA graph it is the one for the longest context
        that a model may have. Where it was not measured, it is the kernel of as many tokens.
        """

        def work(total: float) -> Work:
            return self.work(batch, total, kv_heads, head_dim)

        least_slope = 2.0 * kv_heads * head_dim * self._bytes / self._reference.memory_bytes_per_s
        if window_tokens is not None and head_dim in self._windows:
            window = self._windows[head_dim]
            factor = 1.0 if window.surface is None else window.surface(batch * kv_heads, window_tokens)
            return _line(window, batch, [float(batch * window_tokens)], [factor], work, least_slope)
        return bent(self._whole_at(kv_heads, head_dim), batch * kv_heads, batch, work, least_slope)


class Prompts(NamedTuple):
    """What a kernel works on over some chunks of prompts."""

    work: Work
    tokens: float  # new ones
    pairs: float  # of a query and a key that it attends to
    cut: bool  # by a window
    flops_s: float  # at the peak of bf16
    least_s: float  # at the data sheet's rates


class PromptKernels:
    """Causal attention of prompts. Work: FLOPs of all pairs of a query and a key; those of the longest block on its one
    SM; bytes of q, k, v and the output; the queries; and FLOPs of pairs that a window masks out, if the kernel computes
    them.

    Raises `CalibrationError` for a table over other axes.
    """

    def __init__(self, fit: AttentionFit, reference: Reference) -> None:
        self._bytes, self._reference = KV_BYTES[fit.kv_precision], reference
        fp8 = reference.fp8_flop_per_s if fit.kv_precision == "fp8" else None  # queries may be in it, too
        self._slower = reference.bf16_flop_per_s / (fp8 or reference.bf16_flop_per_s)  # than the fastest rate
        self._whole = _Kernels(fit.heads, PROMPT_AXES)
        self._windows = _Kernels(fit.windows, PROMPT_WINDOW_AXES)
        self._kernel_at = cache(self._of_heads)

    def work(
        self,
        chunks: Sequence[tuple[float, float]],
        q_heads: int,
        kv_heads: int,
        head_dim: float,
        window_tokens: int | None = None,
    ) -> Prompts:
        """That of `chunks` of (new tokens, tokens already cached), in one kernel."""
        zero: float = 0  # whole numbers add up faster
        tokens = read = doubled = masked = longest = zero
        cut = False
        for new, prior in chunks:
            end = prior + new
            tokens += new
            every = new * (prior + end)
            if window_tokens is None or end <= window_tokens:
                read += end
                doubled += every
            else:
                cut = True
                growing = max(window_tokens - prior, 0.0)  # queries that have no more tokens before them than it holds
                seen = growing * (2.0 * prior + growing) + 2.0 * (new - growing) * window_tokens
                read += new + min(prior, window_tokens)
                doubled += seen
                masked += every - seen
                end = window_tokens + BLOCK_QUERIES
            if end > longest:
                longest = end
        ref, flop = self._reference, 4.0 * head_dim
        size = (tokens * q_heads * 2 * BF16_BYTES + read * kv_heads * 2 * self._bytes) * head_dim
        rate, memory_s = ref.bf16_flop_per_s, size / ref.memory_bytes_per_s
        flops_s = flop * q_heads * doubled / 2 / rate
        resources = {
            "compute": flops_s,
            "block": flop * BLOCK_QUERIES * longest * ref.sm_count / rate,
            "memory": memory_s,
        }
        added = {"queries": tokens * q_heads}
        if cut:
            added["masked"] = flop * q_heads * masked / 2 / rate
        return Prompts(Work(resources, added), tokens, doubled / 2, cut, flops_s, max(memory_s, flops_s * self._slower))

    def time_s(
        self,
        chunks: Sequence[tuple[float, float]],
        q_heads: int,
        kv_heads: int,
        head_dim: float,
        window_tokens: int | None = None,
    ) -> float:
        """Seconds of one layer; with a window a query attends to its last `window_tokens` tokens, and a pair takes no
        less than it does without."""
        found = self.work(chunks, q_heads, kv_heads, head_dim, window_tokens)
        windows = found.cut and head_dim in self._windows
        least_s = max(found.least_s, found.flops_s / self.reached(head_dim) if windows else 0.0)
        kernel, count = self._kernel_at(q_heads, kv_heads, head_dim, windows), len(chunks)
        new = found.tokens / count if windows else 2.0 * found.pairs / found.tokens
        return max(kernel.time_s(found.work, count, new), least_s)

    def reached(self, head_dim: float) -> float:
        """Share of the peak of bf16 at which long prompts are computed."""
        return self._whole[head_dim].fit.efficiency["compute"]

    def _of_heads(self, q_heads: int, kv_heads: int, head_dim: float, windows: bool) -> Kernel:
        if windows:
            return self._windows[head_dim].at(kv_heads, q_heads / kv_heads)
        return self._whole[head_dim].at(q_heads, q_heads / kv_heads)
