"""Fits for small tables: two or three constants each, where a full fit has more constants than rows.

The same formulas as the full fits (`rlsim.cost.operators`) with one tile, one efficiency, no floor; what they leave
over is the same kind of correction. All constants are found by least squares of log errors with a soft-L1 loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from rlsim.calibrate.fit.attention import DECODE_KNOTS
from rlsim.calibrate.fit.common import Array, operators_with, rounded, squash, unsquash
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.calibrate.fit.gemm import KNOTS as GEMM_KNOTS
from rlsim.cost.calibration import DecodeAttentionFit, GemmFit, PrefillAttentionFit, Reference, Tile
from rlsim.cost.operators import DECODE_AXES, GEMM_AXES, PREFILL_AXES
from rlsim.schema import validate

Columns = Mapping[str, Array]

TILES = ((1, 16), (1, 64), (16, 64), (64, 64), (128, 128))  # the one that suits the rows best is kept
BLOCKS = (16, 64, 128)  # queries per block, likewise
BLEND = 4.0
MEMORY_EFFICIENCY = 0.8
PREFILL_KNOTS: Mapping[str, Sequence[float]] = {
    "sequences": [4.0**e for e in range(5)],
    "new": [2.0**e for e in range(15)],
    "q_heads": [1.0, 4.0, 16.0, 64.0],
    "group": [1.0, 2.0, 8.0],
}


def small_gemm(rows: Columns, ref: Reference) -> GemmFit:
    """Launch time, share of the bandwidth and share of the peak through `rows`: m, n, k, seconds."""
    m, n, k, y = (rows[name] for name in ("m", "n", "k", "seconds"))
    size = 2.0 * (n * k + m * k + m * n)

    def fitted(tile: tuple[int, int]) -> OptimizeResult:
        waves = np.maximum(1.0, np.ceil(m / tile[0]) * np.ceil(n / tile[1]) / ref.sm_count)
        work = waves * 2.0 * tile[0] * tile[1] * k * ref.sm_count / ref.bf16_flop_per_s

        def shown(p: Array) -> Array:
            compute, memory = work / squash(p[1]), size / (ref.memory_bytes_per_s * squash(p[2]))
            return np.asarray(np.exp(p[0]) + (compute**BLEND + memory**BLEND) ** (1.0 / BLEND))

        return _least_squares(shown, y, [math.log(0.5 * y.min()), unsquash(0.5), unsquash(0.5)])

    found = {tile: fitted(tile) for tile in TILES}
    tile = min(found, key=lambda one: float(found[one].cost))
    p = found[tile].x
    record = GemmFit(
        launch_s=math.exp(p[0]),
        memory_efficiency=float(squash(p[2])),
        k_overhead=0.0,
        split_s=0.0,
        blend=BLEND,
        wave_rounding=0.0,
        tiles=(Tile(m=tile[0], n=tile[1], efficiency=float(squash(p[1]))),),
        splits=(1,),
    )
    fit = validate(rounded(record.model_dump()), GemmFit)
    formula = operators_with(ref, gemm=fit)
    expected = [formula.gemm_s(a, int(b), int(c)) for a, b, c in zip(m, n, k, strict=True)]
    columns = dict(zip(GEMM_AXES, (m, n, k), strict=True))
    return fit.model_copy(update={"correction": fit_correction(columns, GEMM_KNOTS, np.log(y / expected))})


def small_decode_attention(rows: Columns, ref: Reference, skew: float) -> DecodeAttentionFit:
    """A fixed time, one for each sequence, and a share of the bandwidth through `rows`: batch, context, q_heads,
    kv_heads, seconds (heads of 128)."""
    b, s, q, kv, y = (rows[name] for name in ("batch", "context", "q_heads", "kv_heads", "seconds"))
    size = b * s * kv * 512.0

    def shown(p: Array) -> Array:
        return np.asarray(np.exp(p[0]) + np.exp(p[1]) * b + size / (ref.memory_bytes_per_s * squash(p[2])))

    p = _least_squares(shown, y, [math.log(0.5 * y.min()), math.log(0.05 * y.min()), unsquash(0.5)]).x
    record = DecodeAttentionFit(
        floor_s=0.0,
        floor_tile_s=0.0,
        floor_sequence_s=0.0,
        stream_s=math.exp(p[0]),
        stream_tile_s=0.0,
        stream_sequence_s=math.exp(p[1]),
        parallelism=(0.0,),
        efficiency=(float(squash(p[2])),),
        skew=skew,
    )
    fit = validate(rounded(record.model_dump()), DecodeAttentionFit)
    formula = operators_with(ref, decode=fit)
    expected = [formula.decode_attention_s(int(b[i]), b[i] * s[i], int(q[i]), int(kv[i]), 128) for i in range(len(y))]
    columns = dict(zip(DECODE_AXES, (b, s, kv), strict=True))
    return fit.model_copy(update={"correction": fit_correction(columns, DECODE_KNOTS, np.log(y / expected))})


def small_prefill_attention(rows: Columns, ref: Reference) -> PrefillAttentionFit:
    """A launch time and a share of the peak, of all SMs and of one, through `rows`: batch, new, prior, q_heads,
    kv_heads, seconds (heads of 128); chunks on cached tokens count like any other."""
    b, s, prior, q, kv, y = (rows[name] for name in ("batch", "new", "prior", "q_heads", "kv_heads", "seconds"))
    moved = b * (s * 2 * q + (s + prior) * 2 * kv) * 256.0
    memory = moved / (ref.memory_bytes_per_s * MEMORY_EFFICIENCY)

    def fitted(block: int) -> OptimizeResult:
        blocks = np.ceil(s / block)
        end = prior + blocks * block
        total = 512.0 * q * b * blocks * block * (prior + block + end) / 2.0 / ref.bf16_flop_per_s
        longest = 512.0 * block * end * ref.sm_count / ref.bf16_flop_per_s

        def shown(p: Array) -> Array:
            all_s, one_s = total / squash(p[1]), longest / squash(p[2])
            return np.asarray(np.exp(p[0]) + np.maximum((all_s**BLEND + one_s**BLEND) ** (1.0 / BLEND), memory))

        single = 0.9 if ref.sm_count == 1 else 0.5
        return _least_squares(shown, y, [math.log(0.5 * y.min()), unsquash(0.3), unsquash(single)])

    found = {block: fitted(block) for block in BLOCKS}
    block = min(found, key=lambda one: float(found[one].cost))
    p = found[block].x
    record = PrefillAttentionFit(
        launch_s=math.exp(p[0]),
        block_tokens=block,
        overhead_tokens=0.0,
        blend=BLEND,
        keys=(float(block),),
        efficiency=(float(squash(p[1])),),
        single_efficiency=float(squash(p[2])),
        memory_efficiency=MEMORY_EFFICIENCY,
    )
    fit = validate(rounded(record.model_dump()), PrefillAttentionFit)
    formula = operators_with(ref, prefill=fit)
    expected = [
        formula.prefill_attention_s([(s[i], prior[i])] * int(b[i]), int(q[i]), int(kv[i]), 128) for i in range(len(y))
    ]
    columns = dict(zip(PREFILL_AXES, (b, s, q, q / kv), strict=True))
    return fit.model_copy(update={"correction": fit_correction(columns, PREFILL_KNOTS, np.log(y / expected))})


def _least_squares(shown: Callable[[Array], Array], y: Array, start: list[float]) -> OptimizeResult:
    begin = np.array(start)

    def error(p: Array) -> Array:  # a weak pull to the start holds what few rows do not tell
        return np.concatenate([np.log(shown(p) / y), 0.02 * (p - begin)])

    return least_squares(error, begin, loss="soft_l1", f_scale=0.1, bounds=(begin - 12.0, begin + 12.0))
