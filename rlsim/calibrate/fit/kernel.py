"""The fit of every kernel: few constants of a roofline, then the table of what they leave over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Array, as_written, fit_logs
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.cost.fits import KernelFit
from rlsim.cost.kernel import Work, roofline_s

START = 0.7  # share of a rate that the search begins with
ADDED_S = 1e-9  # and seconds of a unit of other work
LEAST = 0.2  # of a measured time, what is taken to be beyond the launch at least
PULL = 0.02  # towards the start: holds what the rows do not tell


def fit_kernel(
    work: Work,
    seconds: Array,
    shape: pd.DataFrame,
    knots: Mapping[str, Sequence[float]],
    *,
    kernel: str = "",
    launch_s: float | None = None,
    added_s: Mapping[str, float] | None = None,
) -> KernelFit:
    """The kernel that took `seconds` for `work`; `shape` has a column for each axis of `knots`.

    `launch_s`: taken as it is, by default fitted with the shares of the rates and what each unit of other work takes
    (`added_s`: where its search begins, by default 1 ns). The table is left out where there are too few rows for it.
    """
    names, more = list(work.resources), list(work.added)
    begin = [launch_s or float(np.quantile(seconds, 0.01)) / 2]
    begin += [START] * len(names) + [(added_s or {}).get(name, ADDED_S) for name in more]

    def record(p: Array) -> KernelFit:
        values = np.exp(p)
        shares = dict(zip(names, np.clip(values[1 : 1 + len(names)], 1e-6, 100.0).tolist(), strict=True))
        others = dict(zip(more, values[1 + len(names) :].tolist(), strict=True))
        launch = float(values[0]) if launch_s is None else launch_s
        return KernelFit.model_construct(kernel=kernel, launch_s=launch, efficiency=shares, added_s=others, table=None)

    def shown(p: Array) -> Array:
        fit = record(p)
        return np.asarray(fit.launch_s + roofline_s(fit, work))

    found = record(fit_logs(shown, seconds, np.log(begin), pull=PULL).x)
    beyond = np.maximum(seconds - found.launch_s, LEAST * seconds)
    table = fit_correction(shape, knots, np.log(beyond / roofline_s(found, work)))
    return as_written(KernelFit(**{**found.model_dump(), "table": table}))
