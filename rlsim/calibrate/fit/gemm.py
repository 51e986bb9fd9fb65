"""Matrix products: waves of tiles over the SMs, or weights streaming from memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import OptimizeResult, nnls

from rlsim.calibrate.fit.common import (
    Array,
    Mask,
    as_written,
    columns_of,
    descend,
    fit_logs,
    held_out,
    held_out_rows,
    soft_l1,
    squash,
    unsquash,
)
from rlsim.calibrate.fit.deepgemm import fit_deepgemm
from rlsim.calibrate.fit.kernels import (
    Kernel,
    compared,
    corrected,
    distinct,
    enough_for_all_constants,
    few_constants,
    predict,
)
from rlsim.calibrate.points import Fitted, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import DeepGemmFit, GemmFit, ProductFit, Tile
from rlsim.cost.operators import gemm_of
from rlsim.errors import CalibrationError
from rlsim.precision import WEIGHT_BYTES, Precision, peak_flop_per_s, product_bytes, quantising_bytes

Shapes = Sequence[tuple[int, int]]  # of blocks: rows, columns
TILES = ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 4, 8)
#: In other precisions than bf16, kernels choose their block by the number of rows alone: of these, from these rows on.
ROW_TILES = tuple((m, n) for m in (16, 32, 64, 128, 256) for n in (16, 32, 64, 128, 192, 256))
FROM_ROWS = (1, 17, 33, 65, 129, 257)
SHARES = np.linspace(-4.0, 2.5, 27)  # efficiencies that are tried for them, as `squash` takes them
CORRECTED_SHAPES = 100  # distinct weights (n, k): with fewer, a correction says more about them than about others
L2_SPEED = 3.0  # first guess of the rate of L2 over that of the memory
MOST_ROWS = 5000  # of the search for the constants
SMALL_TILES = ((1, 16), (1, 64), (16, 64), (64, 64), (128, 128))  # the one that suits the rows best is kept
SMALL_BLEND = 4.0
KNOTS = {
    "m": [4.0**e for e in range(8)],
    "n": [4.0**e for e in range(4, 9)],
    "k": [4.0**e for e in range(4, 8)],
}
#: Of products in other precisions than bf16, whose kernels change their block shape at powers of two of m.
QUANTISED_KNOTS = {**KNOTS, "m": [1.0, *(2.0**e for e in range(4, 14))]}


def kernel_of(precision: Precision) -> Kernel:
    """The products of one precision."""
    return Kernel(
        gemm_of(precision),
        lambda operators, row: operators.gemm_s(row.m, int(row.n), int(row.k), precision=precision),
        lambda row: f"{row.m:.0f} x {row.n:.0f} x {row.k:.0f}",
        slot="gemm",
    )


KERNEL = kernel_of("bf16")


def kernel_gemm(table: pd.DataFrame, ref: Reference, cold: bool, precision: Precision = "bf16") -> Fitted[ProductFit]:
    """Products of `table` (m, n, k, seconds), with bf16 activations and weights of that precision.

    `cold`: their weights were brought from memory, so every row counts alike; otherwise rows whose weights the L2 may
    have held are not judged, as `fit_gemm` says.
    """
    table = distinct(table, "gemm", ["m", "n", "k"])
    seen = ref.model_copy(update={"l2_bytes": 1.0}) if cold else ref
    kernel = kernel_of(precision)
    test, hot, streamed, _ = gemm_rows(table, seen, precision)
    full = enough_for_all_constants(ref, ~test & ~hot) and streamed.sum() >= 4 and (test & ~hot).any()
    fit: ProductFit
    if full:
        with np.errstate(divide="ignore"):  # no slope at all: the fit takes its upper bound
            fit = fit_gemm(table, seen, precision)
    else:
        test, hot = held_out_rows(_weights_of(table)), np.zeros(len(table), dtype=bool)
        fit = small_gemm(table[~test], ref, precision)
    points = compared(kernel, fit, ref, table[~hot], test[~hot])
    note = f"shapes (n, k) not fitted; {'weights beyond L2 or compute-bound' if full else few_constants(points)}"
    return Fitted(fit, {kernel.operator: residual_of(points, table[["m", "n", "k"]], note)}, points)


class GemmRows(NamedTuple):
    """Which rows of a table count for what, as masks."""

    test: Mask  # held out: every row of some weights (n, k)
    hot: Mask  # bound by memory and under 1.5 L2: not judged, and not fitted as if the weights came from memory
    streamed: Mask  # of those to fit, products of few rows with weights beyond four times L2
    in_l2: Mask  # of the hot ones those under half of L2, which held their weights for certain


def gemm_rows(table: pd.DataFrame, ref: Reference, precision: Precision = "bf16") -> GemmRows:
    """The rows of `table` (m, n, k)."""
    m, n, k = columns_of(table, ("m", "n", "k"))
    foot = WEIGHT_BYTES[precision] * n * k
    test = held_out(_weights_of(table))
    ridge = min(
        _peak(ref, precision) * WEIGHT_BYTES[precision] / 2.0 / ref.memory_bytes_per_s,
        64.0 if ref.l2_bytes < 60e6 else 1e9,
    )
    hot = (foot < 1.5 * ref.l2_bytes) & (m <= ridge)
    return GemmRows(test, hot, (m <= 16) & (foot > 4.0 * ref.l2_bytes) & ~test, hot & (foot < 0.5 * ref.l2_bytes))


def _knots(precision: Precision) -> dict[str, list[float]]:
    return KNOTS if precision == "bf16" else QUANTISED_KNOTS


def _peak(ref: Reference, precision: Precision) -> float:
    """The peak rate of products; raises `CalibrationError` for a GPU that has no tensor cores for them."""
    peak = peak_flop_per_s(ref, precision)
    if peak is None:
        raise CalibrationError(f"products in {precision} were measured, but the GPU's data sheet has no rate for them")
    return peak


def _weights_of(table: pd.DataFrame) -> pd.Series:
    return table.n.astype(str) + "x" + table.k.astype(str)


# All constants --------------------------------------------------------------------------------------------------------


def fit_gemm(table: pd.DataFrame, ref: Reference, precision: Precision = "bf16") -> ProductFit:
    """Fit the GEMM of one GPU. `table`: m, n, k, seconds.

    In fp8_block the blocks are those that DeepGEMM chooses, where that describes a quarter of the weights to fit better
    by a fit to the others.

    The memory efficiency comes first, from products of few rows with weights beyond four times L2; the rest follows
    with it fixed. Rows that are memory-bound and whose weights are under 1.5 L2 are only compared in bf16. In other
    precisions they would be most of those with few tokens (weights are half as large), so that nothing would tell the
    launch: those that L2 held for certain are fitted too, by the same formula with weights at a rate of L2's own, which
    is found beside the constants and is no part of the fit.
    """
    test, hot, streamed, in_l2 = gemm_rows(table, ref, precision)
    efficiency = _memory_efficiency(table[streamed], ref, precision)
    used = ~test & (~hot if precision == "bf16" else ~hot | in_l2)
    rows = table.assign(in_l2=in_l2)[used]
    many = len(table[["n", "k"]].drop_duplicates()) >= CORRECTED_SHAPES
    if precision == "fp8_block" and many:
        inner = held_out(_weights_of(rows))
        seen, unseen = rows[~inner], rows[inner & ~rows.in_l2]
        tiles, own = _with_tiles(seen, efficiency, ref, precision, many), _with_deepgemm(seen, efficiency, ref)
        if _loss(own, unseen, ref) < _loss(tiles, unseen, ref):
            return _with_deepgemm(rows, efficiency, ref)
    return _with_tiles(rows, efficiency, ref, precision, many)


def _some(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows enough for the constants, in their order."""
    chosen = np.random.default_rng(0).choice(np.arange(len(rows)), min(MOST_ROWS, len(rows)), replace=False)
    return rows.iloc[np.sort(chosen)]


