"""Step costs made of others: with an engine's host time, beside other work on the GPU, with weights in host memory,
as a whole engine was measured, and over pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlsim.base.refusals import refuse
from rlsim.cost.calibration import DECODE_AXES, PREFILL_AXES, EngineFit, HostFit
from rlsim.cost.collectives import CollectiveTime
from rlsim.cost.curve import DecodeCurve, InWindows, at_least, longer, times
from rlsim.cost.fits import Correction
from rlsim.cost.kernel import Surface
from rlsim.cost.micro_batches import pack
from rlsim.cost.step import Chunk, Conditions, Lookups, StepCost


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
        self.drawn, self.accepted = cost.drawn, cost.accepted  # type: ignore[method-assign]
        self._cost, self._change, self._part = cost, change, part
        self.parts = (cost,)

    def _made_for(self, conditions: Conditions) -> StepCost:
        return DerivedStep(self._cost.under(conditions), self._change, self._part)

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        change = self._change(batch, False)
        curve = self._cost.decode(batch, in_windows).mapped(change.scale, change.more_s)
        return at_least(curve, change.least_s) if change.least_s else curve

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        change = self._change(batch + len(chunks), True)
        time_s = self._cost.mixed_s(batch, context_tokens, chunks, in_windows)
        return max(time_s * change.scale + change.more_s, change.least_s)

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one decode step by part: those of the cost underneath, and what is added to them."""
        change = self._change(batch, False)
        parts = {name: change.scale * time_s for name, time_s in self._cost.breakdown(batch, context_tokens).items()}
        added_s = max(change.more_s, change.least_s - sum(parts.values()), 0.0)
        return parts | ({self._part: parts.get(self._part, 0.0) + added_s} if added_s else {})


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
    return DerivedStep(alone, lambda *_: Change(scale=factor))


def streamed(resident: StepCost, stream_s: float) -> StepCost:
    """`resident` with some layers in host memory, copied in step with computation: the longer of the two decides.

    `stream_s` is the time to bring all those layers in once; every iteration needs each of them.
    """
    return DerivedStep(resident, lambda *_: Change(least_s=stream_s), "weights from host memory")


# Whole iterations -----------------------------------------------------------------------------------------------------

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
        self._prefills = None if fit.prefill is None else Surface(fit.prefill, PREFILL_AXES)
        self._prefilled: set[int] = set()

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        factor, contexts = self._decodes, self._fit.decode.axes["context"]
        curve = self._cost.decode(batch, in_windows)
        return times(curve, lambda tokens: factor(batch, max(tokens / batch, 1.0)), [batch * each for each in contexts])

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        tokens = batch + sum([chunk.new_tokens for chunk in chunks])
        self._prefilled.add(tokens)
        factor = self._fit.level if self._prefills is None else self._prefills(tokens)
        return self._cost.mixed_s(batch, context_tokens, chunks, in_windows) * factor

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
    return {name: (knots[0], knots[-1]) for name, knots in table.axes.items()}


# Pipeline stages ------------------------------------------------------------------------------------------------------


_TOKEN_BYTES = 4  # of a sampled token on its way back to the first stage


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """The ways between neighbouring stages: `inside` of them within a node, `across` from one node to another.

    Every one of `ranks` (a stage's GPUs) sends the whole hidden state, `hidden_bytes` a token, to its peer of the next
    stage. What the last stage samples goes back to the first.
    """

    hidden_bytes: float
    inside: int
    across: int
    collectives: CollectiveTime
    ranks: int = 1

    def slowest_s(self, tokens: float) -> float:
        """Seconds of the slowest send of `tokens` tokens to a next stage; 0 without one."""
        if self.inside + self.across == 0:
            return 0.0
        return self._send_s(tokens * self.hidden_bytes, 2 if self.across else 1)

    def total_s(self, tokens: float, sequences: float) -> float:
        """Seconds of the sends that `tokens` tokens of `sequences` sequences meet on their way, and back."""
        if self.inside + self.across == 0:
            return 0.0
        size = tokens * self.hidden_bytes
        there = sum(count * self._send_s(size, n) for n, count in ((1, self.inside), (2, self.across)) if count)
        return there + self._send_s(sequences * _TOKEN_BYTES, 2 if self.across else 1)

    def _send_s(self, size: float, nodes: int) -> float:
        return self.collectives.time_s("send_recv", size, 2 * self.ranks, nodes)


