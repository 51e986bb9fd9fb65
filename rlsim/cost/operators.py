"""Seconds of single kernels on one GPU, from a calibration's few fitted constants.

Every formula is a roofline, `launch + max(FLOPs / rate, bytes / bandwidth)`, refined by what decides how
much of the peak a kernel reaches: whole waves of blocks over the SMs for GEMMs, parallelism for attention.

Weights and KV are taken as **cold**: in a real decode step every layer's weights stream from device memory, because
the other layers have displaced them from L2 since the step before. Kernel microbenchmarks repeat one small kernel
and find its operands in L2, so bandwidths are fitted on footprints well beyond L2 and used for all sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from math import ceil, inf, log2

from rlsim.cost.calibration import OperatorFits, Reference, Residual

_BF16 = 2.0  # bytes


def interpolate(knots: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear between `knots` (ascending), constant outside."""
    if x <= knots[0]:
        return values[0]
    if x >= knots[-1]:
        return values[-1]
    i = bisect_right(knots, x) - 1
    return values[i] + (values[i + 1] - values[i]) * (x - knots[i]) / (knots[i + 1] - knots[i])


class Operators:
    """The kernels of one GPU. bf16 throughout; sizes are those one GPU sees, after tensor-parallel sharding.

    `outside` counts look-ups beyond the measured ranges of the calibration, by operator: the formula still holds its
    shape there, but its error is not known.
    """

    def __init__(self, fits: OperatorFits, reference: Reference, residuals: dict[str, Residual] | None = None) -> None:
        self.fits = fits
        self.reference = reference
        self.outside: Counter[str] = Counter()
        self._ranges = {name: residual.ranges for name, residual in (residuals or {}).items()}
        self._gemm: dict[tuple[float, int, int, float], float] = {}

    def count_outside(self, operator: str, **values: float) -> None:
        """Counts a look-up of `operator` if any of its named values lies outside the measured range."""
        ranges = self._ranges.get(operator)
        if ranges is None:
            return
        for name, value in values.items():
            if name in ranges and not ranges[name][0] <= value <= ranges[name][1]:
                self.outside[operator] += 1
                return

    def gemm_s(self, m: float, n: int, k: int, groups: float = 1) -> float:
        """Seconds of `groups` products of an m×k activation and a k×n weight in one kernel.

        `compute` takes the fastest of a few block shapes and splits of k: `blocks · split / SMs` waves (at least
        one, rounded up in part) of `2 · block · (k / split + overhead)` FLOPs each. `memory` reads the weights cold.
        More than one group stands for a mixture's experts (each with `m` rows); that form is an approximation from
        plain GEMMs, not measured.
        """
        key = (m, n, k, groups)
        known = self._gemm.get(key)
        if known is not None:
            return known
        self.count_outside("gemm", m=m * groups, n=n, k=k)
        fit, ref = self.fits.gemm, self.reference
        rounding = fit.wave_rounding
        sms, per_sm = ref.sm_count, ref.bf16_flop_per_s / ref.sm_count
        compute = float("inf")
        for tile in fit.tiles:
            blocks = ceil(m / tile.m) * ceil(n / tile.n) * groups
            unit = 2.0 * tile.m * tile.n / (per_sm * tile.efficiency)
            for split in fit.splits:
                waves = blocks * split / sms
                waves = max(1.0, waves + rounding * (ceil(waves) - waves))
                time = waves * unit * (k / split + fit.k_overhead)
                if split > 1:
                    time += fit.split_s + 4.0 * m * n * groups * split / ref.memory_bytes_per_s
                if time < compute:
                    compute = time
        size = _BF16 * groups * (float(n) * k + m * k + m * n)
        memory = size / (ref.memory_bytes_per_s * fit.memory_efficiency)
        high, low = (compute, memory) if compute > memory else (memory, compute)
        time = fit.launch_s + high * float((1.0 + (low / high) ** fit.blend) ** (1.0 / fit.blend))
        self._gemm[key] = time
        return time

    def decode_attention_lines(self, batch: int, kv_heads: int, head_dim: int) -> tuple[float, float, float]:
        """`(floor_s, stream_s, stream_s_per_token)`: decode attention takes `max(floor, stream + slope · T)` seconds.

        T is the sum of the batch's context tokens.
        """
        fit = self.fits.decode_attention
        tiles = batch * kv_heads
        floor = fit.floor_s + fit.floor_tile_s * tiles + fit.floor_sequence_s * batch
        stream = fit.stream_s + fit.stream_tile_s * tiles + fit.stream_sequence_s * batch
        efficiency = interpolate(fit.parallelism, fit.efficiency, log2(tiles))
        bytes_per_token = 2.0 * kv_heads * head_dim * _BF16
        return floor, stream, bytes_per_token / (self.reference.memory_bytes_per_s * efficiency)

    def decode_attention_s(
        self, batch: int, context_tokens: float, q_heads: int, kv_heads: int, head_dim: int
    ) -> float:
        """Seconds of one layer's attention of `batch` new tokens over `context_tokens` cached tokens in all.

        Convex and piecewise linear in `context_tokens`. `q_heads` only bounds what was measured: the cached keys and
        values are read once per KV head whatever the number of queries that share them.
        """
        self.count_outside(
            "decode_attention", batch=batch, context=context_tokens / batch, kv_heads=kv_heads, group=q_heads / kv_heads
        )
        floor, stream, slope = self.decode_attention_lines(batch, kv_heads, head_dim)
        return max(floor, stream + slope * context_tokens)

    def prefill_attention_s(
        self, chunks: Sequence[tuple[float, float]], q_heads: int, kv_heads: int, head_dim: int
    ) -> float:
        """Seconds of one layer's causal attention over `chunks` of (new tokens, tokens already cached), one kernel.

        Work: `4 · q_heads · head_dim` FLOPs for each (query, key) pair, in blocks of queries; a block's last keys
        are masked but computed. Chunks with cached tokens are derived from the same formula (measured: none cached).
        """
        fit, ref = self.fits.prefill_attention, self.reference
        block = fit.block_tokens
        measured = self._ranges.get("prefill_attention", {})
        (shortest_new, longest_new), (shortest, longest_context) = (
            measured.get(name, (0.0, inf)) for name in ("new", "context")
        )
        tokens: float = 0
        context: float = 0
        blocks: float = 0
        keys: float = 0  # of all blocks, doubled: a chunk's have between `prior + block` and `end`
        last: float = 0  # where the longest chunk's blocks end
        for new, prior in chunks:
            length = prior + new
            if not (shortest_new <= new <= longest_new and shortest <= length <= longest_context):
                self.outside["prefill_attention"] += 1
            n = -(-new // block)
            end = prior + n * block
            blocks += n
            keys += n * (prior + block + end)
            tokens += new
            context += length
            if end > last:
                last = end
        queries = blocks * block
        work = block * (keys / 2 + blocks * fit.overhead_tokens)
        longest = block * (last + fit.overhead_tokens)
        flop = 4.0 * head_dim
        rate = ref.bf16_flop_per_s * interpolate(fit.keys, fit.efficiency, work / queries)
        total_s = flop * q_heads * work / rate
        longest_s = flop * longest / (ref.bf16_flop_per_s / ref.sm_count * fit.single_efficiency)
        p = fit.blend
        compute = float((total_s**p + longest_s**p) ** (1.0 / p))
        size = tokens * q_heads * 2 + context * kv_heads * 2
        memory = size * head_dim * _BF16 / (ref.memory_bytes_per_s * fit.memory_efficiency)
        return fit.launch_s + max(compute, memory)

    def memory_bound_s(self, size_bytes: float) -> float:
        """Seconds of an elementwise kernel or norm that moves `size_bytes` to and from device memory."""
        fit = self.fits.memory_bound
        return fit.launch_s + size_bytes / (self.reference.memory_bytes_per_s * fit.efficiency)
