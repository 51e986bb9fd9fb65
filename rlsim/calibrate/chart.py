"""Measured against fitted times as a chart: one panel for every operator, held-out points marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from rlsim.charts import check_chart_path, save_chart
from rlsim.errors import CalibrationError

if TYPE_CHECKING:
    import altair as alt

BAND = 0.15  # relative error of the shaded band
MOST = 400  # points drawn for one operator; the worst are always among them
WORST = 20
COLUMNS = 3
SIDE = 230  # pixels of a panel
GAPS = {"row": 95, "column": 75}  # room for titles above and labels left of the panels
_FITTED, _HELD_OUT, _BAND = "#7f8c99", "#d55e00", "#56b4e9"  # grey, vermilion, sky blue: told apart by anyone
_SEEN, _UNSEEN = "used for the fit", "held out"
TITLES = {
    "gemm": "GEMM",
    "decode_attention_unequal": "decode attention, unequal contexts",
    "prefill_attention_cached": "prefill on cached tokens, not fitted",
    "memory_bound": "elementwise kernels",
    "nccl": "collectives",
    "custom_all_reduce": "engine's own all-reduce",
    "collective_derived": "broadcast, send/receive, derived",
    "step_from_operators": "decode step, operators and host",
    "decode_step": "decode step, interpolated",
    "train_block": "training, one layer",
}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def write_chart(points: pd.DataFrame, path: str | Path) -> None:
    """Draws `points` (see `Built`) to .html, .svg or .png; the HTML file holds everything it needs.

    Raises `CalibrationError` for another ending, a folder that does not exist, or no points.
    """
    path = Path(path)
    check_chart_path(path, CalibrationError)
    save_chart(calibration_chart(points), path, CalibrationError)


def calibration_chart(points: pd.DataFrame) -> alt.ConcatChart:
    """The chart of `points`: log-log panels with the ±15% band; the error is in the tooltip and each panel's title."""
    import altair as alt

    if points.empty:
        raise CalibrationError("no points to draw")
    panels = [_panel(str(operator), rows) for operator, rows in points.groupby("operator", sort=False)]
    title = alt.TitleParams(
        "Fitted against measured times",
        subtitle=f"on the diagonal both agree; shaded: within {BAND:.0%}; held out: points that the fit has not seen",
        anchor="start",
        offset=14,
    )
    config = {
        "view": {"stroke": None},
        "axis": {"gridOpacity": 0.35, "labelFontSize": 10, "titleFontSize": 11},
        "legend": {"orient": "top", "offset": 14, "symbolSize": 60, "labelFontSize": 11},
    }
    return alt.concat(*panels, columns=COLUMNS, title=title, spacing=GAPS, bounds="flush", config=config)


def _panel(operator: str, rows: pd.DataFrame) -> alt.LayerChart:
    import altair as alt

    shown = _sample(rows).assign(seen=lambda frame: np.where(frame.held_out, _UNSEEN, _SEEN))
    shown = shown.sort_values("held_out")  # held-out points lie on top
    low = float(min(shown.measured_s.min(), shown.fitted_s.min())) / 1.3
    high = float(max(shown.measured_s.max(), shown.fitted_s.max())) * 1.3
    factor, unit = next((u for u in _UNITS if high >= 2.0 * u[0]), _UNITS[-1])
    low, high = low / factor, high / factor
    shown = shown.assign(measured=shown.measured_s / factor, fitted=shown.fitted_s / factor)
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    axis = alt.Axis(format="~r", values=_ticks(low, high))
    x, y = f"measured ({unit})", f"fitted ({unit})"
    ends = pd.DataFrame({"at": [low, high]})
    ends = ends.assign(low=ends["at"] * (1 - BAND), high=ends["at"] * (1 + BAND))
    line = alt.Chart(ends).encode(x=alt.X("at:Q", scale=scale, axis=axis, title=x))
    band = line.mark_area(color=_BAND, opacity=0.3, clip=True).encode(
        y=alt.Y("low:Q", scale=scale, axis=axis, title=y), y2="high:Q"
    )
    diagonal = line.mark_line(color="#444444", strokeWidth=1).encode(y=alt.Y("at:Q", scale=scale))
    domain = [_SEEN, _UNSEEN]
    kind = alt.Color("seen:N", title=None, scale=alt.Scale(domain=domain, range=[_FITTED, _HELD_OUT]))
    form = alt.Shape("seen:N", title=None, scale=alt.Scale(domain=domain, range=["circle", "diamond"]))
    dots = (
        alt.Chart(shown[["label", "measured", "fitted", "measured_s", "fitted_s", "error", "seen"]])
        .mark_point(filled=True, size=26, opacity=0.65, clip=True)
        .encode(
            x=alt.X("measured:Q", scale=scale),
            y=alt.Y("fitted:Q", scale=scale),
            color=kind,
            shape=form,
            tooltip=[
                alt.Tooltip("label:N", title=_name(operator)),
                alt.Tooltip("measured:Q", title=x, format=".4~g"),
                alt.Tooltip("fitted:Q", title=y, format=".4~g"),
                alt.Tooltip("error:Q", format="+.1%"),
                alt.Tooltip("seen:N", title="point"),
            ],
        )
    )
    title = _title(operator, rows, len(shown))
    return alt.LayerChart(layer=[band, diagonal, dots], width=SIDE, height=SIDE, title=title)


def _title(operator: str, rows: pd.DataFrame, shown: int) -> alt.TitleParams:
    import altair as alt

    unseen = rows[rows.held_out]
    which = "held out" if len(unseen) else "in sample"
    error = (unseen if len(unseen) else rows).error.abs()
    count = f"{len(error):,} point{'s' * (len(error) != 1)}"
    text = f"{which}: median {error.median():.1%}, p90 {error.quantile(0.9):.1%}, {count}"
    lines = [text] if shown == len(rows) else [text, f"{shown:,} of {len(rows):,} drawn, the worst among them"]
    return alt.TitleParams(_name(operator), subtitle=lines, anchor="start", fontSize=13, subtitleFontSize=10)


def _name(operator: str) -> str:
    return TITLES.get(operator, operator.replace("_", " "))


def _sample(rows: pd.DataFrame) -> pd.DataFrame:
    """At most `MOST` rows, spread evenly over the measured times, and the worst of all."""
    if len(rows) <= MOST:
        return rows
    ordered = rows.sort_values("measured_s")
    even = ordered.iloc[np.linspace(0, len(rows) - 1, MOST - WORST).astype(int)]
    worst = rows.loc[rows.error.abs().sort_values(ascending=False).index[:WORST]]
    return pd.concat([even, worst]).drop_duplicates()


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, every second one over more than six decades; 1, 2, 5 of each below two decades, more below one."""
    decades = np.log10(high / low)
    steps = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    every = 2 if decades > 6 else 1
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [step * 10.0**e for e in exponents if e % every == 0 for step in steps if low <= step * 10.0**e <= high]
