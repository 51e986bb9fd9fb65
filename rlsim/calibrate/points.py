"""Measured against fitted, point by point: what the chart draws and the residuals sum up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.calibrate.fit.common import residual
from rlsim.cost.calibration import Residual

#: `error` = fitted / measured - 1; `held_out`: the fit has not seen the point.
COLUMNS = ("operator", "label", "measured_s", "fitted_s", "error", "held_out")


def point_rows(
    operator: str,
    labels: Sequence[str],
    measured_s: Iterable[float],
    fitted_s: Iterable[float],
    held_out: NDArray[Any] | Sequence[bool],
) -> pd.DataFrame:
    """The points of one operator as a table with `COLUMNS`, one row for each label."""
    frame = pd.DataFrame(
        {
            "operator": [operator] * len(labels),
            "label": list(labels),
            "measured_s": np.fromiter(measured_s, float, len(labels)),
            "fitted_s": np.fromiter(fitted_s, float, len(labels)),
            "held_out": np.asarray(held_out, dtype=bool),
        }
    )
    frame["error"] = frame.fitted_s / frame.measured_s - 1.0
    return frame[list(COLUMNS)]


def join(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """All points in one table; an empty one with the same columns if there are none."""
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else point_rows("", [], [], [], [])


def residual_of(points: pd.DataFrame, ranges: dict[str, NDArray[np.float64]], note: str) -> Residual:
    """The residual of the held-out points; of all of them, and the note says so, if none is held out."""
    unseen = points[points.held_out]
    if unseen.empty:
        unseen, note = points, f"in sample: {note}"
    return residual(unseen.fitted_s, unseen.measured_s, ranges, note)
