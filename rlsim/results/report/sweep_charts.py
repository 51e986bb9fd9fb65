"""A sweep as charts: lines along one axis, heatmaps over two, dots where the points are no grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rlsim.base.formats import is_missing, rate
from rlsim.errors import ConfigError
from rlsim.results.comparison.verdict import judge
from rlsim.results.report.style import (
    DASHES,
    GREY,
    GRID,
    INK,
    SERIES,
    WIDTH,
    by_name,
    data,
    finished,
    label_angle,
    speedup_scale,
)

#: What a sweep is drawn in: the speedup where there are several systems, and throughput.
SPEEDUP, RATE = "speedup", "responses_per_s"
TITLES = {SPEEDUP: "speedup", RATE: "responses per second"}
_LOG = 10.0  # an axis whose values differ by more is drawn in log


class Slice(NamedTuple):
    """Points that differ in at most two axes."""

    axes: tuple[str, ...]  # one or two of them
    fixed: dict[str, Any]  # the other axes that vary in the sweep, and their values here
    points: pd.DataFrame


def varying(frame: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The axes that take more than one value. Raises `ConfigError` for an axis that is no column."""
    missing = [axis for axis in axes if axis not in frame]
    if missing:
        raise ConfigError(f"no column for the axes {', '.join(missing)}; there are {', '.join(map(str, frame))}")
    return [axis for axis in axes if frame[axis].map(_exact).nunique() > 1]


def cut(frame: pd.DataFrame, axes: Sequence[str]) -> Iterator[Slice]:
    """The sweep cut up: along its first two varying axes, once for each combination of the others."""
    shown, others = axes[:2], list(axes[2:])
    if not others:
        yield Slice(tuple(shown), {}, frame)
        return
    keys = [frame[axis].map(_exact) for axis in others]
    for _, points in frame.groupby(keys, sort=False):
        yield Slice(tuple(shown), {axis: points[axis].iloc[0] for axis in others}, points)


def is_grid(points: pd.DataFrame, axes: Sequence[str], most: int = 24) -> bool:
    """Whether two axes span a grid that is at least half full and small enough to write numbers into."""
    levels = [points[axis].map(_exact).nunique() for axis in axes]
    there = len(points[list(axes)].map(_exact).drop_duplicates())
    return max(levels) <= most and 2 * there >= levels[0] * levels[1]


def best_systems(points: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """At every point the system with the best ratio: axes, system, speedup, responses per second, comparable."""
    keys = [points[axis].map(_exact).rename(f"key {i}") for i, axis in enumerate(axes)]
    found = []
    for _, rows in points.groupby(keys, sort=False) if keys else [((), points)]:
        best = judge(rows, "").rows[0]
        found.append(rows[rows["system"] == best.system].assign(comparable=not best.why))
    names = [*axes, "system", *(c for c in (SPEEDUP, RATE) if c in points), "comparable"]
    return pd.concat(found)[names].sort_index()


def is_number(values: pd.Series[Any]) -> bool:
    """Whether an axis holds numbers only (true, false and none are names)."""
    found = values.tolist()
    return all(isinstance(value, Real) and not isinstance(value, bool) and not is_missing(value) for value in found)


def levels(values: pd.Series[Any]) -> list[str]:
    """An axis' values as labels: numbers in ascending order, names as they come."""
    unique = list(dict(zip(labels(values), values.tolist(), strict=True)).items())
    if is_number(values):
        unique.sort(key=lambda item: item[1])
    return [text for text, _ in unique]


def labels(values: pd.Series[Any]) -> pd.Series[str]:
    """An axis' values as they are written on it: in full where they could not be told apart otherwise."""
    short, exact = values.map(label), values.map(_exact)
    return short if short.nunique() == exact.nunique() else exact


def _exact(value: Any) -> str:
    """Tells a value from all others, however close."""
    return repr(float(value)) if isinstance(value, Real) and not is_missing(value) else label(value)


def label(value: Any) -> str:
    """An axis' value as it is written in text; a missing one (NaN in a column of numbers) is `none`."""
    if is_missing(value):
        return "none"
    if isinstance(value, bool | np.bool):
        return str(value).lower()
    if isinstance(value, Real):
        return f"{int(float(value)):,}" if float(value).is_integer() else f"{float(value):.4g}"
    return str(value)


def lines_chart(points: pd.DataFrame, axis: str, metric: str) -> Any:
    """One line per system along one axis (a number or names); intervals as bands where the speedup has them."""
    systems = list(dict.fromkeys(points["system"]))
    rows = points.assign(x=points[axis] if is_number(points[axis]) else labels(points[axis]), value=points[metric])
    shown, colours = systems, SERIES
    if len(systems) > len(SERIES):
        shown, colours = [*systems[: len(SERIES) - 1], "others"], (*SERIES[:-1], GREY)
    rows["series"] = rows["system"].where(rows["system"].isin(shown), "others")
    y = alt.Y("value:Q", title=TITLES[metric], scale=alt.Scale(zero=metric == RATE))
    colour = by_name(alt.Color, "series", dict(zip(shown, colours, strict=False)))
    dash = by_name(alt.StrokeDash, "series", dict(zip(shown, map(list, DASHES), strict=False)))
    kept = ["x", "value", "system", "series"]
    low_high = metric == SPEEDUP and {"speedup_low", "speedup_high"} <= set(rows)
    if low_high:
        rows = rows.assign(low=rows["speedup_low"], high=rows["speedup_high"])
        kept += ["low", "high"]
    base = alt.Chart(data(rows[kept])).encode(x=_along(points[axis], axis), detail="system:N", color=colour)
    told = ["system:N", alt.Tooltip("x", title=axis), _value(metric)]
    line = base.mark_line(strokeWidth=2).encode(y=y, strokeDash=dash)
    dots = base.mark_circle(size=55, opacity=1).encode(y=y, tooltip=told)
    layers = [line, dots]
    if low_high and rows["low"].notna().any():
        band = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.2)
        layers.insert(0, band.encode(y="low:Q", y2="high:Q"))
    chart = alt.layer(*layers).properties(height=300)
    return finished(chart, description=f"{TITLES[metric]} along {axis}, one line per system")