def _loss(fit: ProductFit, rows: pd.DataFrame, ref: Reference) -> float:
    predicted = predict(kernel_of(fit.precision), fit, ref, rows)
    return float(soft_l1(np.log(predicted / rows.seconds.to_numpy(float))).sum())


def _with_deepgemm(rows: pd.DataFrame, efficiency: float, ref: Reference) -> DeepGemmFit:
    """The fit of DeepGEMM's own choice of blocks, corrected."""
    fit, l2_speed = fit_deepgemm(_some(rows), ref, efficiency)
    return corrected(kernel_of(fit.precision), fit, ref, _as_cold(rows, fit, l2_speed, ref), KNOTS)


def _as_cold(rows: pd.DataFrame, fit: ProductFit, l2_speed: float, ref: Reference) -> pd.DataFrame:
    """`rows`, those whose weights were in L2 with the seconds that these would take longer from memory by `fit`.

    `l2_speed`: the rate of L2 over that of the memory in `fit`.
    """
    if not rows.in_l2.any():
        return rows
    hot, kernel = rows[rows.in_l2], kernel_of(fit.precision)
    from_l2 = fit.model_copy(update={"memory_efficiency": fit.memory_efficiency * l2_speed})
    longer = pd.Series(predict(kernel, fit, ref, hot) - predict(kernel, from_l2, ref, hot), index=hot.index)
    return rows.assign(seconds=rows.seconds.add(longer, fill_value=0.0))


