"""What one replica's engine iterations cost: the interface between cost models and the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from rlsim.cost.curve import DecodeCurve
from rlsim.cost.lookups import Lookups


class Chunk(NamedTuple):
    """Tokens of one sequence that a prefill iteration processes."""

    new_tokens: int
    prior_tokens: int  # already in the KV cache, attended to but not recomputed


class StepCost(ABC):
    """Seconds of the iterations of one replica: one model on `tp` GPUs of one node.

    An iteration is a decode step of b sequences, a prefill of some chunks, or both together (chunked prefill).
    Every time includes kernels, tensor-parallel communication and the engine's host time.
    """

    tp: int

    #: Share of the padding `b·max(context) − sum(context)` that decode attention pays for: 0 when the kernel balances
    #: unequal contexts perfectly, 1 when every sequence costs as much as the longest. The padding stays constant while
    #: a batch decodes, so a curve is simply read at `T + skew · padding`.
    skew: float = 0.0

    @abstractmethod
    def decode(self, batch: int) -> DecodeCurve:
        """The decode curve of `batch` ≥ 1 sequences, over the (skew-corrected) sum of their context tokens."""

    @abstractmethod
    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of one prefill iteration over `chunks` (at least one)."""

    @abstractmethod
    def mixed_s(self, batch: int, context_tokens: float, chunks: Sequence[Chunk]) -> float:
        """Seconds of one iteration that decodes `batch` ≥ 1 sequences and prefills `chunks` (at least one)."""

    def lookups(self) -> Lookups:
        """The distinct shapes asked for so far, by how far they rest on measurements; empty if nobody counts."""
        return Lookups()
