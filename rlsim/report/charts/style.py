"""What all charts share: size, fonts, and data as compact records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

WIDTH = 900  # px of a chart with its labels
INK, FAINT, GRID = "#1C1C1C", "#5A5A5A", "#E4E4E4"
LABEL_LIMIT = 260  # px of a system's name
_DIGITS = 6


def data(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with floats rounded to six significant digits: finer than any pixel, and half the bytes."""
    rounded = {
        name: column.map(lambda value: float(f"{value:.{_DIGITS}g}"), na_action="ignore")
        for name, column in frame.items()
        if pd.api.types.is_float_dtype(column)
    }
    return frame.assign(**{str(name): column for name, column in rounded.items()})


def finished(chart: Any, *, description: str, fit: bool = True) -> Any:
    """The chart, given the report's look in place (Altair's own methods copy all of it each time).

    `fit` makes labels and plot together WIDTH wide (not for rows of charts).
    """
    import altair as alt

    if fit:
        chart.width, chart.autosize = WIDTH, alt.AutoSizeParams(type="fit-x", contains="padding")
    chart.description, chart.background = description, "#FFFFFF"
    chart.padding = {"left": 4, "right": 14, "top": 4, "bottom": 4}
    text: dict[str, Any] = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12}
    lines: dict[str, Any] = {"gridColor": GRID, "domainColor": "#8A8A8A", "tickColor": "#8A8A8A"}
    chart.config = alt.Config(
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(titleFontWeight="normal", labelLimit=LABEL_LIMIT, **text, **lines),
        legend=alt.LegendConfig(symbolLimit=0, **text),
        title=alt.TitleConfig(color=INK, fontSize=13, fontWeight="bold", anchor="start"),
    )
    return chart


def legend(names: list[str], **settings: Any) -> Any:
    """A legend above the chart, in as many columns as there is room for."""
    import altair as alt

    widest = max((len(name) for name in names), default=1) * 7.5 + 34
    columns = max(min(len(names), int((WIDTH - 60) // widest)), 1)
    return alt.Legend(**{"orient": "top", "title": None, "columns": columns, "labelLimit": 320, **settings})


def bar_height(rows: int) -> int:
    """Height in px of a chart with one bar per system."""
    return max(rows, 2) * (26 if rows <= 12 else 20)


def label_angle(labels: Iterable[str], width: float) -> int:
    """Degrees by which labels below a chart of this width (px) are turned: not at all if they fit beside each other."""
    texts = list(labels)
    longest = max((len(text) for text in texts), default=0)
    return 0 if min(longest * 7, LABEL_LIMIT) + 6 <= width / max(len(texts), 1) else -40
