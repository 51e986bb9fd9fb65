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

from collections.abc import Sequence
from functools import cache
from math import inf, nan

from rlsim.cost.attention_kernels import DecodeKernels, PromptKernels
from rlsim.cost.calibration import Reference, Residual
from rlsim.cost.curve import DecodeCurve
from rlsim.cost.experts import ExpertLoad, FusedExperts
from rlsim.cost.fits import OperatorFits
from rlsim.cost.kernel import Kernel, Work
from rlsim.cost.lookups import Lookups
from rlsim.cost.products import Products
from rlsim.models.precision import Precision

#: Columns of the widest blocks of products. What is narrower than that (a router) is one column of blocks.
BLOCK_COLUMNS = 256
#: Operators without a fit: what no calibration has measured of them counts as extrapolated.
ROOFLINES = ("linear_attention", "sparse_attention", "state_space")


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
        self._decode = cache(lambda batch, *heads: DecodeCurve(batch, *self.decode_kernels.curve(batch, *heads)))
        self.decode_kernels = DecodeKernels(fits.decode_attention, reference)
        self.prompt_kernels = PromptKernels(fits.prefill_attention, reference)
        self._memory = Kernel(fits.memory_bound, MEMORY_AXES)
        self._memory_at = nan, self._memory
        self._memory_range = self._ranges.get("memory_bound", {}).get("bytes", (-inf, inf))
        measured = self._ranges.get("prefill_attention", {})
        new, context = measured.get("new", (0.0, inf)), measured.get("context", (0.0, inf))
        self._prefill_range = (*new, context[1])
        several = {**fits.experts, **fits.parallel_experts}
        self._experts = {(name, False): FusedExperts(fit, reference, name) for name, fit in fits.experts.items()}
        self._experts |= {(name, True): FusedExperts(fit, reference, name) for name, fit in several.items()}

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
        up, or up alone). Where no mixture was measured in that precision it is two grouped products, approximated from
        plain GEMMs, and counts as extrapolated.
        """
        kernel = self._experts.get((precision, bool(load.parallel)))
        rows, hit = load.rows / load.hit, float(load.hit)
        if kernel is None:
            self._lookups.add(f"experts_{precision}", "extrapolated", "approximated from plain products, not measured")
            own: Precision = precision if precision in self._products else "bf16"
            first_s = self.gemm_s(float(rows), projections * width, hidden, hit, own)
            return first_s + self.gemm_s(float(rows), hidden, width, hit, own)
        self.count(f"experts_{precision}", rows=float(rows), hit=hit, hidden=hidden, width=width)
        return kernel(load, hidden, width, projections)

    def measures_experts(self, precision: Precision = "bf16") -> bool:
        """Whether a mixture was measured in that precision: then its activation is among `experts_s`."""
        return (precision, True) in self._experts

    def decode_attention_s(
        self, batch: int, context_tokens: float, q_heads: int, kv_heads: int, head_dim: int
    ) -> float:
        """Seconds of one layer's attention of `batch` new tokens over `context_tokens` cached tokens in all.

        `q_heads` only bounds what was measured: the cached keys and values are read once per KV head whatever the
        number of queries that share them.
        """
        self.count(
            "decode_attention", batch=batch, context=context_tokens / batch, kv_heads=kv_heads, group=q_heads / kv_heads
        )
        return self._decode(batch, kv_heads, head_dim).step_s(context_tokens)

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
        low, high = self._memory_range
        if low <= size_bytes <= high:
            self._lookups.add("memory_bound", "interpolated")
        else:
            self.count("memory_bound", bytes=size_bytes)
        at, kernel = self._memory_at  # the last number of tokens: all kernels of an iteration have the same
        if at != tokens:
            kernel = self._memory.at(tokens)
            self._memory_at = tokens, kernel
        peak_s = size_bytes / self.reference.memory_bytes_per_s
        return max(kernel.time_s(Work({"memory": peak_s}, {"launches": 1.0}), size_bytes), peak_s)
