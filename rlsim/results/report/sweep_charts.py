"""A sweep as charts: lines along one axis, heatmaps over two, dots where the points are no grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rlsim.base.formats import is_missing, rate
from rlsim.errors import ConfigError
from rlsim.results.comparison.verdict import judge
from rlsim.results.report.style import DASHES, DIVERGING, GREY, SERIES, WIDTH, chart, label_angle

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
    """One line per system along one axis (a number or names), with intervals where the speedup has them."""
    systems = list(dict.fromkeys(points["system"]))
    numbers = is_number(points[axis])
    frame = points.assign(x=points[axis] if numbers else labels(points[axis]), value=points[metric])
    shown, colours = systems, SERIES
    if len(systems) > len(SERIES):
        shown, colours = [*systems[: len(SERIES) - 1], "others"], (*SERIES[:-1], GREY)
    frame["series"] = frame["system"].where(frame["system"].isin(shown), "others")
    kept = ["x", "value", "system", "series"]
    if metric == SPEEDUP and {"speedup_low", "speedup_high"} <= set(frame):
        frame = frame.assign(low=frame["speedup_low"], high=frame["speedup_high"])
        kept += ["low", "high"]
    return chart(
        "sweep-lines",
        frame=frame[kept],
        along=_along(points[axis], axis),
        colours=dict(zip(shown, colours, strict=False)),
        dashes=dict(zip(shown, map(list, DASHES), strict=False)),
        kinds=_kinds(x=numbers),
        axis=axis,
        title=TITLES[metric],
        speedup=metric == SPEEDUP,
    )


def _along(values: pd.Series[Any], axis: str) -> dict[str, Any]:
    """The axis of lines: numbers in log if they are far apart, or names."""
    if not is_number(values):
        names = levels(values)
        angle = label_angle(names, WIDTH - 80)
        return {"field": "x", "type": "nominal", "title": axis, "sort": names, "axis": {"labelAngle": angle}}
    low, high = float(values.min()), float(values.max())
    kind: dict[str, Any] = {"type": "log"} if low > 0 and high / low >= _LOG else {"zero": False}
    ticks = {"values": sorted(set(values))} if values.nunique() <= 12 else {}
    look = {**ticks, "format": ",~f", "labelOverlap": "greedy"}
    return {"field": "x", "type": "quantitative", "title": axis, "axis": look,
            "scale": {"nice": False, "padding": 16, **kind}}  # fmt: skip


def map_chart(points: pd.DataFrame, axes: Sequence[str], metric: str, text: str = "", *, grid: bool = True) -> Any:
    """The metric of one system at every point: number and colour of the cells of a grid, or the colours of dots.

    `text`: a column to write into the cells instead.
    """
    numbers = {name: is_number(points[axis]) for name, axis in zip("xy", axes, strict=True)}
    frame = pd.DataFrame({"value": points[metric]})
    for name, axis in zip("xy", axes, strict=True):
        frame[name] = points[axis] if numbers[name] and not grid else labels(points[axis])
    frame["text"] = (
        points[text].astype(str) if text else points[metric].map("{:.2f}".format if metric == SPEEDUP else rate)
    )
    colour, dark = _colour(frame["value"], metric)
    across, down = (levels(points[axis]) for axis in axes)
    return chart(
        "sweep-grid" if grid else "sweep-dots",
        frame=frame[["x", "y", "value", *(["text"] if grid else [])]],
        colour=colour,
        dark=dark,
        across=across,
        down=down[::-1] if numbers["y"] else down,
        each=min(max((WIDTH - 140) // len(across), 34), 110),
        kinds=_kinds(**numbers),
        x_axis=axes[0],
        y_axis=axes[1],
        title=TITLES[metric],
    )


def _kinds(**numbers: bool) -> SimpleNamespace:
    """The types of axes, of which some hold numbers."""
    return SimpleNamespace(**{name: "quantitative" if own else "nominal" for name, own in numbers.items()})


def _colour(values: pd.Series[float], metric: str) -> tuple[dict[str, Any], str]:
    """Colour of the metric, which diverges at a speedup of 1, and the test that says where text must be white."""
    low, high = float(values.min()), float(values.max())
    if metric == SPEEDUP:
        far = max(high, float((1 / values).max()), 1.05)
        scale = {"type": "log", "domain": [1 / far, 1, far], "range": [*DIVERGING], "interpolate": "rgb"}
        dark, look = "", {"format": ".2f", "values": [round(far**power, 2) for power in (-1, -0.5, 0, 0.5, 1)]}
    else:
        scale = {"domain": [low, high] if high > low else [low * 0.9, high * 1.1], "range": ["#EAF2F9", "#0B4A8A"]}
        dark, look = f"datum.value > {low + 0.55 * (high - low):.6g}", {"format": ",.3~r"}
    key = {"title": TITLES[metric], "orient": "top", "gradientLength": 260, **look}
    return {"field": "value", "type": "quantitative", "scale": scale, "legend": key}, dark
