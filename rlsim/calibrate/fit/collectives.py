"""Collectives inside a node: log-log knots through measured times."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression, least_squares

from rlsim.base.refusals import refuse
from rlsim.calibrate.fit.common import FEWEST, Array, Mask, columns_of, rounded
from rlsim.calibrate.measurements import Fitted, join, point_rows, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.collectives import Collectives
from rlsim.cost.fits import CollectiveFit, CollectiveFits
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster

COLLECTIVE_KNOTS = tuple(2.0**e for e in (9, 12, 14, 16, 17, 18, 19, 20, 22, 23, 24, 26))
MANY_SIZES = 16  # of one collective, from which knots are fewer than sizes
FITTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DERIVED = ("broadcast", "send_recv")  # the simulator derives these from all-gather
CUSTOM = "custom_all_reduce"  # the engine's own


def kernel_collectives(
    table: pd.DataFrame, ref: Reference, node: Cluster, *, one_by_one: bool = False
) -> Fitted[CollectiveFits]:
    """Collectives of `table` (op, gpus, bytes, seconds) inside one node.

    Knots go through all sizes; how far they are off between those is seen by leaving sizes out: many sizes by thirds,
    few (all of them if `one_by_one`) each on its own. Broadcast and send/receive are compared with what the simulator
    derives for them.
    """
    known = (*FITTED, *DERIVED, CUSTOM)
    refuse("operations", CalibrationError, unknown=sorted(set(table.op) - set(known)), known=known)
    curves: dict[str, dict[int, CollectiveFit]] = {CUSTOM: {}}
    parts, few = [], []
    for (op, gpus), rows in table[~table.op.isin(DERIVED)].groupby(["op", "gpus"]):
        rows = rows.groupby("bytes", as_index=False)[["seconds"]].median()
        op, gpus = str(op), int(str(gpus))
        if len(rows) < FEWEST["collective"]:
            few.append(f"{op} on {gpus} GPUs: {len(rows)} message sizes")
            continue
        curves.setdefault(op, {})[gpus] = curve(rows)
        values, test = _left_out(rows, len(rows) if one_by_one or len(rows) < MANY_SIZES else 3)
        labels = _labels(rows.assign(op=op, gpus=gpus))
        parts.append(point_rows(CUSTOM if op == CUSTOM else "nccl", labels, rows.seconds, values, test))
    about = {"few": few, "ops": sorted(set(table.op)), "fewest": FEWEST["collective"], "fitted": FITTED}
    refuse("collectives to fit", CalibrationError, parts=parts, **about)
    custom = curves.pop(CUSTOM)
    fits = CollectiveFits(nccl=curves, custom_all_reduce=custom)
    points = join(parts)
    own = table.op == CUSTOM
    residuals = {
        name: residual_of(points[points.operator == name], table[rows][["bytes"]], "sizes left out in turn")
        for name, rows in (("nccl", ~own), (CUSTOM, own))
        if (points.operator == name).any()
    }
    derived = table[table.op.isin(DERIVED)]
    if len(derived) and fits.nccl.get("all_gather"):
        derive_s, calls = Collectives(fits, ref, node).time_s, zip(derived.op, derived.bytes, derived.gpus, strict=True)
        values = np.array([derive_s(str(op), float(size), int(gpus)) for op, size, gpus in calls])
        extra = point_rows("collective_derived", _labels(derived), derived.seconds, values, True)
        note = "broadcast and send/receive as derived from all-gather, none fitted"
        residuals["collective_derived"] = residual_of(extra, derived[["bytes"]], note)
        points = join([points, extra])
    return Fitted(fits, residuals, points, tuple(f"{what}, too few to fit, left out" for what in few))


def curve(rows: pd.DataFrame) -> CollectiveFit:
    """The usual knots through many sizes; few sizes are knots themselves, their times made to rise."""
    if len(rows) >= MANY_SIZES:
        return fit_collective(rows)
    times = np.exp(isotonic_regression(np.log(rows.seconds.to_numpy(float))).x)
    return CollectiveFit(message_bytes=tuple(rows.bytes.astype(float)), time_s=tuple(rounded(times.tolist())))


def fit_collective(table: pd.DataFrame) -> CollectiveFit:
    """Log-log knots through one collective's bytes and seconds."""
    sizes, seconds = columns_of(table, ("bytes", "seconds"))
    x, y = np.log(sizes), np.log(seconds)
    inner = [k for k in COLLECTIVE_KNOTS if k < sizes.max() / 1.01 and np.abs(np.log2(sizes / k)).min() < 0.5]
    knots = np.log([*inner, sizes.max()])
    hats = np.stack([np.interp(x, knots, row) for row in np.eye(len(knots))], axis=1)
    rises = np.tril(np.ones((len(knots), len(knots))))  # the first value, then steps up that are never negative
    start = np.maximum(np.diff(np.maximum.accumulate(np.interp(knots, x, y)), prepend=y.min()), 1e-3)
    lower = np.concatenate([[-np.inf], np.zeros(len(knots) - 1)])
    start[0] = y[0]

    def error(v: Array) -> Array:
        return np.asarray(hats @ (rises @ v) - y)

    upper = np.full(len(knots), np.inf)
    fitted = least_squares(error, start, loss="soft_l1", f_scale=0.02, bounds=(lower, upper))
    values = np.maximum.accumulate(rises @ fitted.x)
    return CollectiveFit(
        message_bytes=tuple(float(round(math.exp(k))) for k in knots), time_s=tuple(rounded(np.exp(values).tolist()))
    )


def _left_out(rows: pd.DataFrame, turns: int) -> tuple[Array, Mask]:
    """Every row's time from knots through the other rows, every `turns`-th left out at once, and which rows these are:
    the outermost sizes are in sample."""
    size = rows.bytes.to_numpy(float)
    place = np.arange(len(rows))
    inner = (place > 0) & (place < len(rows) - 1)
    values = times_of(curve(rows), size)
    for turn in range(turns):
        chosen = inner & (place % turns == turn)
        if chosen.any():
            values[chosen] = times_of(curve(rows[~chosen]), size[chosen])
    return values, inner


def times_of(fit: CollectiveFit, size: Array) -> Array:
    """Seconds of messages of these sizes, linear between the knots in logs."""
    return np.asarray(np.exp(np.interp(np.log(size), np.log(fit.message_bytes), np.log(fit.time_s))))


def _labels(table: pd.DataFrame) -> list[str]:
    return [f"{op}, {n} GPUs, {x:.0f} bytes" for op, n, x in zip(table.op, table.gpus, table.bytes, strict=True)]
