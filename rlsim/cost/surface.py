"""A fitted factor over a few axes: what a formula's constants leave over."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log
from typing import Any

from rlsim.cost.calibration import Correction
from rlsim.errors import CalibrationError


class Surface:
    """`Correction` ready for look-ups by the coordinates `names`, in that order.

    Raises `CalibrationError` if the correction has other axes.
    """

    def __init__(self, correction: Correction, names: Sequence[str]) -> None:
        if tuple(correction.axes) != tuple(names):
            raise CalibrationError(f"a correction over {', '.join(correction.axes)}; expected {', '.join(names)}")
        self._axes = [[log(knot) for knot in knots] for knots in correction.axes.values()]
        values: list[Any] = [log(factor) for factor in correction.factor]
        for knots in reversed(self._axes[1:]):
            values = [values[i : i + len(knots)] for i in range(0, len(values), len(knots))]
        self._values = values

    def __call__(self, *coordinates: float) -> float:
        """The factor there; beyond an axis' knots, that at its end."""
        return exp(_at(self._axes, self._values, [log(x) for x in coordinates], 0))


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