def _with_tiles(rows: pd.DataFrame, efficiency: float, ref: Reference, precision: Precision, correct: bool) -> GemmFit:
    """The fit of tiles of which the fastest is taken, or one for each range of rows."""
    some, by_rows = _some(rows), precision != "bf16"
    best, shapes, l2_speed = (
        _search_by_rows(some, efficiency, ref, precision) if by_rows else (_search(some, efficiency, ref), TILES, 1.0)
    )
    starts = FROM_ROWS if by_rows else (1,) * len(TILES)
    tiles = zip(shapes, squash(best[5:]), starts, strict=True)
    fit = GemmFit(
        precision=precision,
        launch_s=float(np.exp(best[0]) * 1e-6),
        memory_efficiency=float(efficiency),
        k_overhead=float(np.exp(best[1])),
        split_s=0.0 if by_rows else float(np.exp(best[2]) * 1e-6),
        blend=float(min(1.0 + np.exp(best[3]), 50.0)),
        wave_rounding=float(squash(best[4])),
        tiles=tuple(Tile(m=a, n=b, efficiency=float(e), from_rows=start) for (a, b), e, start in tiles),
        splits=(1,) if by_rows else SPLITS,
    )
    fit = as_written(fit)
    if not correct:
        return fit
    return corrected(kernel_of(precision), fit, ref, _as_cold(rows, fit, l2_speed, ref), _knots(precision))


def _memory_efficiency(rows: pd.DataFrame, ref: Reference, precision: Precision) -> float:
    """From seconds = launch + size / rate, in relative errors."""
    m, n, k, y = columns_of(rows, ("m", "n", "k", "seconds"))
    size = product_bytes(precision, m, n, k) + quantising_bytes(precision, m, k)
    design = np.stack([1.0 / y, size / y], axis=1)
    (_, slope), _ = nnls(design, np.ones(len(y)))
    return float(min(1.0 / (slope * ref.memory_bytes_per_s), 0.95))


def _search(rows: pd.DataFrame, memory_efficiency: float, ref: Reference) -> Array:
    """The other constants, as `gemm_time` takes them: the best of three descents."""
    m, n, k, y = columns_of(rows, ("m", "n", "k", "seconds"))
    target = np.log(y)

    def loss(p: Array) -> float:
        # a launch under 0.5 us or a blend above 20 is not told apart by the data
        guard = max(0.0, -p[0] - 0.7) + max(0.0, p[3] - 3.0)
        error = np.log(gemm_time(p, memory_efficiency, m, n, k, ref)) - target
        return float(np.mean(2.0 * soft_l1(error)) + 0.1 * guard)

    found = []
    for seed in range(3):
        tiles = np.random.default_rng(seed).normal(0.7, 0.3 * (seed > 0), len(TILES))
        found.append(descend(loss, np.concatenate([np.log([2.5, 100.0, 3.0, 2.0]), [0.0], tiles])))
    return min(found, key=lambda pair: pair[1])[0]


def _search_by_rows(
    rows: pd.DataFrame, memory_efficiency: float, ref: Reference, precision: Precision
) -> tuple[Array, Shapes, float]:
    """The same with one block for each range of rows, these blocks, and the rate of L2 over the memory's; k is not
    split.

    In turns: the block and its efficiency for each range by trying all, then all constants by least squares.
    """
    of = np.digitize(rows.m, FROM_ROWS)
    parts = [columns_of(rows[of == i + 1], ("m", "n", "k", "seconds", "in_l2")) for i in range(len(FROM_ROWS))]

    def seconds(shared: Array, share: float, tile: tuple[int, int], part: list[Array]) -> Array:
        p, (m, n, k, _, in_l2) = np.append(shared[:-1], share), part
        efficiency = memory_efficiency * np.where(in_l2, 1.0 + np.exp(shared[-1]), 1.0)
        return gemm_time(p, efficiency, m, n, k, ref, precision, tiles=(tile,), splits=(1,))

    def loss(shared: Array, share: float, tile: tuple[int, int], part: list[Array]) -> float:
        return float(soft_l1(np.log(seconds(shared, share, tile, part) / part[3])).sum())

    p = np.array([*np.log([2.5, 100.0, 1.0, 2.0]), 0.0, np.log(L2_SPEED - 1.0)])
    own = len(p)  # those of all ranges, before the tiles' shares
    tiles: list[tuple[int, int]] = []

    def shown(p: Array) -> Array:
        return np.concatenate([seconds(p[:own], *one) for one in zip(p[own:], tiles, parts, strict=True)])

    for _ in range(4):
        picks = [min((loss(p[:own], *pick, part), *pick) for pick in product(SHARES, ROW_TILES)) for part in parts]
        tiles[:] = [tile for _, _, tile in picks]
        start = np.append(p[:own], [share for _, share, _ in picks])
        p = fit_logs(shown, np.concatenate([part[3] for part in parts]), start, pull=0.02, within=5.0).x
    return np.delete(p, own - 1), tiles, 1.0 + float(np.exp(p[own - 1]))


