"""A fitted factor over a few axes: what a formula's constants leave over."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log
from typing import Any

from rlsim.cost.fits import Correction
from rlsim.errors import CalibrationError


class Surface:
    """`Correction` ready for look-ups by the coordinates `names`, in that order.

    Raises `CalibrationError` if the correction has other axes.
    """

    def __init__(self, correction: Correction, names: Sequence[str]) -> None:
        found = [axis.name for axis in correction.axes]
        if found != list(names):
            raise CalibrationError(f"a correction over {', '.join(found)}; expected {', '.join(names)}")
        self._axes, self._values = correction.logarithms

    def sliced(self, *coordinates: float) -> Surface:
        """The factor over the first axes alone, at these coordinates of the last ones."""
        x = [log(value) for value in coordinates]
        first = len(self._axes) - len(x)
        cut = Surface.__new__(Surface)
        cut._axes = self._axes[:first]
        cut._values = _sliced(self._values, self._axes[first:], x, first)
        return cut

    def along(self, coordinate: float) -> Surface:
        """The factor over the other axes, at this coordinate of the first one."""
        knots, values, at = self._axes[0], self._values, log(coordinate)
        cut = Surface.__new__(Surface)
        cut._axes = self._axes[1:]
        if at <= knots[0]:
            cut._values = values[0]
        elif at >= knots[-1]:
            cut._values = values[-1]
        else:
            i = bisect_right(knots, at) - 1
            cut._values = _between(values[i], values[i + 1], (at - knots[i]) / (knots[i + 1] - knots[i]))
        return cut

    def at_knots(self) -> list[float]:
        """The factor at every knot of the one axis that is left."""
        return [exp(value) for value in self._values]

    def __call__(self, *coordinates: float) -> float:
        """The factor there; beyond an axis' knots, that at its end."""
        if len(coordinates) == 1:  # what most look-ups come to, written out
            (knots,), values, at = self._axes, self._values, log(coordinates[0])
            if at <= knots[0]:
                return exp(values[0])
            if at >= knots[-1]:
                return exp(values[-1])
            i = bisect_right(knots, at) - 1
            low = values[i]
            return exp(low + (values[i + 1] - low) * ((at - knots[i]) / (knots[i + 1] - knots[i])))
        return exp(_at(self._axes, self._values, [log(x) for x in coordinates], 0))


def _sliced(values: list[Any], axes: list[list[float]], x: list[float], depth: int) -> list[Any]:
    if depth == 1:
        return [_at(axes, value, x, 0) for value in values]
    return [_sliced(value, axes, x, depth - 1) for value in values]


def _between(low: list[Any], high: list[Any], share: float) -> list[Any]:
    return [
        _between(a, b, share) if isinstance(a, list) else a + (b - a) * share for a, b in zip(low, high, strict=True)
    ]


def _at(axes: list[list[float]], values: list[Any], x: list[float], axis: int) -> float:
    knots, at, last = axes[axis], x[axis], axis + 1 == len(axes)
    if at <= knots[0]:
        return values[0] if last else _at(axes, values[0], x, axis + 1)
    if at >= knots[-1]:
        return values[-1] if last else _at(axes, values[-1], x, axis + 1)
    i = bisect_right(knots, at) - 1
    share = (at - knots[i]) / (knots[i + 1] - knots[i])
    low, high = values[i], values[i + 1]
    if not last:
        low = _at(axes, low, x, axis + 1)
        if share == 0.0:
            return float(low)
        high = _at(axes, high, x, axis + 1)
    return float(low + (high - low) * share)


def surface_of(correction: Correction | None, names: Sequence[str]) -> Surface | None:
    """`Surface`, or None where there is no correction."""
    return None if correction is None else Surface(correction, names)
