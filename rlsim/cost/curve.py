"""The time of decode steps in closed form.

While nothing joins or leaves a replica, every step adds one token to each of its b sequences, so the context
total T grows by b a step. With a step time piecewise linear in T, the time of n steps is a sum of arithmetic
series, and how many steps fit into a time is a quadratic equation per segment. The sums equal stepping one token at a
time to rounding; what approximates is a curve (`times`, and `over_all` of equal contexts in chunks).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import lt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Two moments that differ by this share of the time between them are one moment (rounding of sums, nothing physical).
REACHED = 1e-9


class DecodeCurve:
    """Step time of `batch` sequences as a piecewise-linear function of T, the sum of their context tokens.

    `context_tokens` are the knots (ascending, at least one), `step_s` the step times there. Beyond the first and last
    knot the outermost segments continue. `furthest_tokens` is the largest T that `steps_s` was asked about.
    Raises `ValueError` for unsorted knots or lengths that differ.
    """

    __slots__ = ("_knots", "_slopes", "_values", "batch", "furthest_tokens")

    def __init__(self, batch: int, context_tokens: Sequence[float], step_s: Sequence[float]) -> None:
        knots, values = list(map(float, context_tokens)), list(map(float, step_s))
        if not knots or len(knots) != len(values) or not all(map(lt, knots, knots[1:])):
            raise ValueError("a decode curve needs ascending knots and one step time for each")
        self.batch = batch
        self.furthest_tokens = 0.0
        self._knots = knots
        self._values = values
        rise = [(y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in zip(knots, knots[1:], values, values[1:], strict=False)]
        self._slopes = [*rise, rise[-1]] if rise else [0.0]

    @property
    def knots(self) -> list[float]:
        """The context totals at which the slope changes, in tokens."""
        return list(self._knots)

    def mapped(self, scale: float, more_s: float) -> DecodeCurve:
        """The curve of steps that take `scale` times as long, and `more_s` more."""
        return DecodeCurve(self.batch, self._knots, [value * scale + more_s for value in self._values])

    def stretched(self, factor: float, batch: int) -> DecodeCurve:
        """The curve of `batch` sequences of which these are one of `factor` equal shares."""
        return DecodeCurve(batch, [knot * factor for knot in self._knots], self._values)

    def step_s(self, context_tokens: float) -> float:
        """Seconds of one step that starts with `context_tokens` in the cache."""
        i = max(bisect_right(self._knots, context_tokens) - 1, 0)
        return self._values[i] + self._slopes[i] * (context_tokens - self._knots[i])

    def each_s(self, context_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """`step_s` of each."""
        i = np.maximum(np.searchsorted(self._knots, context_tokens, "right") - 1, 0)
        knots, values, slopes = np.array((self._knots, self._values, self._slopes))[:, i]
        return np.asarray(values + slopes * (context_tokens - knots))

    def steps_s(self, context_tokens: float, steps: int) -> float:
        """Seconds of `steps` steps, the first with `context_tokens` in the cache, each adding `batch` tokens."""
        knots = self._knots
        growth = self.batch
        end = context_tokens + growth * (steps - 1)
        if end > self.furthest_tokens:
            self.furthest_tokens = end
        i = bisect_right(knots, context_tokens) - 1
        if i < 0:
            i = 0
        last = len(knots) - 1
        total = 0.0
        while True:
            slope = self._slopes[i]
            first = self._values[i] + slope * (context_tokens - knots[i])
            if i == last or end < knots[i + 1]:
                return total + steps * (first + 0.5 * slope * growth * (steps - 1))
            n = math.ceil((knots[i + 1] - context_tokens) / growth)
            total += n * (first + 0.5 * slope * growth * (n - 1))
            context_tokens += n * growth
            steps -= n
            if steps <= 0:
                return total
            i += 1
            while i < last and context_tokens >= knots[i + 1]:
                i += 1

    def steps_within(self, context_tokens: float, time_s: float) -> int:
        """The fewest steps that take at least `time_s` (0 for a time of zero).

        A sum that misses `time_s` by rounding (1e-9 relative) counts as reaching it. Never more than 2**62 steps.
        """
        if time_s <= 0.0:
            return 0
        furthest = self.furthest_tokens  # the search goes beyond what is asked for
        low, low_s, high, high_s = 0, 0.0, 1, self.steps_s(context_tokens, 1)
        while high_s * (1 + REACHED) < time_s:  # then as many as it would be at the pace so far
            low, low_s = high, high_s
            high = max(2 * low, math.ceil(low / low_s * time_s) if low_s > 0 else 0)
            if high > 2**62:
                raise ValueError("the curve's step time is not positive")
            high_s = self.steps_s(context_tokens, high)
        turn = 0
        while high - low > 1:  # where a straight line between the two reaches it, each fourth time in their middle
            turn += 1
            share = (time_s - low_s) / (high_s - low_s) if turn % 4 else 0.5
            middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
            middle_s = self.steps_s(context_tokens, middle)
            if middle_s * (1 + REACHED) < time_s:
                low, low_s = middle, middle_s
            else:
                high, high_s = middle, middle_s
        self.furthest_tokens = furthest
        return high

    def steps_done(self, context_tokens: float, time_s: float) -> int:
        """The most steps that are complete after `time_s` (up to rounding, as in `steps_within`)."""
        steps = self.steps_within(context_tokens, time_s)
        return steps if steps == 0 or self.steps_s(context_tokens, steps) <= time_s * (1 + REACHED) else steps - 1


class InWindows(NamedTuple):
    """How many of the batch's T context tokens lie in the sequences' windows: `base_tokens + share · T`.

    That holds until the next sequence outgrows its window, or enters another chunk: as many tokens then enter windows
    in each step.
    """

    base_tokens: float
    share: float

    def at(self, context_tokens: float) -> float:
        """The tokens in windows where the batch has so many context tokens."""
        return self.base_tokens + self.share * context_tokens

    def of(self, part: float) -> InWindows:
        """The same of such a part of the batch, with its part of T."""
        return InWindows(self.base_tokens * part, self.share)


_BEYOND_TOKENS = 1e6  # where a knot is put beyond the last one, to keep the slope there


def read_of_equal(context_tokens: float, batch: int, window_tokens: int, chunked: bool) -> float:
    """What `batch` sequences of equal contexts read in windows; beyond the first of chunks the mean of a chunk."""
    full = batch * window_tokens
    return context_tokens if context_tokens <= full else batch * (window_tokens + 1) / 2 if chunked else full


def over_all(
    curve: DecodeCurve, window_tokens: int, in_windows: InWindows | None, chunked: bool = False
) -> DecodeCurve:
    """`curve`, over the sum of the tokens in windows, as one over T; `None` stands for equal contexts."""
    batch = curve.batch
    if in_windows is None:
        full = float(batch * window_tokens)
        knots = [*(knot for knot in curve.knots if knot < full), full]
        last_s = curve.step_s(read_of_equal(full + 1, batch, window_tokens, chunked))
        beyond = [full + 1.0, full + 2.0] if chunked else [full + 1.0]  # from where on it is flat
        return DecodeCurve(batch, [*knots, *beyond], [*map(curve.step_s, knots), *(last_s for _ in beyond)])
    base, share = in_windows
    if not share:
        return DecodeCurve(batch, [0.0], [curve.step_s(base)])
    knots = [*curve.knots, curve.knots[-1] + _BEYOND_TOKENS]
    return DecodeCurve(batch, [(knot - base) / share for knot in knots], list(map(curve.step_s, knots)))


def times(curve: DecodeCurve, factor: Callable[[float], float], knots: Sequence[float]) -> DecodeCurve:
    """`curve` times `factor(T)` at its knots and at these, linear in between; for context totals of zero and more.

    `factor` stays what it is beyond the outermost of `knots`.
    """
    at = sorted({0.0, *knots, *(knot for knot in curve.knots if knot > 0.0)})
    at.append(at[-1] + _BEYOND_TOKENS)
    return DecodeCurve(curve.batch, at, [curve.step_s(knot) * factor(knot) for knot in at])


def at_least(curve: DecodeCurve, floor_s: float) -> DecodeCurve:
    """`curve` where it takes longer than `floor_s`, else `floor_s`; for context totals of zero and more."""
    return longer(curve, DecodeCurve(curve.batch, [0.0], [floor_s]))


def longer(one: DecodeCurve, other: DecodeCurve, pick: Callable[[float, float], float] = max) -> DecodeCurve:
    """The longer step time of two curves of the same batch everywhere, or the shorter with `pick` min; for context
    totals of zero and more."""
    knots = sorted({0.0, *one.knots, *other.knots})
    knots.append(knots[-1] + _BEYOND_TOKENS)
    turns = []
    for i, (left, right) in enumerate(pairwise(knots)):
        ahead_s = other.step_s(left) - one.step_s(left)
        slope = (one.step_s(right) - one.step_s(left) - other.step_s(right) + other.step_s(left)) / (right - left)
        if slope:
            turn = left + ahead_s / slope
            if left < turn and (turn < right or i == len(knots) - 2):  # the last segment has no end
                turns.append(turn)
    knots = sorted({*knots, *turns})
    knots.append(knots[-1] + _BEYOND_TOKENS)
    return DecodeCurve(one.batch, knots, [pick(one.step_s(knot), other.step_s(knot)) for knot in knots])


def sum_of(curves: Sequence[tuple[float, DecodeCurve]], fixed_s: float) -> DecodeCurve:
    """`fixed_s` and so many times each curve, all of the same batch."""
    knots = sorted({knot for _, curve in curves for knot in curve.knots})
    if len(curves) > 1:
        knots.append(knots[-1] + _BEYOND_TOKENS)
    times = [fixed_s + sum([count * curve.step_s(knot) for count, curve in curves]) for knot in knots]
    return DecodeCurve(curves[0][1].batch, knots, times)


class Curves(dict[int, DecodeCurve]):
    """The decode curves of a step cost by batch size, each made when it is first asked for; of those of unequal
    contexts in windows (`at`) each size's last one is kept."""

    def __init__(self, make: Callable[[int, InWindows | None], DecodeCurve]) -> None:
        super().__init__()
        self._make = make
        self._unequal: dict[int, tuple[InWindows, DecodeCurve]] = {}

    def __missing__(self, batch: int) -> DecodeCurve:
        curve = self[batch] = self._make(batch, None)
        return curve

    def at(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        """The curve of `batch` sequences."""
        if in_windows is None:
            return self[batch]
        last = self._unequal.get(batch)
        if last is not None and last[0] == in_windows:
            return last[1]
        curve = self._make(batch, in_windows)
        if last is not None:
            curve.furthest_tokens = last[1].furthest_tokens
        self._unequal[batch] = in_windows, curve
        return curve

    def used(self) -> Iterator[tuple[int, float]]:
        """Batch sizes, and the largest T that each was asked about; not those that were only looked at."""
        for batch in self.keys() | self._unequal.keys():
            found = [self[batch]] if batch in self else []
            found += [self._unequal[batch][1]] if batch in self._unequal else []
            if furthest := max(curve.furthest_tokens for curve in found):
                yield batch, furthest

    def pass_on(self, decode: Callable[[int], DecodeCurve], size: Callable[[int], int] = int) -> None:
        """Tell the curves that these are made of how far they were followed: `size` sequences for each batch size."""
        for batch, furthest in self.used():
            inner = decode(size(batch))
            inner.furthest_tokens = max(inner.furthest_tokens, furthest * inner.batch / batch)
