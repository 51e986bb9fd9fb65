"""What every fit shares: held-out rows, robust losses, and rounding to what the data tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, least_squares

from rlsim.base.schema import Schema, validate

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


def fit_logs(
    shown: Callable[[Array], Array], measured: Array, start: Array, *, pull: float = 0.0, within: float = math.inf
) -> OptimizeResult:
    """Least squares of log(shown(parameters) / measured) with a soft-L1 loss.

    `pull` is the weight of a parameter's distance from its start: it holds what the rows do not tell. No parameter
    goes further from it than `within`.
    """

    def error(p: Array) -> Array:
        logs = np.log(shown(p) / measured)
        return np.concatenate([logs, pull * (p - start)]) if pull else logs

    return least_squares(error, start, loss="soft_l1", f_scale=SCALE, bounds=(start - within, start + within))


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
