"""Seconds of single kernels on one GPU, from a calibration's few fitted constants.

Every formula is a roofline, `launch + max(FLOPs / rate, bytes / bandwidth)`, refined by what decides how
much of the peak a kernel reaches: whole waves of blocks over the SMs for GEMMs, parallelism for attention. What the
formula's constants leave over is a factor fitted on a coarse grid (`Correction`), constant beyond its edges.

Weights and KV are taken as **cold**: in a real decode step every layer's weights stream from device memory, because
the other layers have displaced them from L2 since the step before. Kernel microbenchmarks repeat one small kernel
and find its operands in L2, so bandwidths are fitted on footprints well beyond L2 and used for all sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf, log2, nan
from typing import TypeVar

from rlsim.cost.calibration import Reference, Residual
from rlsim.cost.curve import DecodeCurve
from rlsim.cost.experts import ExpertLoad, FusedExperts
from rlsim.cost.fits import Correction, DecodeAttentionFit, OperatorFits, PrefillAttentionFit
from rlsim.cost.lookups import Lookups
from rlsim.cost.products import Products
from rlsim.cost.surface import Surface, surface_of
from rlsim.precision import KV_BYTES, Precision

BF16_BYTES = 2.0
#: Columns of the widest blocks of products. What is narrower than that (a router) is one column of blocks.
BLOCK_COLUMNS = 256
#: Operators without a fit: what no calibration has measured of them counts as extrapolated.
ROOFLINES = ("linear_attention", "sparse_attention", "state_space")
A = TypeVar("A", DecodeAttentionFit, PrefillAttentionFit)
_ANY_DIM = 0  # heads of another size than those that were measured apart


def interpolate(knots: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear between `knots` (ascending), constant outside."""
    if x <= knots[0]:
        return values[0]
    if x >= knots[-1]:
        return values[-1]
    i = bisect_right(knots, x) - 1
    return values[i] + (values[i + 1] - values[i]) * (x - knots[i]) / (knots[i + 1] - knots[i])


