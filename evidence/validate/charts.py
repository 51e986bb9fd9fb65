"""Charts of the validation page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import altair as alt
import pandas as pd

from evidence.validate.rows import Row

COLOURS = ("#1f5a94", "#e08a1e", "#3f8f4f", "#7b5aa6", "#8c6d4f", "#4fa6b8")
_GREY = "#9a9a9a"
_EDGE = 0.5
_WIDTH = 560


def errors_chart(rows: Iterable[Row]) -> Any:
    """One line for each row: its error as a dot, outputs and inputs in two colours."""
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


def lines_by_left(frame: pd.DataFrame) -> Any:
    """Step times and throughput by unfinished responses, measured and simulated, one column for each case.

    Columns case, quantity (step_s or throughput_tokens_per_s), left (in descending order of waiting), by, value.
    """
    order = list(dict.fromkeys(frame.left))
    rows = []
    for quantity, title, factor in (("step_s", "step (ms)", 1e3), ("throughput_tokens_per_s", "tokens per s", 1.0)):
        panels = []
        for case in dict.fromkeys(frame.case):
            own = frame[(frame.case == case) & (frame.quantity == quantity)]
            own = own.assign(value=own.value * factor)
            x = alt.X(
                "left:N",
                sort=order[::-1],
                title="responses left",
                axis=alt.Axis(labelAngle=0, labelExpr="replace(datum.label, ' left', '')"),
            )
            y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=True))
            names, colours = ["measured", "rlsim"], [COLOURS[0], COLOURS[1]]
            hue = alt.Color("by:N", title=None, scale=alt.Scale(domain=names, range=colours))
            dash = alt.StrokeDash("by:N", title=None, scale=alt.Scale(domain=names, range=[[1, 0], [5, 3]]))
            line = alt.Chart(own).mark_line(point=True).encode(x=x, y=y, color=hue, strokeDash=dash)
            panels.append(line.properties(width=230, height=150, title=str(case)))
        rows.append(alt.hconcat(*panels))
    return _finished(alt.vconcat(*rows), "Real rollouts: measured and simulated")


def _finished(chart: Any, title: str, subtitle: str = "") -> Any:
    text = alt.TitleParams(title, subtitle=subtitle, anchor="start", offset=12)
    return chart.properties(title=text).configure_view(stroke=None).configure_axis(gridOpacity=0.4)
