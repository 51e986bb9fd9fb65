"""Norms, rotary embedding and activation: launch plus bytes over bandwidth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rlsim.calibrate.fit.common import Array, Fitted, held_out, operators_with, residual, rounded, squash
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.cost.calibration import MemoryOpFit, Reference
from rlsim.cost.operators import MEMORY_AXES
from rlsim.schema import validate

KNOTS = {"tokens": [4.0**e for e in range(8)], "bytes": [4.0**e for e in range(6, 16)]}


def fit_elementwise(table: pd.DataFrame, ref: Reference) -> Fitted[MemoryOpFit]:
    """Fit elementwise kernels and norms. `table`: kernels (launches in the row), tokens, bytes (of all of them),
    seconds, key (rows that are held out together).

    Vidur's rows are the sum over a layer's four kernels, which is what a step pays; single kernels of 1 to 6
    microseconds were timed to the microsecond. Residual addition is fused into the norm in today's engines, so it is
    left out there but moves its bytes in the step's model.
    """
    n, tokens, size, y = (table[c].to_numpy(float) for c in ("kernels", "tokens", "bytes", "seconds"))
    test = held_out(table.key)

    def shown(p: Array, i: NDArray[Any]) -> Array:
        return np.asarray(n[i] * np.exp(p[0]) * 1e-6 + size[i] / (ref.memory_bytes_per_s * squash(p[1])))

    train = np.flatnonzero(~test)

    def error(p: Array) -> Array:
        return np.asarray(np.log(shown(p, train) / y[train]))

    p = least_squares(error, np.array([1.0, 1.0]), loss="soft_l1", f_scale=0.1).x
    fit = validate(rounded({"launch_s": math.exp(p[0]) * 1e-6, "efficiency": float(squash(p[1]))}), MemoryOpFit)
    columns = dict(zip(MEMORY_AXES, (tokens[train], size[train] / n[train]), strict=True))
    fit = fit.model_copy(update={"correction": fit_correction(columns, KNOTS, -error(p))})
    check = operators_with(ref, memory=fit)
    score = np.flatnonzero(test)
    predicted = [n[i] * check.memory_bound_s(size[i] / n[i], tokens[i]) for i in score]
    note = "sum over a layer's kernels, token counts not fitted; kernels timed to 1 us"
    return Fitted(fit, residual(predicted, y[score], {"bytes": size / n}, note))
