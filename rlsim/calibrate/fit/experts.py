"""Mixtures of experts: the fused kernel's constants for each precision, judged on models that no fit has seen."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.collectives import fit_collective
from rlsim.calibrate.fit.common import (
    Array,
    Mask,
    as_written,
    columns_of,
    descend,
    held_out_rows,
    soft_l1,
    squash,
)
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.calibrate.fit.kernels import FEWEST
from rlsim.calibrate.points import Fitted, join, point_rows, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.collectives import exchanged_bytes
from rlsim.cost.experts import BLOCK_ROWS, MXFP8, ExpertLoad, FusedExperts, peak_of
from rlsim.cost.fits import ExchangeFit, ExpertsFit, Tile
from rlsim.precision import WEIGHT_BYTES, Precision

#: Models that are left out whole when errors are measured: Qwen3-235B-A22B and DeepSeek-V3.
LEFT_OUT = ("4096 x 1536, 8 of 128", "7168 x 2048, 8 of 256")
KNOTS = {
    "rows": [1.0, 16.0, 128.0, 1024.0],
    "width": [64.0, 512.0, 4096.0],
    "bytes": [1e8, 1e9, 1e10],
}
CORRECTED_MODELS = 5  # distinct models: with fewer, a correction says more about them than about others
TILE_COLUMNS = 128
ANY_ROWS = (16, 32, 64, 128)  # rows of the blocks of which the fastest is taken
BY_MEAN = "flashinfer_trtllm"  # the kernel whose blocks follow from the mean rows of an expert
#: Rows of its blocks: FlashInfer's `getSupportedTileNums` without the largest, which it only takes when tuned.
MEAN_ROWS: Mapping[Precision, tuple[int, ...]] = {"nvfp4": (8, 16, 32, 64, 128), "mxfp4": (8, 16, 32)}
MEAN_ROWS_ELSE = (8, 16, 32, 64)
MEAN_ROWS_MXFP8 = (8, 16, 32, 64, 128)
DEFAULT_TILES = ((16, 32), (64, 64))  # of SGLang's Triton kernel: for no more tokens than experts, and beyond
#: log launch and parallel launch (us), efficiency, log k overhead, log (blend - 1), logs of four bytes, rounding, and
#: the log of the fifth bytes.
START = (2.5, 1.5, 2.0, 4.6, 1.0, 1.4, 1.4, 0.7, 0.7, 0.0, 1.4)
TILE_START = dict(zip(BLOCK_ROWS, (-3.0, -2.0, -1.0, 0.0, 0.5), strict=True))  # efficiencies by rows of a block
ROUNDS = 25
MOST_ROWS = 3000  # of the search for the constants
GUARD = 6.0  # what no row tells goes no further than this from its start

Experts = tuple[dict[Precision, ExpertsFit], dict[Precision, ExpertsFit]]


def kernel_experts(table: pd.DataFrame, ref: Reference) -> Fitted[Experts]:
    """The mixtures of `table` (columns of `KEYS`, seconds): for experts on one GPU, and on several by another kernel.

    Constants are fitted to balanced rows. Errors are those of a second fit that has not seen the models of `LEFT_OUT`
    (or a quarter of the models where neither was measured), on these; those under a power law, which no fit has seen,
    are told apart, and so are those of a kernel that was measured with experts on several GPUs only. Rows whose weights
    the L2 may have held are neither fitted nor judged.
    """
    one: dict[Precision, ExpertsFit] = {}
    several: dict[Precision, ExpertsFit] = {}
    points, residuals = [], {}
    for precision in WEIGHT_BYTES:
        rows = table[(table.precision == precision) & ~_hot(table, ref, precision)]
        if len(rows) < FEWEST["experts"]:
            continue
        alone = rows.ep == 1
        parts = [(one, rows[alone]), (several, rows[~alone])]
        if alone.any() and rows.kernel.nunique() == 1:
            parts = [(one, rows)]
        for fits, part in parts:
            if len(part):
                fits[precision] = fit_experts(part, ref, precision)
        name = f"experts_{precision}{'' if alone.any() else '_parallel'}"
        found = join([_judged(name, part, ref, precision) for _, part in parts if len(part)])
        points.append(found)
        for operator, own in found.groupby("operator"):
            skewed = str(operator).endswith("_skewed")
            note = "power-law routing, never fitted" if skewed else "models left out of the fit"
            residuals[str(operator)] = residual_of(own, _ranges(rows), note)
    return Fitted((one, several), residuals, join(points))


def kernel_exchange(table: pd.DataFrame) -> Fitted[dict[int, ExchangeFit]]:
    """DeepEP's dispatch and combine of `table` (columns of `KEYS`, seconds) by number of GPUs.

    Errors are those of curves that have not seen the hidden sizes of `LEFT_OUT`.
    """
    fits, points = {}, []
    for gpus, rows in table.groupby("gpus"):
        rows = rows.assign(bytes=_exchange_bytes(rows, int(str(gpus))))
        unseen = rows.hidden.isin([int(model.split(" ")[0]) for model in LEFT_OUT])
        curves = {}
        for kind, own in rows.groupby("kind"):
            curves[str(kind)] = fit_collective(own)
            test = own[unseen.loc[own.index]]
            shown = fit_collective(own[~unseen.loc[own.index]])
            times = np.exp(np.interp(np.log(test.bytes), np.log(shown.message_bytes), np.log(shown.time_s)))
            labels = [f"{kind}, {row.tokens:.0f} tokens of {row.hidden:.0f}" for row in test.itertuples(index=False)]
            points.append(point_rows("exchange", labels, test.seconds, times, True))
        fits[int(str(gpus))] = ExchangeFit.model_validate(curves)
    found = join(points)
    residuals = {"exchange": residual_of(found, table[["tokens", "active", "hidden"]], "hidden sizes left out")}
    return Fitted(fits, residuals, found)


def _exchange_bytes(rows: pd.DataFrame, gpus: int) -> list[float]:
    kinds = [*zip(rows.kind, rows.tokens, rows.active, rows.hidden, strict=True)]
    return [exchanged_bytes(t, int(k), 2.0 * h, gpus)[kind == "normal"] for kind, t, k, h in kinds]


def _ranges(rows: pd.DataFrame) -> Mapping[str, Array]:
    return {
        "rows": (rows.rows / rows.hit).to_numpy(float),
        "hit": rows.hit.to_numpy(float),
        "hidden": rows.hidden.to_numpy(float),
        "width": rows.width.to_numpy(float),
    }


def _hot(table: pd.DataFrame, ref: Reference, precision: Precision) -> Mask:
    """Rows that memory bounds and whose weights are under 1.5 L2."""
    size = 3.0 * table.hidden * table.width * table.hit * WEIGHT_BYTES[precision]
    ridge = peak_of(ref, precision) * WEIGHT_BYTES[precision] / 2.0 / ref.memory_bytes_per_s
    return np.asarray((size < 1.5 * ref.l2_bytes) & (table.rows / table.hit <= ridge), dtype=bool)


def _judged(name: str, rows: pd.DataFrame, ref: Reference, precision: Precision) -> pd.DataFrame:
    """The points, as of operator `name`, of models that the fit has not seen."""
    test = rows.model.isin(LEFT_OUT).to_numpy(bool)
    if not test.any() or test.all():
        test = held_out_rows(rows.model)
    fit = fit_experts(rows[~test], ref, precision)
    skewed = (rows.routing != "balanced").to_numpy(bool)
    parts = [(name, test & ~skewed), (f"{name}_skewed", test & skewed)]
    return join([_points(operator, fit, ref, precision, rows[mask]) for operator, mask in parts if mask.any()])


def _points(name: str, fit: ExpertsFit, ref: Reference, precision: Precision, rows: pd.DataFrame) -> pd.DataFrame:
    labels = [f"{row.model}: {row.tokens:.0f} tokens, EP {row.ep}" for row in rows.itertuples(index=False)]
    return point_rows(name, labels, rows.seconds, predict_experts(fit, ref, precision, rows), True)


def predict_experts(fit: ExpertsFit, ref: Reference, precision: Precision, rows: pd.DataFrame) -> Array:
    """Seconds of each of `rows` by the code that the simulator runs."""
    kernel, load = FusedExperts(fit, ref, precision), load_of(rows)
    hidden, width = columns_of(rows, ("hidden", "width"))
    *plain, blocks = load
    own = np.array(plain).T.tolist(), np.array(blocks).T.tolist()
    loads = [ExpertLoad._make([*fields, tuple(counts)]) for fields, counts in zip(*own, strict=True)]
    return np.array([kernel(*one) for one in zip(loads, hidden, width, strict=True)])


def load_of(rows: pd.DataFrame) -> ExpertLoad:
    """The loads of the rows of a table, as arrays."""
    tokens, active, own, hit, experts, ep = columns_of(rows, ("tokens", "active", "rows", "hit", "experts", "ep"))
    blocks = columns_of(rows, [f"blocks_{size}" for size in BLOCK_ROWS])
    parallel = (ep > 1).astype(float)
    return ExpertLoad(tokens * active, tokens, own, hit, experts, parallel, tuple(blocks))


def fit_experts(table: pd.DataFrame, ref: Reference, precision: Precision) -> ExpertsFit:
    """Fit one kernel to the balanced rows of `table`, all in `precision`."""
    rows = table[table.routing == "balanced"]
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:MOST_ROWS])
    load, (hidden, width, seconds) = load_of(rows), columns_of(rows, ("hidden", "width", "seconds"))
    pairs = sorted(set(zip(rows.experts[rows.tuned], rows.width[rows.tuned], strict=True)))
    tuned = () if rows.tuned.all() else tuple((int(experts), int(own)) for experts, own in pairs)
    kernel = str(rows.kernel.iloc[0])
    by_mean, in_mxfp8 = kernel.startswith(BY_MEAN), kernel.endswith(MXFP8)
    own_rows = MEAN_ROWS.get(precision, MEAN_ROWS_ELSE) if by_mean else ANY_ROWS
    own_rows = MEAN_ROWS_MXFP8 if by_mean and in_mxfp8 else own_rows
    shapes = [*((m, TILE_COLUMNS) for m in own_rows), *(DEFAULT_TILES if tuned else ())]
    start = np.array([*START, *(TILE_START[m] for m, _ in shapes)])

    def made(p: Array) -> ExpertsFit:
        launch, parallel, k_overhead = np.exp(p[[0, 1, 3]])
        moved, shares = np.exp(p[[5, 6, 7, 8, 10]]), np.clip(squash(p[[2, 9, *range(11, len(p))]]), 1e-4, 0.9999)
        efficiency, rounding, *own = shares.tolist()
        tiles = [Tile(m=m, n=n, efficiency=e) for (m, n), e in zip(shapes, own, strict=True)]
        return ExpertsFit.model_construct(
            kernel=kernel,
            multiplied_in="fp8" if in_mxfp8 else None,
            launch_s=float(launch * 1e-6),
            parallel_s=float(parallel * 1e-6),
            memory_efficiency=efficiency,
            k_overhead=float(k_overhead),
            blend=float(1.0 + np.exp(min(p[4], 3.0))),
            wave_rounding=rounding,
            tiles=tuple(tiles[: len(own_rows)]),
            tile_by_mean=by_mean,
            default_tiles=(tiles[-2], tiles[-1]) if tuned else None,
            tuned=tuned,
            row_hidden_bytes=float(moved[0]),
            row_width_bytes=float(moved[1]),
            selection_hidden_bytes=float(moved[2]),
            selection_width_bytes=float(moved[3]),
            token_hidden_bytes=float(moved[4]),
            correction=None,
        )

    some, sizes, measured = load_of(rows.iloc[chosen]), (hidden[chosen], width[chosen]), seconds[chosen]

    def loss(p: Array) -> float:
        far = np.maximum(0.0, np.abs(p - start) - GUARD).sum()
        error = np.log(FusedExperts(made(p), ref, precision).formula_s(some, *sizes) / measured)
        return float(np.mean(2.0 * soft_l1(error)) + 0.1 * far)

    best = min((descend(loss, start + shift, ROUNDS) for shift in (0.0, 0.3)), key=lambda pair: pair[1])[0]
    fit = as_written(made(best))
    if rows.model.nunique() < CORRECTED_MODELS:
        return fit
    fused = FusedExperts(fit, ref, precision)
    axes = pd.DataFrame(
        {"rows": load.rows / load.hit, "width": width, "bytes": fused.weight_bytes(load, hidden, width)}
    )
    error = np.log(seconds / fused.formula_s(load, hidden, width))
    return fit.model_copy(update={"correction": fit_correction(axes, KNOTS, error)})
