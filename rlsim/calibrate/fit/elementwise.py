"""Norms, rotary embedding and activation: launch plus bytes over bandwidth, both under the table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Kernel, compared, distinct, held_out
from rlsim.calibrate.fit.kernel import fit_kernel
from rlsim.calibrate.parts import Fitted, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import KernelFit
from rlsim.cost.kernel import Work

KNOTS = {"bytes": [4.0**e for e in range(6, 16)], "tokens": [4.0**e for e in range(8)]}
START_S = 2.7e-6  # of a launch, where the search begins
KERNEL = Kernel(
    "memory_bound",
    lambda operators, row: row.kernels * operators.memory_bound_s(row.bytes / row.kernels, row.tokens),
    lambda row: f"{row.kernels:.0f} over {row.tokens:.0f} tokens, {row.bytes:.0f} bytes",
)


def kernel_memory_bound(table: pd.DataFrame, ref: Reference) -> Fitted[KernelFit]:
    """Elementwise kernels of `table` (columns as in `KEYS`, seconds); token counts are held out."""
    table = distinct(table, "memory_bound", ["kernels", "tokens", "bytes"])
    labels = [KERNEL.label(row) for row in table.itertuples(index=False)]
    key = table.tokens.astype(str) if table.tokens.nunique() >= 4 else pd.Series(labels)
    return fit_elementwise(table.assign(key=key), ref, "token counts not fitted")


def fit_elementwise(table: pd.DataFrame, ref: Reference, note: str) -> Fitted[KernelFit]:
    """Fit elementwise kernels and norms. `table`: kernels (launches in the row), tokens, bytes (of all of them),
    seconds, key (rows that are held out together); `note` is the residual's.

    Vidur's rows are the sum over a layer's four kernels, which is what a step pays; single kernels of 1 to 6
    microseconds were timed to the microsecond. Residual addition is fused into the norm in today's engines, so it is
    left out there but moves its bytes in the step's model.
    """
    table = table.astype(dict.fromkeys(("kernels", "tokens", "bytes", "seconds"), float))
    test, one = held_out(table.key), table[["bytes", "seconds"]].div(table.kernels, axis=0).assign(tokens=table.tokens)
    rows = one[~test]
    work = Work({"memory": rows.bytes.to_numpy() / ref.memory_bytes_per_s}, {"launches": np.ones(len(rows))})
    start = {"launches": START_S}
    fit = fit_kernel(work, rows.seconds.to_numpy(), rows, KNOTS, launch_s=0.0, blend=1.0, added_s=start)
    points = compared(KERNEL, fit, ref, table, test)
    return Fitted(fit, {"memory_bound": residual_of(points, {"bytes": one.bytes}, note)}, points)
