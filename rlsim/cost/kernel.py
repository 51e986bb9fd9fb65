"""One form for every kernel: `launch + roofline(work) · table(shape)`.

The *work* of a shape is what it asks of the data sheet's rates (`Work.resources`: seconds at the peak of each, of which
the slowest nearly hides the others) and what comes on top of that (`Work.added`: rows, sequences, bytes that are moved
before or after). Few constants make a roofline of it: the share of each rate that the kernel reaches, and seconds for
each unit of what comes on top. What these leave over is a *table* over a few axes of the shape, multilinear in
logarithms, constant beyond its edges. The launch of an empty kernel stands apart from both, as it hangs on the engine
more than on the GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlsim.cost.fits import Correction, KernelFit
from rlsim.errors import CalibrationError

# Tables ---------------------------------------------------------------------------------------------------------------


class Surface:
    """`Correction` ready for look-ups by the coordinates `names`, in that order.

    Raises `CalibrationError` if the correction has other axes.
    """

    def __init__(self, correction: Correction, names: Sequence[str]) -> None:
        if [*correction.axes] != [*names]:
            raise CalibrationError(f"a correction over {', '.join(correction.axes)}; expected {', '.join(names)}")
        self._axes, self._values = correction.logarithms

    def sliced(self, *coordinates: float) -> Surface:
        """The factor over the first axes alone, at these coordinates of the last ones."""
        x = [log(value) for value in coordinates]
        first, cut = len(self._axes) - len(x), copy(self)
        cut._axes, cut._values = self._axes[:first], _sliced(self._values, self._axes[first:], x, first)
        return cut

    def __call__(self, *coordinates: float) -> float:
        """The factor there; beyond an axis' knots, that at its end."""
        return exp(_at(self._axes, self._values, [log(x) for x in coordinates], 0))


def _sliced(values: list[Any], axes: list[list[float]], x: list[float], depth: int) -> list[Any]:
    if depth == 1:
        return [_at(axes, value, x, 0) for value in values]
    return [_sliced(value, axes, x, depth - 1) for value in values]


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


# Kernels --------------------------------------------------------------------------------------------------------------


Numbers = float | npt.NDArray[np.float64]


class Work(NamedTuple):
    """What a shape, or an array of shapes, asks of a GPU."""

    #: Seconds at the peak of each rate of the data sheet: `compute`, `memory`, …
    resources: Mapping[str, Numbers]
    #: Units of work that take their time beside that.
    added: Mapping[str, Numbers] = {}


def roofline_s(fit: KernelFit, work: Work) -> Numbers:
    """Seconds of the resources at the share of its rate that the kernel reaches of each, and of what comes on top."""
    total: Numbers = 0.0
    for name, peak_s in work.resources.items():
        total = total + (peak_s / fit.efficiency[name]) ** fit.blend
    return total ** (1.0 / fit.blend) + sum(
        (fit.added_s[name] * amount for name, amount in work.added.items()), start=0.0
    )


class Kernel:
    """A fitted kernel, ready for look-ups; `axes` are those of its table, in order.

    Raises `CalibrationError` for a table over other axes.
    """

    def __init__(self, fit: KernelFit, axes: Sequence[str]) -> None:
        self.fit = fit
        self.surface = None if fit.table is None else Surface(fit.table, axes)

    def at(self, *coordinates: float) -> Kernel:
        """With a table over the first axes alone, at these coordinates of the last ones."""
        cut = copy(self)
        cut.surface = self.surface and self.surface.sliced(*coordinates)
        return cut

    def roofline_s(self, work: Work) -> float:
        """Seconds of this work, launch and table aside."""
        total, blend = 0.0, self.fit.blend
        for name, share in self.fit.efficiency.items():
            total += float(work.resources[name] / share) ** blend
        total = float(total ** (1.0 / blend))
        for name, unit_s in self.fit.added_s.items():
            total += unit_s * float(work.added[name])
        return total

    def time_s(self, work: Work, *shape: float) -> float:
        """Seconds of one launch with this work; `shape` are the coordinates of the table's axes."""
        factor = 1.0 if self.surface is None else self.surface(*shape)
        return self.fit.launch_s + self.roofline_s(work) * factor