def gemm_time(
    p: Array,
    memory_efficiency: float | Array,
    m: Array,
    n: Array,
    k: Array,
    ref: Reference,
    precision: Precision = "bf16",
    *,
    tiles: Shapes = TILES,
    splits: Sequence[int] = SPLITS,
) -> Array:
    """`Products.time_s` on arrays.

    p = log launch (us), log k overhead, log split (us), log (blend - 1), rounding, tiles.
    """
    launch, overhead, split_s, blend = np.exp(p[0]) * 1e-6, np.exp(p[1]), np.exp(p[2]) * 1e-6, 1.0 + np.exp(p[3])
    share, efficiency = squash(p[4]), squash(p[5:])
    compute = np.full(m.shape, np.inf)
    for (bm, bn), eff in zip(tiles, efficiency, strict=True):
        blocks = np.ceil(m / bm) * np.ceil(n / bn)
        unit = 2.0 * bm * bn / (_peak(ref, precision) / ref.sm_count * eff)
        for split in splits:
            waves = blocks * split / ref.sm_count
            waves = np.maximum(1.0, waves + share * (np.ceil(waves) - waves))
            extra = split_s + 4.0 * m * n * split / ref.memory_bytes_per_s if split > 1 else 0.0
            compute = np.minimum(compute, waves * unit * (k / split + overhead) + extra)
    rate = ref.memory_bytes_per_s * memory_efficiency
    memory, quantised = product_bytes(precision, m, n, k) / rate, quantising_bytes(precision, m, k) / rate
    high, low = np.maximum(compute, memory), np.minimum(compute, memory)
    return np.asarray(launch + quantised + high * (1.0 + (low / high) ** blend) ** (1.0 / blend))


# Few constants --------------------------------------------------------------------------------------------------------


def small_gemm(rows: pd.DataFrame, ref: Reference, precision: Precision = "bf16") -> GemmFit:
    """Launch time, share of the bandwidth and share of the peak, one tile: for tables that cannot tell more."""
    m, n, k, y = columns_of(rows, ("m", "n", "k", "seconds"))
    size, quantised = product_bytes(precision, m, n, k), quantising_bytes(precision, m, k)

    def fitted(tile: tuple[int, int]) -> OptimizeResult:
        waves = np.maximum(1.0, np.ceil(m / tile[0]) * np.ceil(n / tile[1]) / ref.sm_count)
        work = waves * 2.0 * tile[0] * tile[1] * k * ref.sm_count / _peak(ref, precision)

        def shown(p: Array) -> Array:
            rate = ref.memory_bytes_per_s * squash(p[2])
            compute, memory = work / squash(p[1]), size / rate
            return np.asarray(
                np.exp(p[0]) + quantised / rate + (compute**SMALL_BLEND + memory**SMALL_BLEND) ** (1.0 / SMALL_BLEND)
            )

        start = np.array([math.log(0.5 * y.min()), unsquash(0.5), unsquash(0.5)])
        return fit_logs(shown, y, start, pull=0.02, within=12.0)

    found = {tile: fitted(tile) for tile in SMALL_TILES}
    tile = min(found, key=lambda one: float(found[one].cost))
    p = found[tile].x
    fit = GemmFit(
        precision=precision,
        launch_s=math.exp(p[0]),
        memory_efficiency=float(squash(p[2])),
        k_overhead=0.0,
        split_s=0.0,
        blend=SMALL_BLEND,
        wave_rounding=0.0,
        tiles=(Tile(m=tile[0], n=tile[1], efficiency=float(squash(p[1]))),),
        splits=(1,),
    )
    return corrected(kernel_of(precision), as_written(fit), ref, rows, _knots(precision))
