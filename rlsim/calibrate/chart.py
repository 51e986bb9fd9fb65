"""Measured against fitted times as a chart: one panel for every operator, held-out points marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.charts import drawn, save_chart, templates
from rlsim.errors import CalibrationError

BAND = 0.15  # relative error of the shaded band
MOST, WORST = 400, 20  # points drawn of an operator, the worst among them


def write_chart(points: pd.DataFrame, path: str | Path) -> None:
    """Draws `points` (see `Built`) to .html, .svg or .png; the HTML file holds everything it needs.

    Raises `CalibrationError` for another ending, a folder that does not exist, or no points.
    """
    save_chart(calibration_chart(points), Path(path), CalibrationError)


def calibration_chart(points: pd.DataFrame) -> dict[str, Any]:
    """The chart of `points`: log-log panels with the ±15% band; the error is in the tooltip and each panel's title."""
    if points.empty:
        raise CalibrationError("no points to draw")
    parts = []
    for operator, every in points.groupby("operator", sort=False):
        shown = _sample(every).sort_values("held_out")  # held-out points lie on top
        shown = shown.assign(seen=np.where(shown.held_out, "held out", "used for the fit"))
        times = shown[["measured_s", "fitted_s"]].to_numpy(float)
        ends = pd.DataFrame({"at": [times.min() / 1.3, times.max() * 1.3]})
        ends = ends.assign(low=ends["at"] * (1 - BAND), high=ends["at"] * (1 + BAND))
        parts.append(pd.concat([shown, ends]).assign(panel=_title(str(operator), every, len(shown))))
    columns = ["panel", "label", "measured_s", "fitted_s", "error", "seen", "at", "low", "high"]
    known = {"points": pd.concat(parts, ignore_index=True)[columns], "BAND": BAND}
    chart: dict[str, Any] = drawn(templates("calibrate")["fit"], known)
    return chart


def _title(operator: str, rows: pd.DataFrame, shown: int) -> str:
    unseen = rows[rows.held_out]
    error = (unseen if len(unseen) else rows).error.abs()
    count = f"{len(error):,} point{'s' * (len(error) != 1)}"
    which = "held out" if len(unseen) else "in sample"
    lines = [
        operator.replace("_", " "),
        f"{which}: median {error.median():.1%}, p90 {error.quantile(0.9):.1%}, {count}",
    ]
    if shown < len(rows):
        lines.append(f"{shown:,} of {len(rows):,} drawn, the worst among them")
    return "\n".join(lines)


def _sample(rows: pd.DataFrame) -> pd.DataFrame:
    """At most `MOST` rows, spread evenly over the measured times, and the worst of all."""
    if len(rows) <= MOST:
        return rows
    even = rows.sort_values("measured_s").iloc[np.linspace(0, len(rows) - 1, MOST - WORST).astype(int)]
    worst = rows.loc[rows.error.abs().sort_values(ascending=False).index[:WORST]]
    return pd.concat([even, worst]).drop_duplicates()
