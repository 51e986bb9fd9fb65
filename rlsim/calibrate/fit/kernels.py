"""A fit of one kind of kernel, and its comparison with measured rows by the code that the simulator runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rlsim.base.schema import Schema
from rlsim.calibrate.fit.common import Array, Mask
from rlsim.calibrate.points import point_rows
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import OperatorFits
from rlsim.cost.operators import Operators
from rlsim.errors import CalibrationError

Knots = Mapping[str, Sequence[float]]  # of a correction, by axis

#: Fewest distinct rows that a fit is made of; below that there is an error, not a guess.
FEWEST = {"gemm": 8, "decode_attention": 6, "prefill_attention": 5, "memory_bound": 4, "collective": 3, "experts": 60}
FULL = 60  # rows to fit from which the full fits, with their dozen constants, are used
SMS = 8  # fewer are no GPU: the full fits are made of waves of blocks over SMs

#: Stands for an operator that is not asked for: the look-ups prepare products and corrections for all of them.
_ABSENT = SimpleNamespace(
    precision="bf16",
    kv_precision="bf16",
    heads={},
    windows={},
    tiles=(),
    blocks=None,
    table=None,
    efficiency={},
    added_s={},
)


class Kernel(NamedTuple):
    """One kind of kernel: the operator's name, and the time and the label of a row of its table.

    `slot`: where `Operators` looks for its fit, if that is not under the operator's name.
    """

    operator: str
    seconds: Callable[[Operators, Any], float]
    label: Callable[[Any], str]
    slot: str = ""


def operators_with(ref: Reference, **fits: Schema) -> Operators:
    """The look-ups of the given fits (by operator); the others cannot be asked for."""
    absent: dict[str, Any] = {
        name: field.default if field.default in ({}, ()) else _ABSENT
        for name, field in OperatorFits.model_fields.items()
    }
    return Operators(OperatorFits.model_construct(**{**absent, **fits}), ref)


def predict(kernel: Kernel, fit: Schema, ref: Reference, rows: pd.DataFrame) -> Array:
    """Seconds of each of `rows` with this fit."""
    operators = operators_with(ref, **{kernel.slot or kernel.operator: fit})
    return np.array([kernel.seconds(operators, row) for row in rows.itertuples(index=False)], float)


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
