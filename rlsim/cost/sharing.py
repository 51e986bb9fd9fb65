"""Step costs made of others: all iterations longer, beside other work on the GPU, or with weights in host memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from rlsim.cost.curve import Curves, DecodeCurve, InWindows
from rlsim.cost.host import at_least
from rlsim.cost.lookups import Lookups
from rlsim.cost.memory import RESERVED_BYTES, rollout_activation_bytes, rollout_weight_bytes
from rlsim.cost.step import Chunk, StepCost
from rlsim.cost.transfer import host_copy_s
from rlsim.hardware import Link
from rlsim.models import Model


class Scaled(StepCost):
    """`cost`, but every iteration takes `factor` times as long, which may depend on the number of its sequences."""

    def __init__(self, cost: StepCost, factor: Callable[[int], float]) -> None:
        self.tp, self.skew, self.kv = cost.tp, cost.skew, cost.kv
        self._cost, self._factor = cost, factor
        self._curves = Curves(self._decode)

    def decode(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        return self._curves.at(batch, in_windows)

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        curve, factor = self._cost.decode(batch, in_windows), self._factor(batch)
        knots = [*curve.knots, curve.knots[-1] + 1e6]  # one more, to keep the last slope
        return DecodeCurve(batch, knots, [curve.step_s(knot) * factor for knot in knots])

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self._cost.prefill_s(chunks) * self._factor(len(chunks))

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        return self._cost.mixed_s(batch, context_tokens, chunks, in_windows) * self._factor(batch + len(chunks))

    def lookups(self) -> Lookups:
        self._curves.pass_on(self._cost.decode)
        return self._cost.lookups()


class Crowded(Scaled):
    """`alone` beside other work on the same GPU: every iteration takes `factor` ≥ 1 times as long."""

    def __init__(self, alone: StepCost, factor: float) -> None:
        if factor < 1:
            raise ValueError("other work on a GPU speeds nothing up")
        super().__init__(alone, lambda _: factor)


class Streamed(StepCost):
    """`resident` with some layers in host memory, copied in step with computation: the longer of the two decides.

    `stream_s` is the time to bring all those layers in once; every iteration needs each of them.
    """

    def __init__(self, resident: StepCost, stream_s: float) -> None:
        self.tp, self.skew, self.kv = resident.tp, resident.skew, resident.kv
        self._resident, self._stream_s = resident, stream_s
        self._curves = Curves(lambda *of: at_least(resident.decode(*of), stream_s))

    def decode(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        return self._curves.at(batch, in_windows)

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return max(self._resident.prefill_s(chunks), self._stream_s)

    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        return max(self._resident.mixed_s(batch, context_tokens, chunks, in_windows), self._stream_s)

    def lookups(self) -> Lookups:
        self._curves.pass_on(self._resident.decode)
        return self._resident.lookups()


def layers_to_offload(model: Model, resident: StepCost, host: Link, batched_tokens: int, sequence_tokens: int) -> int:
    """Most layers of `model` whose copying from host memory hides behind one prefill iteration.

    The iteration is full: `batched_tokens` of sequences of `sequence_tokens`, the last one in part. The longer the
    sequences, the longer attention takes and the more layers can stay in host memory.
    """
    whole, rest = divmod(batched_tokens, sequence_tokens)
    chunks = [Chunk(sequence_tokens, 0)] * whole + ([Chunk(rest, 0)] if rest else [])
    hidden_s = resident.prefill_s(chunks)
    layers = model.num_hidden_layers
    return max((n for n in range(layers + 1) if stream_s(model, n, resident.tp, host) <= hidden_s), default=0)


def judge_bytes(model: Model, layers: int, tp: int, batched_tokens: int, sequences: int) -> float:
    """Bytes on each GPU of an engine with that many layers in host memory, without its KV cache.

    The weights that stay, buffers for two of those that are streamed, working memory, context and graphs.
    """
    streamed = _largest_bytes(model, min(2, layers)) - _largest_bytes(model, layers)
    weights = rollout_weight_bytes(model, tp) + streamed / tp
    return weights + rollout_activation_bytes(model, tp, batched_tokens, sequences) + RESERVED_BYTES


def stream_s(model: Model, layers: int, tp: int, host: Link) -> float:
    """Seconds to copy that many layers of a replica from host memory once, each GPU its share."""
    return host_copy_s(math.ceil(_largest_bytes(model, layers) / tp), host)


def _largest_bytes(model: Model, layers: int) -> float:
    """Weights of so many layers, the largest ones."""
    return sum(heapq.nlargest(layers, map(model.layer_bytes, model.layers)))
