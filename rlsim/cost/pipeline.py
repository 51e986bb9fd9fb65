"""Generation by replicas that cut the model's layers over pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsim.cost.collectives import CollectiveTime
from rlsim.cost.curve import DecodeCurve, InWindows, at_least, longer
from rlsim.cost.derived import HostTime
from rlsim.cost.lookups import Lookups
from rlsim.cost.micro_batches import pack
from rlsim.cost.step import Chunk, StepCost
from rlsim.errors import ConfigError

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
        if not 1 <= pp <= layers:
            raise ConfigError(f"PP {pp} does not go with {layers} layers")
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

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self.mixed_s(0, 0.0, chunks)

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
            if own and decoding:
                kernels_s = self._kernels.mixed_s(decoding, context, own, within)
            elif own:
                kernels_s = self._kernels.prefill_s(own)
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
