"""What a formula's few constants leave over, as a smooth factor on a coarse grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.sparse.linalg import spsolve

from rlsim.calibrate.fit.common import Array, rounded
from rlsim.cost.fits import Correction

SMOOTH = 0.05  # weight of the difference of neighbouring knots, beside one of every row
TO_ONE = 0.005  # weight of the pull to "no correction", for knots without rows
SCALE = 0.1  # log errors beyond this count less and less (soft L1)
ROWS_PER_KNOT = 1.2  # fewer, and there is no correction
ROUNDS = 6  # of reweighting


def fit_correction(
    rows: pd.DataFrame, knots: Mapping[str, Sequence[float]], log_error: Array, share: Array | float = 1.0
) -> Correction | None:
    """The factor exp(g) with g multilinear in the logs of columns through `log_error` = log(measured / formula), where
    the formula is that `share` of each row's time.

    Least squares with a soft-L1 loss (iteratively reweighted), a penalty on the differences of neighbouring knots, and
    a pull to 1 where there are no rows. `knots` are each axis' knots, `rows` have a column for each axis. Knots beyond
    the rows on both sides are left out, so that the factor is constant outside. None if there are too few rows to tell
    so many knots apart: the formula then stands alone.
    """
    columns = {name: rows[name].to_numpy(float) for name in knots}
    axes = {name: _within(knots[name], columns[name]) for name in knots}
    logs = [np.log(values) for values in axes.values()]
    design = _hats([np.log(columns[name]) for name in axes], logs)
    penalty = SMOOTH * _differences([len(values) for values in axes.values()]) + TO_ONE * sparse.identity(
        design.shape[1]
    )
    if len(log_error) < ROWS_PER_KNOT * design.shape[1]:
        return None
    design, log_error = sparse.diags(np.broadcast_to(share, log_error.shape)) @ design, share * log_error
    weight = np.ones(len(log_error))
    solution = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        weighted = design.T @ sparse.diags(weight)
        solution = spsolve((weighted @ design + penalty).tocsc(), weighted @ log_error)
        weight = 1.0 / np.sqrt(1.0 + ((design @ solution - log_error) / SCALE) ** 2)
    factor = tuple(float(f"{value:.3g}") for value in np.exp(solution))
    return Correction.over({name: rounded(list(values)) for name, values in axes.items()}, factor)


def _within(knots: Sequence[float], values: Array) -> tuple[float, ...]:
    """The knots from the last at or below the smallest value to the first at or above the largest."""
    low, high = float(values.min()), float(values.max())
    first = max((i for i, knot in enumerate(knots) if knot <= low), default=0)
    last = min((i for i, knot in enumerate(knots) if knot >= high), default=len(knots) - 1)
    return tuple(float(knot) for knot in knots[first : last + 1])


def _hats(columns: Sequence[Array], axes: Sequence[Array]) -> sparse.csr_matrix:
    """Weights of the knots in every row, multilinear, constant beyond the ends: rows x knots."""
    rows = len(columns[0])
    index, weight = np.zeros((rows, 1), dtype=int), np.ones((rows, 1))
    for column, knots in zip(columns, axes, strict=True):
        if len(knots) == 1:
            continue
        x = np.clip(column, knots[0], knots[-1])
        left = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
        share = ((x - knots[left]) / (knots[left + 1] - knots[left]))[:, None]
        base = index * len(knots) + left[:, None]
        index = np.concatenate([base, base + 1], axis=1)
        weight = np.concatenate([weight * (1.0 - share), weight * share], axis=1)
    at = np.repeat(np.arange(rows), index.shape[1])
    size = math.prod(len(knots) for knots in axes)
    return sparse.csr_matrix((weight.ravel(), (at, index.ravel())), shape=(rows, size))


def _differences(shape: Sequence[int]) -> sparse.csr_matrix:
    """The quadratic form that sums squared differences of neighbours along every axis."""
    size = math.prod(shape)
    total = sparse.csr_matrix((size, size))
    for axis, length in enumerate(shape):
        if length < 2:
            continue
        step = sparse.diags([-1.0, 1.0], [0, 1], shape=(length - 1, length))
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        along = sparse.kron(sparse.kron(sparse.identity(before), step), sparse.identity(after))
        total = total + along.T @ along
    return total.tocsr()
