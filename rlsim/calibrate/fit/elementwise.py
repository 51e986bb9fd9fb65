"""Norms, rotary embedding and activation: launch plus bytes over bandwidth."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Array, columns_of, fit_logs, held_out, rounded, squash
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.calibrate.fit.kernels import Kernel, compared, distinct
from rlsim.calibrate.points import Fitted, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import MemoryOpFit
from rlsim.schema import validate

KNOTS = {"tokens": [4.0**e for e in range(8)], "bytes": [4.0**e for e in range(6, 16)]}
KERNEL = Kernel(
    "memory_bound",
    lambda operators, row: row.kernels * operators.memory_bound_s(row.bytes / row.kernels, row.tokens),
    lambda row: f"{row.kernels:.0f} over {row.tokens:.0f} tokens, {row.bytes:.0f} bytes",
)


def kernel_memory_bound(table: pd.DataFrame, ref: Reference) -> Fitted[MemoryOpFit]:
    """Elementwise kernels of `table` (columns as in `KEYS`, seconds); token counts are held out."""
    table = distinct(table, "memory_bound", ["kernels", "tokens", "bytes"])
    labels = [KERNEL.label(row) for row in table.itertuples(index=False)]
    key = table.tokens.astype(str) if table.tokens.nunique() >= 4 else pd.Series(labels)
    return fit_elementwise(table.assign(key=key), ref, "token counts not fitted")


def fit_elementwise(table: pd.DataFrame, ref: Reference, note: str) -> Fitted[MemoryOpFit]:
    """Fit elementwise kernels and norms. `table`: kernels (launches in the row), tokens, bytes (of all of them),
    seconds, key (rows that are held out together); `note` is the residual's.

    Vidur's rows are the sum over a layer's four kernels, which is what a step pays; single kernels of 1 to 6
    microseconds were timed to the microsecond. Residual addition is fused into the norm in today's engines, so it is
    left out there but moves its bytes in the step's model.
    """
    table = table.astype(dict.fromkeys(("kernels", "tokens", "bytes", "seconds"), float))
    test = held_out(table.key)
    rows = table[~test]
    n, size, y = columns_of(rows, ("kernels", "bytes", "seconds"))

    def shown(p: Array) -> Array:
        return np.asarray(n * np.exp(p[0]) * 1e-6 + size / (ref.memory_bytes_per_s * squash(p[1])))

    p = fit_logs(shown, y, np.array([1.0, 1.0])).x
    fit = validate(rounded({"launch_s": math.exp(p[0]) * 1e-6, "efficiency": float(squash(p[1]))}), MemoryOpFit)
    correction = fit_correction(rows.assign(bytes=size / n), KNOTS, -np.log(shown(p) / y))
    fit = fit.model_copy(update={"correction": correction})
    points = compared(KERNEL, fit, ref, table, test)
    ranges = {"bytes": table.bytes / table.kernels}
    return Fitted(fit, {"memory_bound": residual_of(points, ranges, note)}, points)