#: Axes of the corrections, in order.
DECODE_AXES = ("batch", "context", "kv_heads")
MEMORY_AXES = ("tokens", "bytes")
PREFILL_AXES = ("sequences", "new", "q_heads", "group")
DECODE_WINDOW_AXES = ("tiles", "window")
PREFILL_WINDOW_AXES = ("sequences", "tokens", "kv_heads", "group")


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
        self._decode: dict[tuple[int, int, int], DecodeCurve] = {}
        self._decode_fits = _by_head_dim(fits.decode_attention, DECODE_AXES)
        self._memory_factor = surface_of(fits.memory_bound.correction, MEMORY_AXES)
        self._prefill_fits = _by_head_dim(fits.prefill_attention, PREFILL_AXES)
        for size, fit in fits.masked_prefill.items():
            self._prefill_fits[-size] = (fit, surface_of(fit.correction, PREFILL_AXES))
        self._decode_factors: dict[tuple[int, int], Surface] = {}
        self._prefill_factors: dict[tuple[float, int, int], Surface] = {}
        self._memory_factor_at: tuple[float, Surface | None] = (nan, None)
        self._memory_range = self._ranges.get("memory_bound", {}).get("bytes", (-inf, inf))
        measured = self._ranges.get("prefill_attention", {})
        new, context = measured.get("new", (0.0, inf)), measured.get("context", (0.0, inf))
        self._prefill_range = (*new, context[1])
        self._decode_windows = {dim: Surface(one, DECODE_WINDOW_AXES) for dim, one in fits.decode_windows.items()}
        self._prefill_windows = {dim: Surface(one, PREFILL_WINDOW_AXES) for dim, one in fits.prefill_windows.items()}
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

    def decode_attention_curve(self, batch: int, kv_heads: int, head_dim: int) -> tuple[list[float], list[float]]:
        """Knots of T, the sum of the batch's context tokens, and one layer's seconds there; linear in between, the
        last slope continues.

        The formula is `max(floor, stream + slope · T)`; a correction bends it at its own contexts. Times never fall
        with T and never beat the data sheet's bandwidth.
        """
        dim = head_dim if head_dim in self._decode_fits else _ANY_DIM
        (fit, surface), ref = self._decode_fits[dim], self.reference
        tiles = batch * kv_heads
        floor = fit.floor_s + fit.floor_tile_s * tiles + fit.floor_sequence_s * batch
        stream = fit.stream_s + fit.stream_tile_s * tiles + fit.stream_sequence_s * batch
        efficiency = interpolate(fit.parallelism, fit.efficiency, log2(tiles))
        token_bytes = 2.0 * kv_heads * head_dim * KV_BYTES[fit.kv_precision]
        slope = token_bytes / (ref.memory_bytes_per_s * efficiency)
        factor: Surface | None = None
        if surface is not None:
            heads = self._decode_factors.get((dim, kv_heads))
            if heads is None:
                heads = self._decode_factors[dim, kv_heads] = surface.sliced(kv_heads)
            factor = heads.along(batch)
        return bent(batch, floor, stream, slope, token_bytes / ref.memory_bytes_per_s, fit.correction, factor)

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
        key = (batch, kv_heads, head_dim)
        curve = self._decode.get(key)
        if curve is None:
            curve = self._decode[key] = DecodeCurve(batch, *self.decode_attention_curve(*key))
        return curve.step_s(context_tokens)

    def decode_window_factor(self, batch: int, kv_heads: int, head_dim: int, window_tokens: int) -> float:
        """Time of decode attention in a window over that of as many tokens; 1 where it was not measured.

        It holds for any context: in a CUDA graph the kernel is the one for the longest context that a model may have.
        """
        factor = self._decode_windows.get(head_dim)
        return 1.0 if factor is None else factor(batch * kv_heads, window_tokens)

    def prefill_attention_s(
        self,
        chunks: Sequence[tuple[float, float]],
        q_heads: int,
        kv_heads: int,
        head_dim: float,
        window_tokens: int | None = None,
    ) -> float:
        """Seconds of one layer's causal attention over `chunks` of (new tokens, tokens already cached), one kernel.

        With a window a query attends to its last `window_tokens` tokens, and a block to that and its own queries;
        what the kernel of prompts beyond their window takes more or less is a measured factor. Kernels that mask
        instead (`masked_prefill`) go through all keys.

        Work: `4 · q_heads · head_dim` FLOPs for each (query, key) pair, in blocks of queries, of one head or of all
        that share a KV head; a block's last keys are masked but computed. Chunks with cached tokens are derived from
        the same formula (measured: none cached).
        """
        dim = head_dim if head_dim in self._prefill_fits else _ANY_DIM
        if window_tokens is not None and -head_dim in self._prefill_fits:  # noqa: SIM102
            if any(new + prior > window_tokens for new, prior in chunks):
                dim, window_tokens = -head_dim, None
        (fit, surface), ref = self._prefill_fits[dim], self.reference
        heads = q_heads // kv_heads if fit.packed else 1  # whose queries are in one block
        block = fit.block_tokens / heads
        shortest, longest_new, longest_context = self._prefill_range
        outside: tuple[float, float] | None = None
        cut = False  # by the window
        # Doubled: `pairs` of queries and keys, and the `keys` of all blocks (a chunk's have `prior + block` to `end`).
        zero: float = 0  # whole numbers add up faster
        tokens = context = pairs = blocks = keys = last = zero
        for new, prior in chunks:
            reached = prior + new
            if new < shortest or new > longest_new or reached > longest_context:
                outside = (new, prior)
            n = -(-new * heads // fit.block_tokens)
            end = prior + n * block
            blocks += n
            tokens += new
            if window_tokens is None or reached <= window_tokens:
                keys += n * (prior + block + end)
                context += reached
                pairs += new * (prior + reached)
            else:
                cut = True
                reach = window_tokens + block  # keys of a block that the window cuts
                whole = max((reach - prior) // block, 0.0)  # blocks that it does not cut
                growing = max(window_tokens - prior, 0.0)  # queries that have no more tokens before them than it holds
                if whole < n:
                    keys += whole * (2.0 * prior + (whole + 1) * block) + 2.0 * (n - whole) * reach
                    end = reach
                else:
                    keys += n * (prior + block + end)
                context += new + min(prior, window_tokens)
                pairs += growing * (2.0 * prior + growing) + 2.0 * (new - growing) * window_tokens
            if end > last:
                last = end
        if outside is None:
            self._lookups.add("prefill_attention", "interpolated")
        else:
            self.count("prefill_attention", new=outside[0], context=sum(outside))
        queries = blocks * block
        work = block * (keys / 2 + blocks * fit.overhead_tokens)
        longest = fit.block_tokens * (last + fit.overhead_tokens)
        flop = 4.0 * head_dim
        rate = ref.bf16_flop_per_s * interpolate(fit.keys, fit.efficiency, work / queries)
        total_s = flop * q_heads * work / rate
        longest_s = flop * longest / (ref.bf16_flop_per_s / ref.sm_count * fit.single_efficiency)
        p = fit.blend
        compute = float((total_s**p + longest_s**p) ** (1.0 / p))
        size = (tokens * q_heads * 2 * BF16_BYTES + context * kv_heads * 2 * KV_BYTES[fit.kv_precision]) * head_dim
        memory = size / (ref.memory_bytes_per_s * fit.memory_efficiency)
        time = fit.launch_s + max(compute, memory)
        if cut and head_dim in self._prefill_windows:
            count = len(chunks)
            time *= self._prefill_windows[int(head_dim)](count, tokens / count, kv_heads, q_heads / kv_heads)
        if surface is None:
            return time
        factor = self._prefill_factors.get((dim, q_heads, kv_heads))
        if factor is None:
            factor = surface.sliced(q_heads, q_heads / kv_heads)
            self._prefill_factors[dim, q_heads, kv_heads] = factor
        # The prompt with as many keys per query.
        return max(time * factor(len(chunks), pairs / tokens), size / ref.memory_bytes_per_s)

    def memory_bound_s(self, size_bytes: float, tokens: float) -> float:
        """Seconds of an elementwise kernel or norm over `tokens` tokens that moves `size_bytes` to and from memory."""
        fit, ref = self.fits.memory_bound, self.reference
        low, high = self._memory_range
        if low <= size_bytes <= high:
            self._lookups.add("memory_bound", "interpolated")
        else:
            self.count("memory_bound", bytes=size_bytes)
        time = fit.launch_s + size_bytes / (ref.memory_bytes_per_s * fit.efficiency)
        if self._memory_factor is not None:
            at, factor = self._memory_factor_at  # the last number of tokens: all kernels of an iteration have the same
            if factor is None or at != tokens:
                factor = self._memory_factor.along(tokens)
                self._memory_factor_at = (tokens, factor)
            time = max(time * factor(size_bytes), size_bytes / ref.memory_bytes_per_s)
        return time


def _by_head_dim(fit: A, axes: Sequence[str]) -> dict[float, tuple[A, Surface | None]]:
    """An attention fit and its correction, by the size of the heads that it is for."""
    fits = {_ANY_DIM: fit, **getattr(fit, "head_dims", {})}
    return {dim: (one, surface_of(one.correction, axes)) for dim, one in fits.items()}


def bent(
    batch: int,
    floor: float,
    stream: float,
    slope: float,
    least_slope: float,
    correction: Correction | None,
    factor: Surface | None,
) -> tuple[list[float], list[float]]:
    """Knots of T and the seconds there of `max(floor, stream + slope · T)`, bent by a correction's factor along its
    axis `context` (T / batch); times never fall with T and are never below `least_slope · T`.

    The last slope continues beyond the last knot.
    """
    turn = (floor - stream) / slope
    knots = {0.0, turn} if turn > 0.0 else {0.0}
    if correction is None or factor is None:
        ordered = [*sorted(knots), max(turn, 0.0) + 1.0]
        return ordered, [max(floor, stream + slope * total) for total in ordered]
    contexts = correction.knots("context")
    factors = {batch * context: at for context, at in zip(contexts, factor.at_knots(), strict=True)}
    knots.update(factors)
    ordered, times, longest = sorted(knots), [], 0.0
    for total in ordered:
        at = factors.get(total) or factor(max(total / batch, contexts[0]))
        time = max(floor, stream + slope * total) * at
        longest = max(longest, time, total * least_slope)
        times.append(longest)
    # beyond the last knot the formula goes on under the factor of that knot
    last = factors[batch * contexts[-1]]
    return [*ordered, ordered[-1] * 2.0], [*times, longest + slope * last * ordered[-1]]
