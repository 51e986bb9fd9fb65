"""Charts of the validation page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from rlsim.validate.rows import Row

COLOURS = ("#1f5a94", "#e08a1e", "#3f8f4f", "#7b5aa6", "#8c6d4f", "#4fa6b8")
_GREY = "#9a9a9a"
_EDGE = 0.5
_WIDTH = 560


def errors_chart(rows: Iterable[Row]) -> Any:
    """One line for each row: its error as a dot, outputs and inputs in two colours."""
    import altair as alt

    frame = pd.DataFrame([{"figure": f"{r.case} · {r.quantity}", "error": r.error, "kind": r.kind} for r in rows])
    frame["shown"] = frame.error.clip(-1, 1)
    order = list(dict.fromkeys(frame.figure))
    x = alt.X("shown:Q", title="rlsim / published − 1", axis=alt.Axis(format="+.0%"), scale=alt.Scale(domain=[-1, 1]))
    y = alt.Y("figure:N", sort=order, title=None, axis=alt.Axis(labelLimit=420, grid=True))
    colour = alt.Color(
        "kind:N", title=None, scale=alt.Scale(domain=["output", "input"], range=[COLOURS[0], COLOURS[1]])
    )
    zero = alt.Chart(pd.DataFrame({"shown": [0.0]})).mark_rule(color=_GREY).encode(x=x)
    dots = alt.Chart(frame).mark_circle(size=60, opacity=1).encode(x=x, y=y, color=colour)
    return _finished((zero + dots).properties(width=_WIDTH - 180, height=14 * len(order)), "Published figures")


def error_panels(frame: pd.DataFrame, title: str, *, facet: str, colour: str, unit: str) -> Any:
    """Error over the measured time, one panel for each `facet`; columns measured, simulated, `facet`, `colour`.

    The band is ±15%; errors beyond ±50% are drawn at the edge.
    """
    import altair as alt

    frame = frame.assign(error=(frame.simulated / frame.measured - 1).clip(-_EDGE, _EDGE))
    names = sorted(frame[colour].unique())
    hue = alt.Color(f"{colour}:N", title=None, scale=alt.Scale(domain=names, range=list(COLOURS[: len(names)])))
    y = alt.Y(
        "error:Q", title="rlsim / measured − 1", scale=alt.Scale(domain=[-_EDGE, _EDGE]), axis=alt.Axis(format="+.0%")
    )
    panels = []
    for name in dict.fromkeys(frame[facet]):
        rows = frame[frame[facet] == name]
        low, high = float(rows.measured.min()) / 1.2, float(rows.measured.max()) * 1.2
        decades = [10.0**e for e in range(-6, 9) if low <= 10.0**e <= high]
        axis = alt.Axis(format="~g", values=decades) if len(decades) > 1 else alt.Axis(format="~g", tickCount=4)
        scale = alt.Scale(type="log", domain=[low, high], nice=False)
        x = alt.X("measured:Q", title=f"measured ({unit})", scale=scale, axis=axis)
        ends = pd.DataFrame({"measured": [low, high], "error": [-0.15, -0.15], "upper": [0.15, 0.15]})
        band = alt.Chart(ends).mark_area(color=_GREY, opacity=0.25).encode(x=x, y=y, y2="upper:Q")
        dots = alt.Chart(rows).mark_circle(size=14, opacity=0.5).encode(x=x, y=y, color=hue)
        panels.append((band + dots).properties(width=280, height=170, title=str(name)))
    return _finished(alt.concat(*panels, columns=2), title, "grey: ±15%; errors beyond ±50% stand at the edge")


def _finished(chart: Any, title: str, subtitle: str = "") -> Any:
    import altair as alt

    text = alt.TitleParams(title, subtitle=subtitle, anchor="start", offset=12)
    return chart.properties(title=text).configure_view(stroke=None).configure_axis(gridOpacity=0.4)
