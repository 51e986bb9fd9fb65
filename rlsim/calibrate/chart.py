"""Measured against fitted times as a chart: one panel for every operator, held-out points marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from rlsim.base.charts import save_chart
from rlsim.errors import CalibrationError

if TYPE_CHECKING:
    import altair as alt

BAND = 0.15  # relative error of the shaded band
MOST, MOST_IN_ALL = 400, 4800  # points drawn, of one operator and together; the worst are always among them
WORST = 20
COLUMNS = 3
SIDE = 230  # pixels of a panel
_COLOURS = ["#7f8c99", "#d55e00"]  # grey, vermilion: told apart by anyone
_SEEN = ["used for the fit", "held out"]


def write_chart(points: pd.DataFrame, path: str | Path) -> None:
    """Draws `points` (see `Built`) to .html, .svg or .png; the HTML file holds everything it needs.

    Raises `CalibrationError` for another ending, a folder that does not exist, or no points.
    """
    save_chart(calibration_chart(points), Path(path), CalibrationError)


def calibration_chart(points: pd.DataFrame) -> alt.FacetChart:
    """The chart of `points`: log-log panels with the ±15% band; the error is in the tooltip and each panel's title."""
    import altair as alt

    if points.empty:
        raise CalibrationError("no points to draw")
    parts, most = [], min(MOST, MOST_IN_ALL // points.operator.nunique())
    for operator, rows in points.groupby("operator", sort=False):
        shown = _sample(rows, most).sort_values("held_out")  # held-out points lie on top
        times = shown[["measured_s", "fitted_s"]].to_numpy(float)
        ends = pd.DataFrame({"at": [times.min() / 1.3, times.max() * 1.3]})
        ends = ends.assign(low=ends["at"] * (1 - BAND), high=ends["at"] * (1 + BAND))
        shown = shown.assign(seen=shown.held_out.map(dict(enumerate(_SEEN)).get))
        parts.append(pd.concat([shown, ends]).assign(panel=_title(str(operator), rows, len(shown))))
    columns = ["panel", "label", "measured_s", "fitted_s", "error", "seen", "at", "low", "high"]
    base = alt.Chart(pd.concat(parts, ignore_index=True)[columns])
    log, axis = alt.Scale(type="log", nice=False), alt.Axis(format="~s", tickCount=5, labelOverlap=True)
    line = base.transform_filter("isValid(datum.at)").encode(
        x=alt.X("at:Q", scale=log, axis=axis, title="measured (s)")
    )
    band = line.mark_area(color="#56b4e9", opacity=0.3, clip=True).encode(
        y=alt.Y("low:Q", scale=log, axis=axis, title="fitted (s)"), y2="high:Q"
    )
    diagonal = line.mark_line(color="#444444", strokeWidth=1).encode(y="at:Q")
    dots = base.transform_filter("isValid(datum.label)").mark_point(filled=True, size=26, opacity=0.65, clip=True)
    dots = dots.encode(
        x="measured_s:Q",
        y="fitted_s:Q",
        color=alt.Color("seen:N", title=None, scale=alt.Scale(domain=_SEEN, range=_COLOURS)),
        shape=alt.Shape("seen:N", title=None, scale=alt.Scale(domain=_SEEN, range=["circle", "diamond"])),
        tooltip=["label:N", "measured_s:Q", "fitted_s:Q", alt.Tooltip("error:Q", format="+.1%"), "seen:N"],
    )
    header = alt.Header(title=None, labelAnchor="start", labelFontSize=11, labelExpr="split(datum.label, '\\n')")
    facet = alt.layer(band, diagonal, dots).properties(width=SIDE, height=SIDE)
    said = f"on the diagonal both agree; shaded: within {BAND:.0%}; held out: points that the fit has not seen"
    title = alt.TitleParams("Fitted against measured times", subtitle=said, anchor="start", offset=14)
    panels = facet.facet(alt.Facet("panel:N", header=header, sort=None), columns=COLUMNS, title=title)
    chart: alt.FacetChart = panels.resolve_scale(x="independent", y="independent").configure_view(stroke=None)
    return chart


def _title(operator: str, rows: pd.DataFrame, shown: int) -> str:
    unseen = rows[rows.held_out]
    error = (unseen if len(unseen) else rows).error.abs()
    count = f"{len(error):,} point{'s' * (len(error) != 1)}"
    which = "held out" if len(unseen) else "in sample"
    name = operator.replace("_", " ")
    lines = [name, f"{which}: median {error.median():.1%}, p90 {error.quantile(0.9):.1%}, {count}"]
    if shown < len(rows):
        lines.append(f"{shown:,} of {len(rows):,} drawn, the worst among them")
    return "\n".join(lines)


def _sample(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most `most` rows, spread evenly over the measured times, and the worst of all."""
    if len(rows) <= most:
        return rows
    ordered = rows.sort_values("measured_s")
    even = ordered.iloc[np.linspace(0, len(rows) - 1, most - WORST).astype(int)]
    worst = rows.loc[rows.error.abs().sort_values(ascending=False).index[:WORST]]
    return pd.concat([even, worst]).drop_duplicates()
