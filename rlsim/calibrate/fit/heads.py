"""Which rows of an attention table are fitted together: one head size, the usual groups of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pandas as pd

from rlsim.calibrate.fit.kernels import FULL, check_enough
from rlsim.calibrate.points import Fitted
from rlsim.cost.calibration import Reference
from rlsim.schema import Schema

A = TypeVar("A", bound=Schema)

HEAD_DIM = 128  # the head size of the fits' formulas
OTHER_HEAD_DIMS = (64, 256)  # of gpt-oss and gemma: they have fits of their own
GROUP = 8  # query heads per KV head in the models RL runs use


def heads_of(table: pd.DataFrame) -> pd.Series:
    """The key by which attention rows are held out: batch and heads."""
    return table.batch.astype(str) + "/" + table.q_heads.astype(str) + "/" + table.kv_heads.astype(str)


def usual_groups(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    """The rows with at most 8 query heads for each KV head; raises `CalibrationError` if they are too few."""
    rows = table[table.q_heads <= GROUP * table.kv_heads].reset_index(drop=True)
    check_enough(operator, len(rows), f"with at most {GROUP} query heads for each KV head")
    return rows


def with_one_head_dim(table: pd.DataFrame, operator: str) -> tuple[pd.DataFrame, int, tuple[str, ...]]:
    """The rows of one head size: 128 if measured, else the commonest."""
    dims = table.head_dim.value_counts()
    dim = HEAD_DIM if HEAD_DIM in dims.index else int(dims.index[0])
    others = sorted(int(d) for d in dims.index if int(d) != dim)
    note = f"{operator}: heads of {dim}; rows with heads of {', '.join(map(str, others))} are left out"
    return table[table.head_dim == dim], dim, (note,) if others else ()


def of_every_head_dim(
    table: pd.DataFrame, ref: Reference, operator: str, fitted: Callable[[pd.DataFrame, Reference], Fitted[A]]
) -> Fitted[A]:
    """The fit of heads of 128 (or of the commonest size), and in it those of `OTHER_HEAD_DIMS` with enough rows."""
    rows = table.head_dim.value_counts()
    dims = [dim for dim in OTHER_HEAD_DIMS if HEAD_DIM in rows.index and rows.get(dim, 0) >= FULL]
    usual, size, notes = with_one_head_dim(table[~table.head_dim.isin(dims)], operator)
    found = fitted(usual, per_head_of_128(ref, size))
    head_dims, residuals = {}, dict(found.residuals)
    for dim in dims:
        own = fitted(table[table.head_dim == dim].reset_index(drop=True), per_head_of_128(ref, dim))
        head_dims[dim] = own.fit
        residuals[f"{operator}_heads_of_{dim}"] = own.residuals[operator]
    fit = found.fit.model_copy(update={"head_dims": head_dims})
    return Fitted(fit, residuals, found.points, (*notes, *found.notes))


def per_head_of_128(ref: Reference, dim: int) -> Reference:
    """The fits take heads of 128: heads of `dim` move and multiply `dim` / 128 of that, as if the GPU were faster."""
    more = HEAD_DIM / dim
    names = ("memory_bytes_per_s", "bf16_flop_per_s", "l2_bytes") if more != 1.0 else ()
    return ref.model_copy(update={name: getattr(ref, name) * more for name in names})
