"""Whole iterations as measured: tables of them over what a calibration says, and the host time that they leave over the
operators' sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from rlsim.calibrate.fit.common import Array, columns_of, rounded
from rlsim.calibrate.measurements import Fitted, Measurements, join, measured_node, point_rows, residual_of
from rlsim.cost.calibration import DECODE_AXES, PREFILL_AXES, Calibration, EngineFit, HostFit, Residual
from rlsim.cost.derived import ServedStep
from rlsim.cost.fits import Correction
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import Chunk, StepCost
from rlsim.models.model import Model

NO_HOST = HostFit(step_s=0.0, sequence_s=0.0, source="none")
#: What an iteration is: sequences that decode and the tokens of their contexts; new tokens, the prompts that they are
#: of, and tokens of these that were cached.
ITERATION = ("batch", "context_tokens", "prefill_tokens", "prefill_sequences", "cached_tokens")
FEWEST_STEPS = 4  # rows of whole steps from which host time is fitted
Shape = Callable[[str], Model | None]


#: Knots of the tables of iterations in each doubling of an axis: one for the rows around it, where there are any.
KNOTS = {"batch": 2, "context": 1, "tokens": 1}


def fit_host(measured: Measurements, calibration: Calibration, shape: Shape) -> Fitted[HostFit | None]:
    """Host time per step and per sequence: decode steps less the kernels of `calibration`, none below zero; and that of
    a prefill, the median of what is left of those.

    Least squares of relative errors with a soft-L1 loss; every third batch size of a model and TP is held out. Without
    whole steps, or without the shape of their model, there is none.
    """
    bare = calibration.model_copy(update={"host": NO_HOST})
    parts = [rows.assign(shown=iteration_times(cost, rows)) for rows, cost, _ in _measured(measured, bare, shape)]
    rows = pd.concat(parts) if parts else pd.DataFrame(columns=["kind"])
    prefills, rows = rows[rows.kind == "prefill_step"], rows[rows.kind == "decode_step"]
    if len(rows) < FEWEST_STEPS:
        return Fitted(None)
    batch, y, shown = columns_of(rows, ["batch", "seconds", "shown"])
    order = rows.groupby("whose").batch.transform(lambda b: b.rank(method="dense")).to_numpy(int)
    test = order % 3 == 2
    if (~test).sum() < FEWEST_STEPS:
        test = np.zeros(len(rows), dtype=bool)
    design = np.stack([1.0 / y, batch / y], axis=1)
    target = 1.0 - shown / y
    start, _ = nnls(design[~test], target[~test])

    def error(p: Array) -> Array:
        return np.asarray(design[~test] @ (np.abs(p) * 1e-6) - target[~test])

    step_s, sequence_s = np.abs(least_squares(error, start * 1e6, loss="soft_l1", f_scale=0.05).x) * 1e-6
    points = point_rows("step_from_operators", _labels(rows), y, shown + step_s + sequence_s * batch, test)
    left = prefills.seconds - prefills.shown - step_s - sequence_s * prefills.prefill_sequences
    host = HostFit(
        step_s=rounded(float(step_s)),
        sequence_s=rounded(float(sequence_s)),
        prefill_s=rounded(max(0.0, float(left.median()))) if len(left) else 0.0,
        source=f"what {len(rows)} measured decode steps leave over the operators' sum: "
        + ", ".join(rows.whose.unique()),
    )
    residual = residual_of(points, rows[["batch", "context_tokens"]], "operators and host time, batch sizes not fitted")
    return Fitted(host, {"step_from_operators": residual}, points)


def fit_tables(measured: Measurements, calibration: Calibration, shape: Shape) -> Fitted[tuple[EngineFit, ...]]:
    """A table of whole iterations for every model and TP with decode steps, over what `calibration` says of them."""
    fits = [
        fit_iterations(rows, cost, model, calibration, f"{len(rows)} measured steps of {rows.whose.iloc[0]}")
        for rows, cost, model in _measured(measured, calibration, shape)
    ]
    points, residuals = iteration_points([shown for _, shown in fits])
    names = sorted({str(name) for name in measured.table("decode_step").model if shape(str(name)) is None})
    notes = [f"no table of whole iterations of {name}: its shape is not known" for name in names]
    return Fitted(tuple(fit for fit, _ in fits), residuals, points, tuple(notes))


def _measured(
    measured: Measurements, calibration: Calibration, shape: Shape
) -> Iterator[tuple[pd.DataFrame, StepCost, Model]]:
    """The iterations of every model and TP with decode steps, those from CUDA graphs if there are any, medians of
    repeats; and what `calibration` says that they cost. Models without a shape are passed over."""
    node = measured_node(calibration.gpu, calibration.reference)
    prefill = measured.table("prefill_step")
    for (name, tp), rows in measured.table("decode_step").groupby(["model", "tp"]):
        if (model := shape(str(name))) is None:
            continue
        mode = "graph" if (rows["mode"] == "graph").any() else "eager"
        decodes = rows[rows["mode"] == mode].groupby(["batch", "context_tokens"], as_index=False).seconds.median()
        own = prefill[(prefill.model == name) & (prefill.tp == tp)]
        tokens, length, seconds = columns_of(own, ["tokens", "length", "seconds"])
        prompts = {"prefill_tokens": tokens, "prefill_sequences": np.ceil(tokens / length), "seconds": seconds}
        cached = np.maximum(length - tokens, 0.0) // 2  # as in `prompts_of`
        found = as_iterations(pd.concat([decodes, pd.DataFrame({**prompts, "cached_tokens": cached})]))
        yield (
            found.assign(whose=f"{name} at TP{tp} ({mode})"),
            step_cost(model, int(str(tp)), node, calibration),
            model,
        )


def as_iterations(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with all columns of `ITERATION`, and their `kind`."""
    more = [name for name in rows.columns if name not in ITERATION]
    rows = rows.reindex(columns=[*ITERATION, *more]).fillna(dict.fromkeys(ITERATION, 0.0)).reset_index(drop=True)
    rows = rows.astype(dict.fromkeys(ITERATION, float))
    return rows.assign(kind=np.where(rows.prefill_tokens > 0, "prefill_step", "decode_step"))


