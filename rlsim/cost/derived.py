"""Step costs made of others: with an engine's host time, beside other work on the GPU, with weights in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlsim.cost.calibration import DECODE_AXES, PREFILL_AXES, EngineFit, HostFit
from rlsim.cost.curve import DecodeCurve, InWindows, at_least, times
from rlsim.cost.fits import Correction
from rlsim.cost.kernel import Surface, surface_of
from rlsim.cost.lookups import Lookups
from rlsim.cost.step import Chunk, Conditions, StepCost


class Change(NamedTuple):
    """An iteration takes `scale` times as long and `more_s` more, and no less than `least_s`."""

    scale: float = 1.0
    more_s: float = 0.0
    least_s: float = 0.0


class DerivedStep(StepCost):
    """`cost` with a change of each iteration: `change(sequences, prefills)`, where `prefills` is whether it does.

    `part` is what a step's parts call the time that it adds.
    """

    def __init__(self, cost: StepCost, change: Callable[[int, bool], Change], part: str = "host") -> None:
        self.tp, self.skew, self.kv = cost.tp, cost.skew, cost.kv
        self.conditional, self.most_kv, self.lengths = cost.conditional, cost.most_kv, cost.lengths
        self._cost, self._change, self._part = cost, change, part

    def _made_for(self, conditions: Conditions) -> StepCost:
        return DerivedStep(self._cost.under(conditions), self._change, self._part)

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        change = self._change(batch, False)
        curve = self._cost.decode(batch, in_windows).mapped(change.scale, change.more_s)
        return at_least(curve, change.least_s) if change.least_s else curve

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self._changed(self._cost.prefill_s(chunks), len(chunks))

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        return self._changed(self._cost.mixed_s(batch, context_tokens, chunks, in_windows), batch + len(chunks))

    def _changed(self, time_s: float, sequences: int) -> float:
        change = self._change(sequences, True)
        return max(time_s * change.scale + change.more_s, change.least_s)

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one decode step by part: those of the cost underneath, and what is added to them."""
        change = self._change(batch, False)
        parts = {name: change.scale * time_s for name, time_s in self._cost.breakdown(batch, context_tokens).items()}
        added_s = max(change.more_s, change.least_s - sum(parts.values()), 0.0)
        return parts | ({self._part: parts.get(self._part, 0.0) + added_s} if added_s else {})

    def lookups(self) -> Lookups:
        return self.of_parts([self._cost])


class HostTime(NamedTuple):
    """An engine's host time: `step_s + sequence_s · sequences`, and `prefill_s` more in an iteration that prefills.

    Each of the `groups` of GPUs that share a replica's sequences out has a host process of its own.
    """

    fit: HostFit
    groups: int = 1

    def iteration_s(self, sequences: int, prefills: bool) -> float:
        """Seconds of the busiest process in an iteration of so many sequences."""
        own = math.ceil(sequences / self.groups)
        return self.fit.step_s + self.fit.sequence_s * own + self.fit.prefill_s * prefills

    def change(self, sequences: int, prefills: bool) -> Change:
        """An engine that prepares the next step while the GPU works (`overlapped`) takes the longer of the two times,
        any other their sum."""
        time_s = self.iteration_s(sequences, prefills)
        return Change(least_s=time_s) if self.fit.overlapped else Change(more_s=time_s)


def hosted(kernels: StepCost, host: HostFit, groups: int = 1) -> StepCost:
    """`kernels` (a step cost without host time) as an engine with this host time runs them."""
    takes_time = host.step_s + host.sequence_s + host.prefill_s > 0
    return DerivedStep(kernels, HostTime(host, groups).change) if takes_time else kernels


def crowded(alone: StepCost, factor: float) -> StepCost:
    """`alone` beside other work on the same GPU: every iteration takes `factor` ≥ 1 times as long."""
    if factor < 1:
        raise ValueError("other work on a GPU speeds nothing up")
    return DerivedStep(alone, lambda *_: Change(scale=factor))


def streamed(resident: StepCost, stream_s: float) -> StepCost:
    """`resident` with some layers in host memory, copied in step with computation: the longer of the two decides.

    `stream_s` is the time to bring all those layers in once; every iteration needs each of them.
    """
    return DerivedStep(resident, lambda *_: Change(least_s=stream_s), "weights from host memory")


# Whole iterations -----------------------------------------------------------------------------------------------------

# A replica's iterations as a whole engine was measured to run them.

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
        for batch, furthest in self.curves.used():
            own.add_within(ITERATIONS, _ranges(self._fit.decode), batch=batch, context=furthest / batch)
        for tokens in self._prefilled:
            if self._fit.prefill is None:
                own.add(ITERATIONS, "extrapolated", f"prefill of {tokens} tokens, none was measured")
            else:
                own.add_within(ITERATIONS, _ranges(self._fit.prefill), tokens=tokens)
        return own


def _ranges(table: Correction) -> dict[str, tuple[float, float]]:
    return {axis.name: (axis.knots[0], axis.knots[-1]) for axis in table.axes}
