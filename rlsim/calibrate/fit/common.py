"""What every fit shares: held-out rows, robust losses, rounding to what the data tell, and the comparison with measured
rows by the code that the simulator runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, least_squares

from rlsim.base.reading import shipped
from rlsim.base.schema import Schema, validate
from rlsim.calibrate.measurements import point_rows
from rlsim.cost.calibration import Reference
from rlsim.errors import CalibrationError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
S = TypeVar("S", bound=Schema)

HELD_OUT = 0.25  # share of the distinct shapes that no fit sees
SCALE = 0.1  # log errors beyond this count less and less (soft L1)


def held_out(keys: pd.Series) -> Mask:
    """True for the rows of a fixed random quarter of the distinct keys."""
    distinct = np.unique(keys.to_numpy())
    rng = np.random.default_rng(20)
    chosen = set(rng.choice(distinct, max(1, int(len(distinct) * HELD_OUT)), replace=False).tolist())
    return np.asarray(keys.isin(chosen).to_numpy(), dtype=bool)


def held_out_rows(keys: pd.Series) -> Mask:
    """A quarter of the shapes, or of the rows where there are fewer than four shapes."""
    if keys.nunique() >= 4:
        return held_out(keys)
    return held_out(pd.Series([f"row {i}" for i in range(len(keys))]))


def columns_of(table: pd.DataFrame, names: Sequence[str]) -> list[Array]:
    """These columns as floats."""
    return [table[name].to_numpy(float) for name in names]


def soft_l1(error: Array) -> Array:
    """Half the soft-L1 loss of each log error."""
    return np.asarray(np.sqrt(1.0 + (error / SCALE) ** 2) - 1.0)


def fit_logs(shown: Callable[[Array], Array], measured: Array, start: Array, *, pull: float) -> OptimizeResult:
    """Least squares of log(shown(parameters) / measured) with a soft-L1 loss.

    `pull` is the weight of a parameter's distance from its start: it holds what the rows do not tell.
    """

    def error(p: Array) -> Array:
        return np.concatenate([np.log(shown(p) / measured), pull * (p - start)])

    return least_squares(error, start, loss="soft_l1", f_scale=SCALE)


def rounded(value: Any) -> Any:
    """Floats to four significant digits, everywhere in a nested record."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return value
        value = value if value == round(value) else float(f"{value:.4g}")
        return value if abs(value) < 1e4 else int(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def as_written(record: S) -> S:
    """The record with the digits that its file will hold."""
    return validate(rounded(record.model_dump()), type(record))


def percent(value: float) -> str:
    """A share as text."""
    return f"{100 * value:.1f}%"


Knots = Mapping[str, Sequence[float]]  # of a correction, by axis
KNOTS: Mapping[str, Knots] = shipped("knots.yaml")

#: Fewest distinct rows that a fit is made of; below that there is an error, not a guess.
FEWEST = {"gemm": 8, "decode_attention": 6, "prefill_attention": 5, "memory_bound": 4, "collective": 3, "experts": 60}
FULL = 60  # rows to fit from which the full fits, with their dozen constants, are used
SMS = 8  # fewer are no GPU: the full fits are made of waves of blocks over SMs


class Kernel(NamedTuple):
    """One kind of kernel: the operator's name, what gives the time of a row of its table by a fit, and its label."""

    operator: str
    seconds: Callable[[Any, Reference], Callable[[Any], float]]
    label: Callable[[Any], str]


def predict(kernel: Kernel, fit: Schema, ref: Reference, rows: pd.DataFrame) -> Array:
    """Seconds of each of `rows` with this fit."""
    seconds = kernel.seconds(fit, ref)
    return np.array([seconds(row) for row in rows.itertuples(index=False)], float)


def compared(
    kernel: Kernel, fit: Schema, ref: Reference, rows: pd.DataFrame, held_out: Mask | bool, name: str = ""
) -> pd.DataFrame:
    """The points of `rows`, under the operator's name unless there is another."""
    labels = [kernel.label(row) for row in rows.itertuples(index=False)]
    return point_rows(name or kernel.operator, labels, rows.seconds, predict(kernel, fit, ref, rows), held_out)


def enough_for_all_constants(ref: Reference, train: Mask) -> bool:
    """Whether the rows to fit are many, and of a GPU."""
    return ref.sm_count >= SMS and bool(train.sum() >= FULL)


def distinct(table: pd.DataFrame, operator: str, keys: list[str]) -> pd.DataFrame:
    """Medians over rows of the same shape; raises `CalibrationError` if too few shapes are left."""
    rows = table.groupby(keys, as_index=False)[["seconds"]].median()
    check_enough(operator, len(rows))
    return rows


def check_enough(operator: str, count: int, which: str = "") -> None:
    """Raises `CalibrationError` for fewer distinct rows than a fit needs; `which` says what is special about them."""
    if count < FEWEST[operator]:
        raise CalibrationError(
            f"{operator}: {count} distinct rows{f' {which}' if which else ''}; at least {FEWEST[operator]} are needed"
        )


def few_constants(points: pd.DataFrame) -> str:
    """What a residual's note says of a fit with few constants."""
    return f"few-constant fit to {int((~points.held_out).sum())} rows"
