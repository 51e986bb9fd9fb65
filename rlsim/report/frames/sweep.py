"""A sweep as charts need it: one row per point and system, axes as columns, cut into slices of at most two axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rlsim.errors import ConfigError
from rlsim.report.choice import ranked

#: What a sweep is drawn in: the speedup where there are several systems, and throughput.
SPEEDUP, RATE = "speedup", "responses_per_s"


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
    """At every point the fastest system (`rlsim.report.choice.ranked`): axes, system, speedup, responses per second."""
    keys = [points[axis].map(_exact).rename(f"key {i}") for i, axis in enumerate(axes)]
    order = ranked(points)
    best = order.groupby(keys, sort=False).head(1) if keys else order.head(1)
    return points.loc[points.index.isin(best.index), [*axes, "system", *(c for c in (SPEEDUP, RATE) if c in points)]]


def is_number(values: pd.Series[Any]) -> bool:
    """Whether an axis holds numbers only (true, false and none are names)."""
    return all(isinstance(value, Real) and not isinstance(value, bool) and value == value for value in values.tolist())


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
    return repr(float(value)) if isinstance(value, Real) and value == value else label(value)


def label(value: Any) -> str:
    """An axis' value as it is written in text; a missing one (NaN in a column of numbers) is `none`."""
    if value is None or value != value:
        return "none"
    if isinstance(value, bool | np.bool):
        return str(value).lower()
    if isinstance(value, Real):
        return f"{int(float(value)):,}" if float(value).is_integer() else f"{float(value):.4g}"
    return str(value)
