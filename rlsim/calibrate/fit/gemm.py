"""Matrix products: the fit of their choice of blocks, where one tells more than the FLOPs, and of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.calibrate.fit.common import (
    KNOTS,
    Array,
    Kernel,
    Mask,
    as_written,
    columns_of,
    compared,
    distinct,
    enough_for_all_constants,
    few_constants,
    fit_logs,
    held_out,
    held_out_rows,
    predict,
    soft_l1,
)
from rlsim.calibrate.fit.kernel import fit_with_l2, stacked
from rlsim.calibrate.measurements import Fitted, Measurements, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import ProductFit, Tile
from rlsim.cost.operators import gemm_of
from rlsim.cost.products import Products, ProductWork
from rlsim.errors import CalibrationError
from rlsim.models.precision import PRECISIONS, WEIGHT_BYTES, Precision, peak_flop_per_s

L2_SPEED = 2.0  # rate of L2 over that of the memory, in the search for blocks
HOST = 1.5  # times as long as a product of more rows: the host takes that, no kernel
SHORT_S = 40e-6  # longer products hide the host
MOST_ROWS = 1500  # of the search for blocks
ROUNDS = 3  # of it
BLEND = 3.0  # in it, as of a kernel by default
SHARES = np.exp(np.linspace(np.log(0.02), 0.0, 22))  # of an SM's peak that are tried for a block
#: In bf16 libraries take the fastest of some blocks and splits of k, whatever the rows.
TILES = ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 4, 8)
SLOTS = 4  # blocks that are found
#: In other precisions kernels choose their block by the number of rows alone: of these, from these rows on, none over
#: twice its rows but the smallest.
ROW_TILES = tuple((m, n) for m in (16, 32, 64, 128, 256) for n in (16, 32, 64, 128, 192, 256))
FROM_ROWS = (1, 17, 33, 65, 129, 257)


Part = npt.NDArray[np.int_]  # some rows
Tiles = list[list[tuple[int, int, float]]]  # by range of rows: rows, columns and share of the peak


def _product_s(fit: ProductFit, ref: Reference) -> Callable[[Any], float]:
    products = Products(fit, ref)
    return lambda row: products.time_s(row.m, int(row.n), int(row.k))


def kernel_of(precision: Precision) -> Kernel:
    """The products of one precision."""
    return Kernel(gemm_of(precision), _product_s, lambda row: f"{row.m:.0f} x {row.n:.0f} x {row.k:.0f}")


def kernel_gemm(table: pd.DataFrame, ref: Reference, cold: bool, precision: Precision = "bf16") -> Fitted[ProductFit]:
    """Products of `table` (m, n, k, seconds), with bf16 activations and weights of that precision.

    `cold`: their weights were brought from memory, so every row counts alike; otherwise rows whose weights the L2 may
    have held are not judged, as `fit_gemm` says.
    """
    if peak_flop_per_s(ref, precision) is None:
        raise CalibrationError(f"products in {precision} were measured, but the GPU's data sheet has no rate for them")
    table = distinct(table, "gemm", ["m", "n", "k"])
    seen = ref.model_copy(update={"l2_bytes": 1.0}) if cold else ref
    kernel = kernel_of(precision)
    rows = gemm_rows(table, seen, precision)
    full = enough_for_all_constants(ref, ~rows.test & ~rows.hot) and (rows.test & ~rows.hot).any()
    if not full:
        none = np.zeros(len(table), dtype=bool)
        rows = GemmRows(held_out_rows(_weights_of(table)), none, none)
    fit = fit_gemm(table, rows, ref, precision, choose=bool(full))
    points = compared(kernel, fit, ref, table[~rows.hot], rows.test[~rows.hot])
    note = f"shapes (n, k) not fitted; {'weights beyond L2 or compute-bound' if full else few_constants(points)}"
    return Fitted(fit, {kernel.operator: residual_of(points, table[["m", "n", "k"]], note)}, points)


def quantised_products(measured: Measurements, ref: Reference, cold: bool) -> Iterator[Fitted[ProductFit]]:
    """A fit of every table of products in `measured` that is not of bf16."""
    for precision in PRECISIONS[1:]:
        if gemm_of(precision) in measured:
            yield kernel_gemm(measured.table(gemm_of(precision)), ref, cold, precision)


class GemmRows(NamedTuple):
    """Which rows of a table count for what, as masks."""

    test: Mask  # held out: every row of some weights (n, k)
    hot: Mask  # bound by memory and under 1.5 L2: not judged, and not fitted as if the weights came from memory
    in_l2: Mask  # of the hot ones those under half of L2, which held their weights for certain


def gemm_rows(table: pd.DataFrame, ref: Reference, precision: Precision = "bf16") -> GemmRows:
    """The rows of `table` (m, n, k)."""
    m, n, k = columns_of(table, ("m", "n", "k"))
    foot = WEIGHT_BYTES[precision] * n * k
    peak = peak_flop_per_s(ref, precision) or np.inf
    ridge = min(peak * WEIGHT_BYTES[precision] / 2.0 / ref.memory_bytes_per_s, 64.0 if ref.l2_bytes < 60e6 else 1e9)
    hot = (foot < 1.5 * ref.l2_bytes) & (m <= ridge)
    return GemmRows(held_out(_weights_of(table)), hot, hot & (foot < 0.5 * ref.l2_bytes))


def timed_with_the_host(table: pd.DataFrame) -> Mask:
    """Short products that took over `HOST` times as long as the same weights with more rows, whose kernel would have
    served them (vLLM's FP8 on B200: every product of one row, and one of twenty others)."""
    ordered = table.sort_values("m", ascending=False)
    least = ordered.groupby(["n", "k"]).seconds.cummin().reindex(table.index)
    return np.asarray((table.seconds > HOST * least) & (table.seconds < SHORT_S), dtype=bool)


def _weights_of(table: pd.DataFrame) -> pd.Series:
    return table.n.astype(str) + "x" + table.k.astype(str)


def fit_gemm(
    table: pd.DataFrame, rows: GemmRows, ref: Reference, precision: Precision = "bf16", choose: bool = True
) -> ProductFit:
    """Fit the products of one GPU. `table`: m, n, k, seconds.

    Rows that are memory-bound and whose weights are under 1.5 L2 are only compared in bf16. In other precisions they
    would be most of those with few tokens (weights are half as large), so that nothing would tell the launch: those
    that L2 held for certain are fitted too, with their bytes at a rate of its own.

    With `choose` blocks are fitted, or those of a library followed where that describes a quarter of the weights to fit
    better by a fit to the others. Short products that took far longer than one of more rows are not fitted.
    """
    used = ~rows.test & ~timed_with_the_host(table) & (~rows.hot if precision == "bf16" else ~rows.hot | rows.in_l2)
    table = table.assign(in_l2=rows.in_l2 & (precision != "bf16"))[used]
    plain = ProductFit(precision=precision, launch_s=0.0, efficiency={})
    if not choose:
        return _fitted(plain, table, ref)
    if precision != "fp8_block":
        return _fitted(_with_tiles(plain, table, ref), table, ref)
    inner = held_out(_weights_of(table))
    seen, unseen = table[~inner], table[inner & ~table.in_l2]
    kinds = (_with_tiles(plain, seen, ref), plain.model_copy(update={"blocks": "deepgemm"}))

    def loss(kind: ProductFit) -> float:
        predicted = predict(kernel_of(precision), _fitted(kind, seen, ref), ref, unseen)
        return float(soft_l1(np.log(predicted / unseen.seconds.to_numpy(float))).sum())

    return _fitted(min(kinds, key=loss), table, ref)


def _fitted(kind: ProductFit, rows: pd.DataFrame, ref: Reference) -> ProductFit:
    works = map(ProductWork(kind, ref).__call__, rows.m.astype(float), rows.n.astype(int), rows.k.astype(int))
    return fit_with_l2(kind, works, rows, rows, KNOTS["products"])


def _with_tiles(plain: ProductFit, rows: pd.DataFrame, ref: Reference) -> ProductFit:
    """`plain` with the block shapes, and their shares of the peak, that suit `rows` best.

    In turns: each block by trying all in its place beside the others, then all constants by least squares.
    """
    few = np.random.default_rng(0).choice(np.arange(len(rows)), min(MOST_ROWS, len(rows)), replace=False)
    rows = rows.iloc[np.sort(few)]
    in_bf16 = plain.precision == "bf16"
    starts, slots = ((1,), SLOTS) if in_bf16 else (FROM_ROWS, 1)
    shapes = [TILES if in_bf16 else [one for one in ROW_TILES if one[0] <= max(32, 2 * start)] for start in starts]
    m, n, k, seconds = columns_of(rows, ("m", "n", "k", "seconds"))
    base = stacked(map(ProductWork(plain, ref).__call__, m, n, k))
    memory = np.asarray(base.resources["memory"]) / np.where(rows.in_l2, L2_SPEED, 1.0)
    quantised = np.asarray(base.added.get("quantised", 0.0 * m))
    parts = [np.flatnonzero(np.digitize(m, starts) == i + 1) for i in range(len(starts))]
    tiles: Tiles = [[] for _ in starts]
    #: Logs of launch (us), memory's share, quantising's, overhead, split (us), rounding; then of the tiles' shares.
    p = np.log([3.0, 0.8, 1.3, 100.0, 3.0, 0.6])

    def made(p: Array) -> ProductFit:
        overhead, split_us, rounding = np.exp(p[3:6]).tolist()
        splits = {"splits": SPLITS, "split_s": split_us * 1e-6} if in_bf16 else {}
        constants = {"k_overhead": overhead, "wave_rounding": min(rounding, 1.0), **splits}
        return plain.model_copy(update=constants)

    def blocks_s(fit: ProductFit, shape: tuple[int, int], shares: Array, part: Part) -> Array:
        """Seconds of one shape: rows of `part` for each of `shares`."""
        work, sizes = ProductWork(fit, ref), (m[part], n[part], k[part])
        splits = [
            work.tile_s(shape, shares[:, None], split, *sizes, most=np.maximum) + work.split_s(split, *sizes[:2])
            for split in fit.splits
        ]
        return np.asarray(np.min(splits, axis=0))

    def total_s(p: Array, compute: Array, part: Part) -> Array:
        core = (compute**BLEND + (memory[part] / np.exp(p[1])) ** BLEND) ** (1.0 / BLEND)
        return np.asarray(np.exp(p[0]) * 1e-6 + np.exp(p[2]) * quantised[part] + core)

    def fastest_s(fit: ProductFit, own: list[tuple[int, int, float]], part: Part) -> Array:
        times = [blocks_s(fit, (a, b), np.array([share]), part)[0] for a, b, share in own]
        return np.min(times, axis=0) if times else np.full(len(part), np.inf)

    order = np.concatenate(parts)
    for _ in range(ROUNDS):
        fit = made(p)
        for part, own, kinds in zip(parts, tiles, shapes, strict=True):
            grid = np.array([blocks_s(fit, shape, SHARES, part) for shape in kinds])
            for slot in range(slots):
                others = fastest_s(fit, own[:slot] + own[slot + 1 :], part)
                error = np.log(total_s(p, np.minimum(grid, others), part) / seconds[part])
                shape, share = np.unravel_index(int(soft_l1(error).sum(axis=-1).argmin()), grid.shape[:2])
                own[slot : slot + 1] = [(*kinds[shape], float(SHARES[share]))]

        def scaled(q: Array, tiles: Tiles = tiles) -> Tiles:
            shares = iter(np.exp(q[6:]).tolist())
            return [[(a, b, e * next(shares)) for a, b, e in own] for own in tiles]

        def shown(q: Array, scaled: Callable[[Array], Tiles] = scaled) -> Array:
            own = zip(scaled(q), parts, strict=True)
            return np.concatenate([total_s(q, fastest_s(made(q), tiles, part), part) for tiles, part in own])

        q = fit_logs(shown, seconds[order], np.append(p, np.zeros(slots * len(starts))), pull=0.02).x
        p, tiles = q[:6], scaled(q)
    found = [
        Tile(m=a, n=b, efficiency=min(e, 1.0), from_rows=start)
        for start, own in zip(starts, tiles, strict=True)
        for a, b, e in own
    ]
    return as_written(made(p).model_copy(update={"tiles": tuple(found)}))