def fit_iterations(
    rows: pd.DataFrame, cost: StepCost, model: Model, calibration: Calibration, source: str
) -> tuple[EngineFit, pd.DataFrame]:
    """The tables through all rows, and the rows with their `kind`, what `cost` says of them (`base_s`) and what tables
    say (`fitted_s`) that have not seen those left out (`held_out`).

    A row is an iteration of `seconds`, with columns of `ITERATION`. Left out is every third batch size, or number of
    prefilled tokens; if there are fewer than three, every third block of rows in their order.
    """
    rows = as_iterations(rows)
    rows["context"] = (rows.context_tokens / rows.batch.clip(lower=1)).clip(lower=1.0)
    rows["tokens"] = rows.batch + rows.prefill_tokens
    rows["base_s"] = iteration_times(cost, rows)
    rows["factor"] = rows.seconds / rows.base_s
    prefills = rows.kind == "prefill_step"
    rows["held_out"] = False
    for part, axis in ((rows[~prefills], "batch"), (rows[prefills], "tokens")):
        rows.loc[part.index, "held_out"] = _left_out(part, axis)

    def fitted(part: pd.DataFrame) -> EngineFit:
        decode, prefill = part[part.kind == "decode_step"], part[part.kind == "prefill_step"]
        return EngineFit(
            model=model.name,
            model_type=model.model_type,
            precision=model.precision,
            kv_precision=model.kv_precision,
            tp=cost.tp,
            overlapped=calibration.host.overlapped,
            level=float(np.exp(np.log(decode.factor).mean())),
            decode=_table(decode, DECODE_AXES),
            prefill=_table(prefill, PREFILL_AXES) if len(prefill) else None,
            source=source,
        )

    rows["fitted_s"] = iteration_times(ServedStep(cost, fitted(rows[~rows.held_out])), rows)
    return fitted(rows), rows


def iteration_points(parts: Sequence[pd.DataFrame]) -> tuple[pd.DataFrame, dict[str, Residual]]:
    """Whole iterations as points, and by kind how far off tables are on those that they have not seen."""
    points, residuals = [], {}
    for kind, axes in (("decode_step", ["batch", "context_tokens"]), ("prefill_step", ["tokens"])):
        rows = pd.concat([part[part.kind == kind] for part in parts]) if parts else pd.DataFrame()
        if len(rows):
            points.append(point_rows(kind, _labels(rows), rows.seconds, rows.fitted_s, rows.held_out.to_numpy(bool)))
            residuals[kind] = residual_of(points[-1], rows[axes], "whole iterations, from a table of the others")
    return join(points), residuals


def iteration_times(cost: StepCost, rows: pd.DataFrame) -> Array:
    """Seconds of each iteration; prompts of one share its new and its cached tokens evenly."""
    found = []
    for batch, context, tokens, sequences, cached in rows[list(ITERATION)].itertuples(index=False):
        count = max(round(sequences), 1)
        chunks = [Chunk(max(round(tokens / count), 1), round(cached / count))] * count if tokens else []
        if chunks:
            found.append(cost.mixed_s(round(batch), context, chunks))
        else:
            found.append(cost.decode(round(batch)).step_s(context))
    return np.array(found)


def _bands(rows: pd.DataFrame, axis: str) -> NDArray[np.int64]:
    return np.asarray(np.rint(np.log2(rows[axis].clip(lower=1)) * KNOTS[axis]), dtype=int)


def _left_out(rows: pd.DataFrame, axis: str) -> NDArray[np.bool_]:
    different, bands = np.unique(_bands(rows, axis), return_inverse=True)
    blocks = np.arange(len(rows)) * 12 // max(len(rows), 1)
    return np.asarray((bands if len(different) >= 3 else blocks) % 3 == 1)


def _table(rows: pd.DataFrame, axes: Sequence[str]) -> Correction:
    """The median factor in each cell of a grid, with knots where there are rows, at their median; a cell without rows
    has the factor of the nearest one, in doublings."""
    bands = [_bands(rows, axis) for axis in axes]
    knots = [rows[axis].clip(lower=1).groupby(band).median() for axis, band in zip(axes, bands, strict=True)]
    known = rows.factor.groupby(bands).median()
    where = np.array(known.index.to_list(), float).reshape(len(known), -1) / [KNOTS[axis] for axis in axes]
    grid = np.array(list(product(*(knot.index for knot in knots))), float) / [KNOTS[axis] for axis in axes]
    nearest = np.abs(grid[:, None] - where[None]).sum(axis=2).argmin(axis=1)
    return Correction(
        axes={axis: tuple(map(float, knot)) for axis, knot in zip(axes, knots, strict=True)},
        factor=tuple(known.to_numpy(float)[nearest].tolist()),
    )


def _labels(rows: pd.DataFrame) -> list[str]:
    columns = columns_of(rows, ["batch", "context_tokens", "prefill_tokens"])
    return [f"{b:.0f} sequences, {c:.0f} tokens, {new:.0f} prefilled" for b, c, new in zip(*columns, strict=True)]
