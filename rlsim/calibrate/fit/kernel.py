"""The fit of every kernel: few constants of a roofline, then the table of what they leave over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.sparse.linalg import spsolve

from rlsim.calibrate.fit.common import (
    KNOTS,
    SCALE,
    Array,
    Kernel,
    Knots,
    Mask,
    as_written,
    compared,
    distinct,
    fit_logs,
    held_out,
    rounded,
)
from rlsim.calibrate.measurements import Fitted, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import Correction, KernelFit
from rlsim.cost.kernel import Work, roofline_s
from rlsim.cost.operators import ElementwiseKernel

K = TypeVar("K", bound=KernelFit)

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
    knots: Knots,
    *,
    launch_s: float | None = None,
    held: Mapping[str, float] | None = None,
    blend: float = 3.0,
    added_s: Mapping[str, float] | None = None,
    in_l2: Mask | None = None,
    telling: Mask | None = None,
) -> KernelFit:
    """The kernel that took `seconds` for `work`; `shape` has a column for each axis of `knots`.

    `launch_s`: taken as it is, by default fitted with the shares of the rates and what each unit of other work takes
    (`added_s`: where its search begins, by default 1 ns) but shares that are `held`. Where there are too few rows for
    the table, it has every second knot, and so on.

    `in_l2`: rows whose bytes came from L2, at a rate of its own that is found beside the others; the table is fitted to
    what they would have taken from memory, and in it a row counts by what is not launch. `telling`: the rows that the
    constants are fitted to, by default all.
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
            kernel="", launch_s=launch, efficiency=shares, blend=blend, added_s=others, table=None
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
    share = 1.0 if in_l2 is None else beyond / seconds
    while table is None and max(map(len, knots.values())) > 2:
        table = fit_correction(shape, knots, error, share)
        knots = {name: [*values[:-1:2], values[-1]] for name, values in knots.items()}
    shares = {name: found.efficiency[name] for name in cold.resources}
    return as_written(KernelFit(**{**found.model_dump(), "efficiency": shares, "table": table}))


def fit_with_l2(
    kind: K, works: Iterable[Work], rows: pd.DataFrame, shape: pd.DataFrame, knots: Knots, telling: Mask | None = None
) -> K:
    """`kind` with the kernel of `rows` (seconds, in_l2), whose other work begins as equal parts of the time."""
    work, seconds = stacked(works), rows.seconds.to_numpy(float)
    own: dict[str, Any] = {"in_l2": rows.in_l2.to_numpy(bool), "telling": telling}
    fit = fit_kernel(work, seconds, shape, knots, added_s=equal_parts(work, seconds), **own)
    return as_written(kind.model_copy(update={**dict(fit), "kernel": kind.kernel}))


SMOOTH = 0.05  # weight of the difference of neighbouring knots, beside one of every row
TO_ONE = 0.005  # weight of the pull to "no correction", for knots without rows
ROWS_PER_KNOT = 1.2  # fewer, and there is no correction
ROUNDS = 6  # of reweighting


def fit_correction(rows: pd.DataFrame, knots: Knots, log_error: Array, share: Array | float = 1.0) -> Correction | None:
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
    return Correction(axes={name: tuple(rounded(list(values))) for name, values in axes.items()}, factor=factor)


def _within(knots: Sequence[float], values: Array) -> tuple[float, ...]:
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


# Elementwise kernels --------------------------------------------------------------------------------------------------

# Norms, rotary embedding and activation: launch plus bytes over bandwidth, both under the table.

START_S = 2.7e-6  # of a launch, where the search begins


def _elementwise_s(fit: KernelFit, ref: Reference) -> Callable[[Any], float]:
    kernel = ElementwiseKernel(fit, ref)
    return lambda row: row.kernels * kernel.time_s(row.bytes / row.kernels, row.tokens)


ELEMENTWISE = Kernel(
    "memory_bound",
    _elementwise_s,
    lambda row: f"{row.kernels:.0f} over {row.tokens:.0f} tokens, {row.bytes:.0f} bytes",
)


def kernel_memory_bound(table: pd.DataFrame, ref: Reference) -> Fitted[KernelFit]:
    """Elementwise kernels of `table` (columns as in `KEYS`, seconds); token counts are held out."""
    table = distinct(table, "memory_bound", ["kernels", "tokens", "bytes"])
    labels = [ELEMENTWISE.label(row) for row in table.itertuples(index=False)]
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
    fit = fit_kernel(work, rows.seconds.to_numpy(), rows, KNOTS["elementwise"], launch_s=0.0, blend=1.0, added_s=start)
    points = compared(ELEMENTWISE, fit, ref, table, test)
    return Fitted(fit, {"memory_bound": residual_of(points, {"bytes": one.bytes}, note)}, points)
