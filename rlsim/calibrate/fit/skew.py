"""What unequal contexts cost decode attention, as measured."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from rlsim.calibrate.fit.common import operators_with, soft_l1
from rlsim.calibrate.parts import point_rows
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import AttentionFit


def measured_skew(
    fit: AttentionFit, ref: Reference, unequal: pd.DataFrame, equal: pd.DataFrame
) -> tuple[float, pd.DataFrame]:
    """The share of the padding that brings equal contexts to the times of unequal ones, and the points with it.

    Equal contexts of the same batch and heads, if measured, say what the padding costs; else the fit does. Every
    fourth row is held out, if there are eight or more.
    """
    heads = ["batch", "q_heads", "kv_heads"]
    measured = {key: rows.sort_values("context") for key, rows in equal.groupby(heads)}
    rows = list(unequal[[*heads, "context", "longest", "seconds"]].itertuples(index=False))
    operators, (dim,) = operators_with(ref, decode_attention=fit), fit.heads

    def shown(row: tuple[float, ...], skew: float) -> float:
        b, q, kv, context, longest, _ = row
        at = context + skew * (longest - context)
        same = measured.get((b, q, kv))
        if same is not None and len(same) >= 2 and same.context.iloc[0] <= at <= same.context.iloc[-1]:
            return float(np.interp(at, same.context, same.seconds))
        return operators.decode_attention_s(int(b), b * at, int(q), int(kv), dim)

    test = np.arange(len(rows)) % 4 == 3 if len(rows) >= 8 else np.zeros(len(rows), dtype=bool)
    train = [row for row, unseen in zip(rows, test, strict=True) if not unseen]

    def loss(skew: float) -> float:
        return float(np.sum(soft_l1(np.array([np.log(shown(row, skew) / row[-1]) for row in train]))))

    best = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    best = min((0.0, best, 1.0), key=loss)
    labels = [f"{r[0]:.0f} x {r[3]:.0f} tokens, longest {r[4]:.0f}, {r[1]:.0f}/{r[2]:.0f} heads" for r in rows]
    values = [shown(row, best) for row in rows]
    return best, point_rows("decode_attention_unequal", labels, [row[-1] for row in rows], values, test)
