"""Norms, rotary embedding and activation: launch plus bytes over bandwidth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rlsim.calibrate.fit.common import Array, Fitted, held_out, residual, rounded, squash
from rlsim.cost.calibration import MemoryOpFit, Reference
from rlsim.schema import validate


def fit_elementwise(table: pd.DataFrame, ref: Reference) -> Fitted[MemoryOpFit]:
    """Fit a layer's elementwise kernels (two norms, rotary embedding, activation). `table`: size, seconds, key.

    Launch and efficiency are fitted to the sum over the four kernels, which is what a step pays; single kernels of 1 to
    6 microseconds were timed to the microsecond. Residual addition is fused into the norm in today's engines, so it
    is left out here but moves its bytes in the step's model.
    """
    x, y, test = table["size"].to_numpy(float), table.seconds.to_numpy(float), held_out(table.key)

    def shown(p: Array, i: NDArray[Any]) -> Array:
        return np.asarray(4.0 * np.exp(p[0]) * 1e-6 + x[i] / (ref.memory_bytes_per_s * squash(p[1])))

    train = np.flatnonzero(~test)

    def error(p: Array) -> Array:
        return np.asarray(np.log(shown(p, train) / y[train]))

    p = least_squares(error, np.array([1.0, 1.0]), loss="soft_l1", f_scale=0.1).x
    fit = validate(rounded({"launch_s": math.exp(p[0]) * 1e-6, "efficiency": float(squash(p[1]))}), MemoryOpFit)
    score = np.flatnonzero(test)
    predicted = 4.0 * fit.launch_s + x[score] / (ref.memory_bytes_per_s * fit.efficiency)
    note = "sum over a layer's four kernels, token counts not fitted; kernels timed to 1 us"
    return Fitted(fit, residual(predicted, y[score], {"bytes": x / 4.0}, note))
