"""A replica's iterations as a whole engine was measured to run them."""

from __future__ import annotations

from collections.abc import Sequence

from rlsim.cost.calibration import DECODE_AXES, PREFILL_AXES, EngineFit
from rlsim.cost.curve import DecodeCurve, InWindows, times
from rlsim.cost.derived import Change, DerivedStep
from rlsim.cost.fits import Correction
from rlsim.cost.lookups import Lookups
from rlsim.cost.step import Chunk, StepCost
from rlsim.cost.surface import Surface, surface_of

#: What look-ups of the tables of whole iterations are counted as.
ITERATIONS = "whole iterations"


class ServedStep(DerivedStep):
    """`cost` times the factors of whole iterations (`EngineFit`): of a model and TP that were measured.

    A step of b sequences with T tokens of context has the table's factor at b and T/b where the table has a knot or the
    cost bends, and is linear in T in between. What was measured as a whole is looked up as such: not by its kernels.
    """

    def __init__(self, cost: StepCost, fit: EngineFit) -> None:
        super().__init__(cost, lambda *_: Change(scale=fit.level))
        self._fit = fit
        self._decodes = Surface(fit.decode, DECODE_AXES)
        self._prefills = surface_of(fit.prefill, PREFILL_AXES)
        self._prefilled: set[int] = set()

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        factor, contexts = self._decodes.along(batch), self._fit.decode.knots("context")
        curve = self._cost.decode(batch, in_windows)
        return times(curve, lambda tokens: factor(max(tokens / batch, 1.0)), [batch * each for each in contexts])

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self._cost.prefill_s(chunks) * self._prefill_factor(0, chunks)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        time_s = self._cost.mixed_s(batch, context_tokens, chunks, in_windows)
        return time_s * self._prefill_factor(batch, chunks)

    def _prefill_factor(self, batch: int, chunks: Sequence[Chunk]) -> float:
        tokens = batch + sum([chunk.new_tokens for chunk in chunks])
        self._prefilled.add(tokens)
        return self._fit.level if self._prefills is None else self._prefills(tokens)

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one decode step by part: those of the cost underneath, all by the same factor."""
        parts = self._cost.breakdown(batch, context_tokens)
        factor = self.decode(batch).step_s(context_tokens) / sum(parts.values())
        return {name: factor * time_s for name, time_s in parts.items()}

    def lookups(self) -> Lookups:
        """Batch sizes, each at the longest mean context it was used at, and sizes of prefills."""
        own = Lookups()
        for batch, furthest in self._curves.used():
            own.add_within(ITERATIONS, _ranges(self._fit.decode), batch=batch, context=furthest / batch)
        for tokens in self._prefilled:
            if self._fit.prefill is None:
                own.add(ITERATIONS, "extrapolated", f"prefill of {tokens} tokens, none was measured")
            else:
                own.add_within(ITERATIONS, _ranges(self._fit.prefill), tokens=tokens)
        return own


def _ranges(table: Correction) -> dict[str, tuple[float, float]]:
    return {axis.name: (axis.knots[0], axis.knots[-1]) for axis in table.axes}
