"""A replica's iterations from whole steps at a few shapes: the offline profile of PAT (adaptive tensor parallelism)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlsim.base.refusals import refuse
from rlsim.cost.curve import DecodeCurve, InWindows
from rlsim.cost.step import Chunk, StepCost
from rlsim.errors import CalibrationError


def _segment(knots: Sequence[float], x: float) -> tuple[int, float]:
    """The knot left of `x` and the share of the way to the next; outside, the edge segment continues."""
    if len(knots) == 1:
        return 0, 0.0
    i = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 2)
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])


class ProfileStep(StepCost):
    """Decode steps of a few batch sizes, piecewise linear in T each, linear in between along the batch size, as PAT
    does.

    `curves` are the decode curves at the profiled batch sizes (ascending). `prefill_s[i][j]` are the seconds of one
    prefill of `prefill_tokens[i]` new tokens of the equivalent length `prefill_lengths[j]` (`mixed_s`). Outside the
    profiled region the edge slope continues. All knots ascend.
    """

    def __init__(
        self,
        tp: int,
        curves: Sequence[DecodeCurve],
        prefill_tokens: Sequence[float],
        prefill_lengths: Sequence[float],
        prefill_s: Sequence[Sequence[float]],
        *,
        skew: float = 0.0,
    ) -> None:
        self.tp = tp
        self.skew = skew
        self._curves = {curve.batch: curve for curve in curves}
        self._batches = [float(curve.batch) for curve in curves]
        self._tokens = [float(x) for x in prefill_tokens]
        self._lengths = [float(x) for x in prefill_lengths]
        self._prefill = [[float(y) for y in row] for row in prefill_s]

    def scaled(self, factors: Sequence[float]) -> ProfileStep:
        """The profile whose decode steps take so many times as long at each profiled batch size, smallest first."""
        curves = [curve.mapped(by, 0.0) for curve, by in zip(self._curves.values(), factors, strict=False)]
        return ProfileStep(self.tp, curves, self._tokens, self._lengths, self._prefill, skew=self.skew)

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:  # noqa: ARG002
        """The profiled curve of `batch`, or the blend of its neighbours at the same sum of contexts."""
        if batch in self._curves:
            return self._curves[batch]
        i, share = _segment(self._batches, batch)
        low = self._curves[int(self._batches[i])]
        high = self._curves[int(self._batches[min(i + 1, len(self._batches) - 1)])]
        knots = sorted({*low.knots, *high.knots})
        # Beyond its last knot a curve continues its last slope, so one extra point fixes the blend's slope there.
        knots.append(knots[-1] + max(knots[-1] - knots[0], 1.0))
        times = [(1.0 - share) * low.step_s(x) + share * high.step_s(x) for x in knots]
        if batch < self._batches[0]:  # as in `_along`
            times = [max(time, low.step_s(x) * batch / self._batches[0]) for x, time in zip(knots, times, strict=True)]
        elif batch > self._batches[-1]:
            times = [max(time, high.step_s(x)) for x, time in zip(knots, times, strict=True)]
        return rising(batch, knots, times)

    def drain_s(self, batch: NDArray[np.float64]) -> float:
        """Seconds of one replica until each of its sequences has generated what is left of it.

        `batch` has a row for each group of sequences, most tokens left first: tokens left, context tokens, sequences.
        """
        _, context, sequences = batch.T
        active, tokens, time_s, done = int(sequences.sum()), float((context * sequences).sum()), 0.0, 0.0
        for left, context, sequences in batch[::-1].tolist():  # those with the fewest tokens left leave first
            if left > done:
                time_s += self.decode(active).steps_s(tokens, int(left - done))
                tokens += active * (left - done)
                done = left
            tokens -= sequences * (context + left)
            active -= int(sequences)
        return time_s

    def mixed_s(
        self,
        batch: int,
        context_tokens: float,
        chunks: Sequence[Chunk],
        in_windows: InWindows | None = None,  # noqa: ARG002
    ) -> float:
        """A prefill of all tokens together, plus what the contexts add to a decode step: derived, as a profile of
        separate decode and prefill steps says nothing about their mixture.

        A prefill is bilinear in the new tokens and the equivalent sequence length, which gives the same (query, key)
        pairs. Equal prompts have their own length; unequal ones, or chunks on top of cached tokens,
        `Σ new · (2 · prior + new) / Σ new`.
        """
        new = sum(chunk.new_tokens for chunk in chunks)
        length = sum(chunk.new_tokens * (2.0 * chunk.prior_tokens + chunk.new_tokens) for chunk in chunks) / new
        i, _ = _segment(self._tokens, new + batch)
        rows = self._prefill[i : i + 2]
        time_s = _along(self._tokens[i : i + 2], [_along(self._lengths, row, length) for row in rows], new + batch)
        if not batch:
            return time_s
        curve = self.decode(batch)
        return time_s + curve.step_s(context_tokens) - curve.step_s(0.0)


def rising(batch: int, knots: Sequence[float], times: Sequence[float]) -> DecodeCurve:
    """The curve through these points with times that never fall, as no step does whose context grows, nor reach zero
    below the first knot: measured slopes are noisy."""
    rising = list(accumulate(times, max))
    if len(knots) > 1 and knots[0] > 0.0:
        at_zero = rising[0] - (rising[1] - rising[0]) / (knots[1] - knots[0]) * knots[0]
        if at_zero < 0.0:
            return DecodeCurve(batch, [0.0, *knots], [0.0, *rising])
    return DecodeCurve(batch, knots, rising)


def _along(knots: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear between knots; outside the edge slope continues.

    But less work takes no smaller share of the time than of the work, and more work no less time: measured slopes are
    noisy, and times must not fall to zero.
    """
    i, share = _segment(knots, x)
    low, high = values[i], values[min(i + 1, len(values) - 1)]
    found = low + share * (high - low)
    if x < knots[0]:
        return max(found, low * x / knots[0])
    return max(found, high) if x > knots[-1] else found


#: Of a profile's prefill grid, in both directions: new tokens, and the equivalent sequence length.
PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@lru_cache(maxsize=16)
def profile_of(
    step: StepCost, batches: tuple[int, ...], contexts: tuple[int, ...], kv_budget_tokens: float
) -> ProfileStep:
    """PAT's offline profile of a replica: decode steps at every batch and context (tokens per sequence) within the
    KV budget.

    A batch with fewer than two points in the budget is left out, as is a context that never fits. A policy is made
    anew for each run, and for each check before it; all that look at the same replica share its profile.
    """
    curves = []
    for batch in sorted(set(batches)):
        totals = [batch * context for context in sorted(set(contexts)) if batch * context <= kv_budget_tokens]
        if len(totals) >= 2:
            curve = step.decode(batch)
            curves.append(DecodeCurve(batch, totals, [curve.step_s(total) for total in totals]))
    refuse("profile", CalibrationError, curves=curves, budget=kv_budget_tokens)
    grid = [[step.prefill_s(prompts_of(tokens, length)) for length in PREFILL_TOKENS] for tokens in PREFILL_TOKENS]
    return ProfileStep(step.tp, curves, PREFILL_TOKENS, PREFILL_TOKENS, grid, skew=step.skew)


def prompts_of(tokens: int, length: int) -> list[Chunk]:
    """Chunks of `tokens` new tokens of equivalent length `length` (`ProfileStep.mixed_s`): 2 · prior + new."""
    if length >= tokens:
        return [Chunk(tokens, (length - tokens) // 2)]
    whole, rest = divmod(tokens, length)
    return [Chunk(length, 0)] * whole + ([Chunk(rest, 0)] if rest else [])
