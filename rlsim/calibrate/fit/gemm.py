"""Matrix products: waves of tiles over the SMs, or weights streaming from memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from rlsim.calibrate.fit.common import (
    Array,
    Fitted,
    descend,
    held_out,
    operators_with,
    residual,
    robust,
    rounded,
    squash,
)
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.cost.calibration import GemmFit, Reference, Tile
from rlsim.cost.operators import GEMM_AXES
from rlsim.schema import validate

TILES = ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128))

SPLITS = (1, 2, 4, 8)

CORRECTED_SHAPES = 100  # distinct weights (n, k): with fewer, a correction says more about them than about others

KNOTS = {
    "m": [4.0**e for e in range(8)],
    "n": [4.0**e for e in range(4, 9)],
    "k": [4.0**e for e in range(4, 8)],
}


def gemm_time(p: Array, memory_efficiency: float, m: Array, n: Array, k: Array, ref: Reference) -> Array:
    """`Operators.gemm_s` on arrays.

    p = log launch (us), log k overhead, log split (us), log (blend - 1), rounding, tiles.
    """
    launch, overhead, split_s, blend = np.exp(p[0]) * 1e-6, np.exp(p[1]), np.exp(p[2]) * 1e-6, 1.0 + np.exp(p[3])
    share, efficiency = squash(p[4]), squash(p[5:])
    compute = np.full(m.shape, np.inf)
    for (bm, bn), eff in zip(TILES, efficiency, strict=True):
        blocks = np.ceil(m / bm) * np.ceil(n / bn)
        unit = 2.0 * bm * bn / (ref.bf16_flop_per_s / ref.sm_count * eff)
        for split in SPLITS:
            waves = blocks * split / ref.sm_count
            waves = np.maximum(1.0, waves + share * (np.ceil(waves) - waves))
            extra = split_s + 4.0 * m * n * split / ref.memory_bytes_per_s if split > 1 else 0.0
            compute = np.minimum(compute, waves * unit * (k / split + overhead) + extra)
    memory = 2.0 * (n * k + m * k + m * n) / (ref.memory_bytes_per_s * memory_efficiency)
    high, low = np.maximum(compute, memory), np.minimum(compute, memory)
    return np.asarray(launch + high * (1.0 + (low / high) ** blend) ** (1.0 / blend))


class GemmRows(NamedTuple):
    """Which rows of a table count for what, as masks."""

    test: NDArray[np.bool_]  # held out: every row of some weights (n, k)
    hot: NDArray[np.bool_]  # bound by memory and under 1.5 L2: neither fitted nor judged
    streamed: NDArray[np.bool_]  # of those to fit, products of few rows with weights beyond four times L2


def gemm_rows(table: pd.DataFrame, ref: Reference, include_hot: bool = False) -> GemmRows:
    """The rows of `table` (m, n, k); with `include_hot` none is hot."""
    m, n, k = (table[c].to_numpy(float) for c in ("m", "n", "k"))
    foot = 2.0 * n * k
    test = held_out(table.n.astype(str) + "x" + table.k.astype(str))
    ridge = min(ref.bf16_flop_per_s / ref.memory_bytes_per_s, 64.0 if ref.l2_bytes < 60e6 else 1e9)
    hot = (foot < 1.5 * ref.l2_bytes) & (m <= ridge) & (not include_hot)
    return GemmRows(test, hot, (m <= 16) & (foot > 4.0 * ref.l2_bytes) & ~test)


def fit_gemm(table: pd.DataFrame, ref: Reference, include_hot: bool = False) -> Fitted[GemmFit]:
    """Fit the GEMM of one GPU. `table`: m, n, k, seconds.

    Rows that are memory-bound and whose weights are under 1.5 L2 are left out and only compared. The memory
    efficiency comes first, from products of few rows with weights beyond four times L2; the rest follows with it fixed.
    """
    m, n, k, y = (table[c].to_numpy(float) for c in ("m", "n", "k", "seconds"))
    test, hot, large = gemm_rows(table, ref, include_hot)
    size = 2.0 * (n * k + m * k + m * n)
    # seconds = launch + size / rate, in relative errors
    design = np.stack([1.0 / y[large], size[large] / y[large]], axis=1)
    (_, slope), _ = nnls(design, np.ones(large.sum()))
    efficiency = min(1.0 / (slope * ref.memory_bytes_per_s), 0.95)
    rng = np.random.default_rng(0)
    train = np.flatnonzero(~test & ~hot)
    train = np.sort(rng.choice(train, min(5000, len(train)), replace=False))
    args = (m[train], n[train], k[train], ref)
    target = np.log(y[train])

    def loss(p: Array) -> float:
        # a launch under 0.5 us or a blend above 20 is not told apart by the data
        guard = max(0.0, -p[0] - 0.7) + max(0.0, p[3] - 3.0)
        return float(robust(np.log(gemm_time(p, efficiency, *args)) - target) + 0.1 * guard)

    best, best_loss = None, math.inf
    for seed in range(3):
        tiles = np.random.default_rng(seed).normal(0.7, 0.3 * (seed > 0), len(TILES))
        point, value = descend(loss, np.concatenate([np.log([2.5, 100.0, 3.0, 2.0]), [0.0], tiles]))
        if value < best_loss:
            best, best_loss = point, value
    assert best is not None
    fit = GemmFit(
        launch_s=float(np.exp(best[0]) * 1e-6),
        memory_efficiency=float(efficiency),
        k_overhead=float(np.exp(best[1])),
        split_s=float(np.exp(best[2]) * 1e-6),
        blend=float(1.0 + np.exp(best[3])),
        wave_rounding=float(squash(best[4])),
        tiles=tuple(Tile(m=a, n=b, efficiency=float(e)) for (a, b), e in zip(TILES, squash(best[5:]), strict=True)),
        splits=SPLITS,
    )
    fit = validate(rounded(fit.model_dump()), GemmFit)
    rows = np.flatnonzero(~test & ~hot)
    if len(table[["n", "k"]].drop_duplicates()) >= CORRECTED_SHAPES:
        formula = operators_with(ref, gemm=fit)
        shown = np.array([formula.gemm_s(m[i], int(n[i]), int(k[i])) for i in rows])
        columns = dict(zip(GEMM_AXES, (m[rows], n[rows], k[rows]), strict=True))
        fit = fit.model_copy(update={"correction": fit_correction(columns, KNOTS, np.log(y[rows] / shown))})
    check = operators_with(ref, gemm=fit)
    score = np.flatnonzero(test & ~hot)
    values = [check.gemm_s(m[i], int(n[i]), int(k[i])) for i in score]
    ranges = {"m": m, "n": n, "k": k}
    hot_rows = np.flatnonzero(hot & test)
    hot_score = None
    if len(hot_rows):
        hot_values = [check.gemm_s(m[i], int(n[i]), int(k[i])) for i in hot_rows]
        hot_score = residual(hot_values, y[hot_rows], {"m": m[hot_rows], "megabytes": 2e-6 * n[hot_rows] * k[hot_rows]})
    return Fitted(
        fit,
        residual(values, y[score], ranges, "shapes (n, k) not fitted; weights beyond L2 or compute-bound"),
        hot_score,
    )
