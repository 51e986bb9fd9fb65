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


def fit_collective(table: pd.DataFrame) -> tuple[CollectiveFit, Array]:
    """Log-log knots through one collective's bytes and seconds; returns the fit and the signed log errors."""
    sizes, seconds = table.bytes.to_numpy(float), table.seconds.to_numpy(float)
    x, y = np.log(sizes), np.log(seconds)
    inner = [k for k in COLLECTIVE_KNOTS if sizes.min() / 1.01 <= k < sizes.max() / 1.01]
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
    fit = CollectiveFit(
        message_bytes=tuple(float(round(math.exp(k))) for k in knots), time_s=tuple(rounded(np.exp(values).tolist()))
    )
    return fit, np.asarray(np.interp(x, knots, values) - y)


def fit_collectives(nccl: list[CollectiveTable], custom: list[CollectiveTable]) -> tuple[CollectiveFits, Residuals]:
    """NCCL by operation and GPUs, the engine's own all-reduce by GPUs, and how closely the knots follow both."""
    fits: dict[str, dict[int, CollectiveFit]] = {name: {} for name in OPERATIONS.values()}
    errors, custom_errors = [], []
    for item in nccl:
        fits[OPERATIONS[item.op]][item.gpus], error = fit_collective(item.table)
        errors.append(error)
    own: dict[int, CollectiveFit] = {}
    for item in custom:
        own[item.gpus], error = fit_collective(item.table)
        custom_errors.append(error)
    bytes_range = {"bytes": np.array([512.0, 2.0**29])}

    def score(parts: list[Array], note: str) -> Residual:
        ratio = np.exp(np.concatenate(parts))
        return residual(ratio, np.ones(len(ratio)), bytes_range, note)

    residuals = {
        "nccl": score(errors, "in sample: 13 knots through 21 sizes; all operations and 2, 4, 8 GPUs"),
        "custom_all_reduce": score(custom_errors, "in sample: 13 knots through 23 sizes; 2, 4, 8 GPUs"),
    }
    return CollectiveFits(nccl=fits, custom_all_reduce=own, inter_efficiency=INTER_EFFICIENCY), residuals