class Pipelined(StepCost):
    """A replica of `tp` · `pp` GPUs, from `kernels`: the step cost, without host time, of the same model on `tp` GPUs.

    The sequences of an iteration are cut into m = min(b, pp) micro-batches (⌈b/m⌉ sequences each, of average context),
    which follow each other through the stages round after round. A stage takes its share σ = ⌈layers/pp⌉/layers of the
    time L of all layers, taken as alike (and of the embedding and last norm, which are small), the last one also that
    of the head, H; every boundary takes a send that neither side overlaps with its own work. The host (time h a
    micro-batch) schedules micro-batches one after another, each when its last token is back, unless it works ahead
    (`overlapped`).

        iteration = max( m · (σ·L + max(H, slowest send)),      the busiest stage has always work
                         L + H + all sends + h,                 a micro-batch waits for itself; no h if overlapped
                         m · h )                                the host has always work

    where L, H and h are those of a micro-batch. With b < pp the second line decides: the other stages idle.
    Micro-batches that differ (of prefill) enter the first and third line by their sum, the second by the largest.
    Filling and draining the pipeline is left out: the micro-batches of the next iteration follow on.

    `head_s(rows)` are the seconds of the head within `kernels`. `layers` is the model's number of layers.
    Raises `ConfigError` for less than one stage, or more than layers.
    """

    def __init__(
        self,
        kernels: StepCost,
        pp: int,
        *,
        layers: int,
        head_s: Callable[[float], float],
        boundaries: Boundaries,
        host: HostTime,
    ) -> None:
        refuse("pipeline stages", pp=pp, layers=layers)
        self.tp, self.pp, self.skew, self.kv = kernels.tp, pp, kernels.skew, kernels.kv
        self._kernels = kernels
        self._share = math.ceil(layers / pp) / layers
        self._head_s = head_s
        self._boundaries = boundaries
        self._host = host

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        """The longest of the three lines, each piecewise linear in T."""
        count, size = min(batch, self.pp), self._micro_batch_size(batch)
        curve = self._kernels.decode(size, in_windows and in_windows.of(size / batch))
        stages_s, ways_s, hosts_s = zip(
            *(self._micro_batch(curve.step_s(tokens), size, size) for tokens in curve.knots), strict=True
        )
        knots = [tokens * batch / size for tokens in curve.knots]
        stage = DecodeCurve(batch, knots, [count * stage_s for stage_s in stages_s])
        return at_least(longer(stage, DecodeCurve(batch, knots, ways_s)), count * hosts_s[0])

    def _micro_batch_size(self, batch: int) -> int:
        return math.ceil(batch / min(batch, self.pp))

    def lookups(self) -> Lookups:
        self.curves.pass_on(self._kernels.decode, self._micro_batch_size)
        return self._kernels.lookups()

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        """Decoding sequences are dealt evenly to the micro-batches, whole chunks balanced by new tokens."""
        count = min(batch + len(chunks), self.pp)
        dealt = pack([chunk.new_tokens for chunk in chunks], count)
        # Most of the decoding sequences go where the fewest chunks are, so that no micro-batch stays empty.
        dealt.sort(key=lambda members: sum(chunks[i].new_tokens for i in members))
        parts: list[tuple[float, float, float]] = []
        for i, members in enumerate(dealt):
            decoding = batch // count + (i < batch % count)
            own = [chunks[j] for j in members]
            tokens = decoding + sum(chunk.new_tokens for chunk in own)
            share = decoding / batch if batch else 0.0
            context, within = context_tokens * share, in_windows and in_windows.of(share)
            if own:
                kernels_s = self._kernels.mixed_s(decoding, context, own, within)
            else:
                kernels_s = self._kernels.decode(decoding, within).step_s(context)
            parts.append(self._micro_batch(kernels_s, tokens, decoding + len(own), prefills=bool(own)))
        stages_s, ways_s, hosts_s = zip(*parts, strict=True)
        longest_s: float = max(sum(stages_s), *ways_s, sum(hosts_s))
        return longest_s

    def _micro_batch(
        self, kernels_s: float, tokens: float, sequences: int, *, prefills: bool = False
    ) -> tuple[float, float, float]:
        """Seconds of one micro-batch: on a stage, on all its way, of the host."""
        head_s, host_s = self._head_s(sequences), self._host.iteration_s(sequences, prefills)
        layers_s = kernels_s - head_s
        way_s = layers_s + head_s + self._boundaries.total_s(tokens, sequences)
        stage_s = self._share * layers_s + max(head_s, self._boundaries.slowest_s(tokens))
        return stage_s, way_s if self._host.fit.overlapped else way_s + host_s, host_s