def _along(values: pd.Series[Any], axis: str) -> Any:
    """The axis of lines: numbers in log if they are far apart, or names."""
    if not is_number(values):
        names = levels(values)
        return alt.X("x:N", title=axis, sort=names, axis=alt.Axis(labelAngle=label_angle(names, WIDTH - 80)))
    low, high = float(values.min()), float(values.max())
    kind: dict[str, Any] = {"type": "log"} if low > 0 and high / low >= _LOG else {"zero": False}
    ticks = sorted(set(values)) if values.nunique() <= 12 else alt.Undefined
    look = alt.Axis(values=ticks, format=",~f", labelOverlap="greedy")
    return alt.X("x:Q", title=axis, scale=alt.Scale(nice=False, padding=16, **kind), axis=look)


def _value(metric: str) -> Any:
    return alt.Tooltip("value:Q", title=TITLES[metric], format=".3f")


def heatmap(points: pd.DataFrame, x_axis: str, y_axis: str, metric: str, text: str = "") -> Any:
    """The metric of one system at every point of a grid: number and colour; `text`: a column to write instead."""
    across, down = levels(points[x_axis]), levels(points[y_axis])
    shown = points[text].astype(str) if text else points[metric].map("{:.2f}".format if metric == SPEEDUP else rate)
    rows = pd.DataFrame(
        {"x": labels(points[x_axis]), "y": labels(points[y_axis]), "value": points[metric], "text": shown}
    )
    colour, dark = _colour(rows["value"], metric)
    each = min(max((WIDTH - 140) // len(across), 34), 110)
    x = alt.X("x:N", sort=across, title=x_axis, axis=alt.Axis(labelAngle=label_angle(across, each * len(across))))
    y = alt.Y("y:N", sort=down[::-1] if is_number(points[y_axis]) else down, title=y_axis)
    base = alt.Chart(data(rows)).encode(x=x, y=y)
    told = [alt.Tooltip("x:N", title=x_axis), alt.Tooltip("y:N", title=y_axis), _value(metric)]
    layers = [base.mark_rect(stroke=GRID).encode(color=colour, tooltip=told)]
    if max(rows["text"].str.len()) * 7 < each - 4:
        ink = alt.condition(dark, alt.value("#FFFFFF"), alt.value(INK)) if dark else alt.value(INK)
        layers.append(base.mark_text(fontSize=12).encode(text="text:N", color=ink))
    chart = alt.layer(*layers).properties(width=each * len(across), height=max(30 * len(down), 60))
    return finished(chart, description=f"{TITLES[metric]} over {x_axis} and {y_axis}", fit=False)


def scatter(points: pd.DataFrame, x_axis: str, y_axis: str, metric: str) -> Any:
    """The metric of one system as the colour of a dot at every point: for random sweeps."""
    rows = pd.DataFrame({"value": points[metric]})
    encoding = {}
    for name, axis, channel in (("x", x_axis, alt.X), ("y", y_axis, alt.Y)):
        if is_number(points[axis]):
            rows[name] = points[axis]
            encoding[name] = channel(f"{name}:Q", title=axis, scale=alt.Scale(zero=False, padding=14))
        else:
            rows[name] = labels(points[axis])
            encoding[name] = channel(f"{name}:N", title=axis)
    told = [alt.Tooltip("x", title=x_axis), alt.Tooltip("y", title=y_axis), _value(metric)]
    dots = alt.Chart(data(rows[["x", "y", "value"]])).mark_circle(size=90, opacity=1, stroke=INK, strokeWidth=0.4)
    chart = dots.encode(**encoding, color=_colour(rows["value"], metric)[0], tooltip=told).properties(height=340)
    return finished(chart, description=f"{TITLES[metric]} at each point of {x_axis} and {y_axis}")


def _colour(values: pd.Series[float], metric: str) -> tuple[Any, str]:
    """Colour of the metric, and the test that says where text must be white (empty: nowhere)."""
    look: dict[str, Any]
    if metric == SPEEDUP:
        scale, far = speedup_scale(values)
        dark, look = "", {"format": ".2f", "values": [round(far**power, 2) for power in (-1, -0.5, 0, 0.5, 1)]}
    else:
        low, high = float(values.min()), float(values.max())
        scale = alt.Scale(domain=[low, high] if high > low else [low * 0.9, high * 1.1], range=["#EAF2F9", "#0B4A8A"])
        dark, look = f"datum.value > {low + 0.55 * (high - low):.6g}", {"format": ",.3~r"}
    key = alt.Legend(title=TITLES[metric], orient="top", gradientLength=260, **look)
    return alt.Color("value:Q", scale=scale, legend=key), dark
