"""The fit of every kernel: few constants of a roofline, then the table of what they leave over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Array, Mask, as_written, fit_logs
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.cost.fits import KernelFit
from rlsim.cost.kernel import Work, roofline_s

START = 0.7  # share of a rate that the search begins with
ADDED_S = 1e-9  # and seconds of a unit of other work
LAUNCH = 0.8  # of the shortest times, what the launch is taken to be at most
MOST_S = 10.0  # seconds of such a unit
PART = 0.05  # of the time, what each kind of other work is taken to be in `equal_parts`
LEAST = 0.2  # of a measured time, what is taken to be beyond the launch at least
PULL = 0.02  # towards the start: holds what the rows do not tell


def stacked(works: Iterable[Work]) -> Work:
    """The work of many shapes in one, as arrays."""
    each = list(works)
    resources = {name: np.array([one.resources[name] for one in each], float) for name in each[0].resources}
    return Work(resources, {name: np.array([one.added[name] for one in each], float) for name in each[0].added})


def equal_parts(work: Work, seconds: Array) -> dict[str, float]:
    """Seconds of a unit of each kind of other work that would take the same part of the time."""
    means = {name: float(np.mean(amount)) for name, amount in work.added.items()}
    return {name: PART * float(np.median(seconds)) / mean if mean else ADDED_S for name, mean in means.items()}


def fit_kernel(
    work: Work,
    seconds: Array,
    shape: pd.DataFrame,
    knots: Mapping[str, Sequence[float]],
    *,
    kernel: str = "",
    launch_s: float | None = None,
    held: Mapping[str, float] | None = None,
    blend: float = 3.0,
    added_s: Mapping[str, float] | None = None,
    in_l2: Mask | None = None,
    telling: Mask | None = None,
    by_share: bool = False,
) -> KernelFit:
    """The kernel that took `seconds` for `work`; `shape` has a column for each axis of `knots`.

    `launch_s`: taken as it is, by default fitted with the shares of the rates and what each unit of other work takes
    (`added_s`: where its search begins, by default 1 ns) but shares that are `held`. Where there are too few rows for
    the table, it has every second knot, and so on.

    `in_l2`: rows whose bytes came from L2, at a rate of its own that is found beside the others; the table is fitted to
    what they would have taken from memory. `telling`: the rows that the constants are fitted to, by default all.
    `by_share`: in the table a row counts by what is not launch.
    """
    cold = work
    if in_l2 is not None and in_l2.any():
        memory = work.resources["memory"]
        split = {"memory": np.where(in_l2, 0.0, memory), "l2": np.where(in_l2, memory, 0.0)}
        work = Work({**work.resources, **split}, work.added)
    names, more = list(work.resources), list(work.added)
    most_s = LAUNCH * float(np.quantile(seconds, 0.01))
    begin = [launch_s or most_s / 2]
    begin += [START] * len(names) + [(added_s or {}).get(name, ADDED_S) for name in more]

    def record(p: Array) -> KernelFit:
        values = np.exp(p)
        shares = dict(zip(names, np.clip(values[1 : 1 + len(names)], 1e-6, 100.0).tolist(), strict=True))
        shares.update(held or {})
        others = dict(zip(more, np.minimum(values[1 + len(names) :], MOST_S).tolist(), strict=True))
        launch = min(float(values[0]), most_s) if launch_s is None else launch_s
        return KernelFit.model_construct(
            kernel=kernel, launch_s=launch, efficiency=shares, blend=blend, added_s=others, table=None
        )

    told = np.ones(len(seconds), bool) if telling is None else telling
    known = Work(*({name: np.asarray(one)[told] for name, one in part.items()} for part in work))

    def shown(p: Array) -> Array:
        fit = record(p)
        return np.asarray(fit.launch_s + roofline_s(fit, known))

    found = record(fit_logs(shown, seconds[told], np.log(begin), pull=PULL).x)
    seconds = seconds + np.asarray(roofline_s(found, cold) - roofline_s(found, work))
    beyond = np.maximum(seconds - found.launch_s, LEAST * seconds)
    error, table = np.log(beyond / roofline_s(found, cold)), None
    share = beyond / seconds if by_share else 1.0
    while table is None and max(map(len, knots.values())) > 2:
        table = fit_correction(shape, knots, error, share)
        knots = {name: [*values[:-1:2], values[-1]] for name, values in knots.items()}
    shares = {name: found.efficiency[name] for name in cold.resources}
    return as_written(KernelFit(**{**found.model_dump(), "efficiency": shares, "table": table}))
