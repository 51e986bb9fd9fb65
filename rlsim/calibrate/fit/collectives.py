"""Collectives inside a node: log-log knots through measured times."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from rlsim.calibrate.fit.common import Array, CollectiveTable, residual, rounded
from rlsim.cost.calibration import CollectiveFit, CollectiveFits, Residual

Residuals = dict[str, Residual]

#: Names in NCCL's tables and in rlsim.
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
INTER_EFFICIENCY = 0.8  # share of the inter-node link; assumed
COLLECTIVE_KNOTS = tuple(2.0**e for e in (9, 12, 14, 16, 17, 18, 19, 20, 22, 23, 24, 26))


def fit_collective(table: pd.DataFrame) -> CollectiveFit:
    """Log-log knots through one collective's bytes and seconds."""
    sizes, seconds = table.bytes.to_numpy(float), table.seconds.to_numpy(float)
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


def _left_out(table: pd.DataFrame) -> Array:
    """Log errors at every size but the smallest and largest, each by a fit through all the others."""
    ordered = table.sort_values("bytes").reset_index(drop=True)
    errors = []
    for i in range(1, len(ordered) - 1):
        fit = fit_collective(ordered.drop(index=i))
        shown = np.interp(np.log(ordered.bytes[i]), np.log(fit.message_bytes), np.log(fit.time_s))
        errors.append(float(shown - np.log(ordered.seconds[i])))
    return np.asarray(errors)


def fit_collectives(nccl: list[CollectiveTable], custom: list[CollectiveTable]) -> tuple[CollectiveFits, Residuals]:
    """NCCL by operation and GPUs, the engine's own all-reduce by GPUs, and how closely the knots follow both."""
    fits: dict[str, dict[int, CollectiveFit]] = {name: {} for name in OPERATIONS.values()}
    for item in nccl:
        fits[OPERATIONS[item.op]][item.gpus] = fit_collective(item.table)
    own = {item.gpus: fit_collective(item.table) for item in custom}

    def score(items: list[CollectiveTable], note: str) -> Residual:
        errors = [_left_out(item.table) for item in items]
        ratio = np.exp(np.concatenate(errors))
        sizes = np.concatenate([item.table.bytes.to_numpy(float) for item in items])
        return residual(ratio, np.ones(len(ratio)), {"bytes": sizes}, note)

    note = "each message size by a fit through the others"
    residuals = {"nccl": score(nccl, f"{note}; all operations")}
    if custom:
        residuals["custom_all_reduce"] = score(custom, note)
    return CollectiveFits(nccl=fits, custom_all_reduce=own, inter_efficiency=INTER_EFFICIENCY), residuals
