"""An engine's host time, beside or after the GPU's work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rlsim.cost.calibration import HostFit
from rlsim.cost.curve import Curves, DecodeCurve, InWindows
from rlsim.cost.lookups import Lookups
from rlsim.cost.step import Chunk, StepCost

_BEYOND_TOKENS = 1e6  # where a knot is put beyond the last one, to keep the slope there


class HostedStep(StepCost):
    """`kernels` (a step cost without host time) as an engine with this host time runs them.

    The host takes `step_s + sequence_s · sequences`, and `prefill_s` more in an iteration that prefills. An engine that
    prepares the next step while the GPU works (`overlapped`) takes the longer of the two, any other their sum. Each of
    the `groups` of GPUs that share a replica's sequences out has a host process of its own.
    """

    def __init__(self, kernels: StepCost, host: HostFit, groups: int = 1) -> None:
        self.tp = kernels.tp
        self.skew = kernels.skew
        self.kv = kernels.kv
        self._kernels = kernels
        self._host, self._groups = host, groups
        self.curves = Curves(self._decode)

    def decode(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        return self.curves[batch] if in_windows is None else self.curves.at(batch, in_windows)

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        kernels, host_s = self._kernels.decode(batch, in_windows), self._host_s(batch)
        if self._host.overlapped:
            return at_least(kernels, host_s)
        knots = [*kernels.knots, kernels.knots[-1] + _BEYOND_TOKENS]
        return DecodeCurve(batch, knots, [kernels.step_s(knot) + host_s for knot in knots])

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self._both_s(self._kernels.prefill_s(chunks), self._host_s(len(chunks)) + self._host.prefill_s)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        """Seconds of one iteration that decodes `batch` sequences and prefills `chunks`."""
        host_s = self._host_s(batch + len(chunks)) + self._host.prefill_s
        return self._both_s(self._kernels.mixed_s(batch, context_tokens, chunks, in_windows), host_s)

    def lookups(self) -> Lookups:
        self.curves.pass_on(self._kernels.decode)
        return self._kernels.lookups()

    def _host_s(self, sequences: int) -> float:
        return self._host.step_s + self._host.sequence_s * math.ceil(sequences / self._groups)

    def _both_s(self, kernels_s: float, host_s: float) -> float:
        return max(kernels_s, host_s) if self._host.overlapped else kernels_s + host_s


def at_least(curve: DecodeCurve, floor_s: float) -> DecodeCurve:
    """`curve` where it takes longer than `floor_s`, else `floor_s`; for context totals of zero and more."""
    return longer(curve, DecodeCurve(curve.batch, [0.0], [floor_s]))


def longer(one: DecodeCurve, other: DecodeCurve) -> DecodeCurve:
    """The longer step time of two curves of the same batch everywhere; for context totals of zero and more."""
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
    return DecodeCurve(one.batch, knots, [max(one.step_s(knot), other.step_s(knot)) for knot in knots])
