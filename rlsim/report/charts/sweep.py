"""A sweep: lines along one axis, heatmaps over two, dots where the points are no grid."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rlsim.formats import rate
from rlsim.report.charts.style import GRID, INK, WIDTH, data, finished, label_angle, legend
from rlsim.report.frames.sweep import RATE, SPEEDUP, is_number, labels, levels
from rlsim.report.palette import DASHES, DIVERGING, GREY, SERIES

TITLES = {SPEEDUP: "speedup in responses per second", RATE: "responses per second"}
_LOG = 10.0  # an axis whose values differ by more is drawn in log


def lines_chart(points: pd.DataFrame, axis: str, metric: str) -> Any:
    """One line per system along one axis (a number or names); intervals as bands where the speedup has them."""
    import altair as alt

    systems = list(dict.fromkeys(points["system"]))
    rows = points.assign(x=points[axis] if is_number(points[axis]) else labels(points[axis]), value=points[metric])
    shown = systems if len(systems) <= len(SERIES) else [*systems[: len(SERIES) - 1], "others"]
    rows["series"] = rows["system"].where(rows["system"].isin(shown), "others")
    colours = [*SERIES[: len(systems)]] if len(systems) <= len(SERIES) else [*SERIES[:-1], GREY]
    key = legend(shown)
    if is_number(points[axis]):
        low, high = float(rows["x"].min()), float(rows["x"].max())
        log = low > 0 and high / low >= _LOG
        values = sorted(set(rows["x"])) if rows["x"].nunique() <= 12 else None
        kind: dict[str, Any] = {"type": "log"} if log else {"zero": False}
        scale = alt.Scale(nice=False, padding=16, **kind)
        axis_look = alt.Axis(values=values or alt.Undefined, format=",~f", labelOverlap="greedy")
        x = alt.X("x:Q", title=axis, scale=scale, axis=axis_look)
    else:
        names = levels(points[axis])
        x = alt.X("x:N", title=axis, sort=names, axis=alt.Axis(labelAngle=label_angle(names, WIDTH - 80)))
    y = alt.Y("value:Q", title=TITLES[metric], scale=alt.Scale(zero=metric == RATE))
    colour = alt.Color("series:N", scale=alt.Scale(domain=shown, range=colours), legend=key)
    dash = alt.StrokeDash(
        "series:N", scale=alt.Scale(domain=shown, range=[list(d) for d in DASHES[: len(shown)]]), legend=key
    )
    kept = ["x", "value", "system", "series"]
    low_high = metric == SPEEDUP and {"speedup_low", "speedup_high"} <= set(rows)
    if low_high:
        rows = rows.assign(low=rows["speedup_low"], high=rows["speedup_high"])
        kept += ["low", "high"]
    base = alt.Chart(data(rows[kept])).encode(x=x, detail="system:N", color=colour)
    told = ["system:N", alt.Tooltip("x", title=axis), alt.Tooltip("value:Q", title=TITLES[metric], format=".3f")]
    line = base.mark_line(strokeWidth=2).encode(y=y, strokeDash=dash)
    dots = base.mark_circle(size=55, opacity=1).encode(y=y, tooltip=told)
    layers = [line, dots]
    if low_high and rows["low"].notna().any():
        band = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.2)
        layers.insert(0, band.encode(y="low:Q", y2="high:Q"))
    chart = alt.layer(*layers).properties(height=300)
    return finished(chart, description=f"{TITLES[metric]} along {axis}, one line per system")


def heatmap(points: pd.DataFrame, x_axis: str, y_axis: str, metric: str, text: str = "") -> Any:
    """The metric of one system at every point of a grid: number and colour; `text`: a column to write instead."""
    import altair as alt

    across, down = levels(points[x_axis]), levels(points[y_axis])
    shown = points[text].astype(str) if text else points[metric].map("{:.2f}".format if metric == SPEEDUP else rate)
    rows = pd.DataFrame(
        {"x": labels(points[x_axis]), "y": labels(points[y_axis]), "value": points[metric], "text": shown}
    )
    colour, dark = _colour(rows["value"], metric)
    each = min(max((WIDTH - 140) // len(across), 34), 110)
    widest = max(rows["text"].str.len()) * 7
    x = alt.X("x:N", sort=across, title=x_axis, axis=alt.Axis(labelAngle=label_angle(across, each * len(across))))
    y = alt.Y("y:N", sort=down[::-1] if is_number(points[y_axis]) else down, title=y_axis)
    base = alt.Chart(data(rows)).encode(x=x, y=y)
    cells = base.mark_rect(stroke=GRID).encode(
        color=colour,
        tooltip=[
            alt.Tooltip("x:N", title=x_axis),
            alt.Tooltip("y:N", title=y_axis),
            alt.Tooltip("value:Q", title=TITLES[metric], format=".3f"),
        ],
    )
    layers = [cells]
    if widest < each - 4:
        ink = alt.condition(dark, alt.value("#FFFFFF"), alt.value(INK)) if dark else alt.value(INK)
        layers.append(base.mark_text(fontSize=12).encode(text="text:N", color=ink))
    chart = alt.layer(*layers).properties(width=each * len(across), height=max(30 * len(down), 60))
    return finished(chart, description=f"{TITLES[metric]} over {x_axis} and {y_axis}", fit=False)


def scatter(points: pd.DataFrame, x_axis: str, y_axis: str, metric: str) -> Any:
    """The metric of one system as the colour of a dot at every point: for random sweeps."""
    import altair as alt

    kinds = ["Q" if is_number(points[axis]) else "N" for axis in (x_axis, y_axis)]
    x, y = (points[axis] if is_number(points[axis]) else labels(points[axis]) for axis in (x_axis, y_axis))
    rows = points.assign(x=x, y=y, value=points[metric])[["x", "y", "value"]]
    colour, _ = _colour(rows["value"], metric)
    chart = (
        alt.Chart(data(rows))
        .mark_circle(size=90, opacity=1, stroke=INK, strokeWidth=0.4)
        .encode(
            x=alt.X(f"x:{kinds[0]}", title=x_axis, **_zero_free(kinds[0])),
            y=alt.Y(f"y:{kinds[1]}", title=y_axis, **_zero_free(kinds[1])),
            color=colour,
            tooltip=[
                alt.Tooltip("x", title=x_axis),
                alt.Tooltip("y", title=y_axis),
                alt.Tooltip("value:Q", title=TITLES[metric], format=".3f"),
            ],
        )
        .properties(height=340)
    )
    return finished(chart, description=f"{TITLES[metric]} at each point of {x_axis} and {y_axis}")


def _zero_free(kind: str) -> dict[str, Any]:
    import altair as alt

    return {"scale": alt.Scale(zero=False, padding=14)} if kind == "Q" else {}


def _colour(values: pd.Series[float], metric: str) -> tuple[Any, str]:
    """Colour of the metric, and the test that says where text must be white (empty: nowhere). Speedups diverge at 1."""
    import altair as alt

    if metric == SPEEDUP:
        far = max(float(values.max()), float((1 / values).max()), 1.05)
        marks = [round(far**power, 2) for power in (-1, -0.5, 0, 0.5, 1)]
        scale = alt.Scale(type="log", domain=[1 / far, 1, far], range=list(DIVERGING), interpolate="rgb")
        key = alt.Legend(title=TITLES[metric], orient="top", gradientLength=260, format=".2f", values=marks)
        return alt.Color("value:Q", scale=scale, legend=key), ""
    low, high = float(values.min()), float(values.max())
    scale = alt.Scale(domain=[low, high] if high > low else [low * 0.9, high * 1.1], range=["#EAF2F9", "#0B4A8A"])
    key = alt.Legend(title=TITLES[metric], orient="top", gradientLength=260, format=",.3~r")
    return alt.Color("value:Q", scale=scale, legend=key), f"datum.value > {low + 0.55 * (high - low):.6g}"
