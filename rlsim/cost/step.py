"""What one replica's engine iterations cost: the interface between cost models and the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import ceil, inf
from typing import Literal, NamedTuple

from rlsim.base.refusals import refuse
from rlsim.cost.curve import Curves, DecodeCurve, InWindows
from rlsim.errors import CalibrationError


class Chunk(NamedTuple):
    """Tokens of one sequence that a prefill iteration processes."""

    new_tokens: int
    prior_tokens: int  # already in the KV cache, attended to but not recomputed


class KvShape(NamedTuple):
    """What a sequence's KV cache takes, in units of which a page that all layers share holds `page_units`.

    Layers with a window let go of the pages that a sequence has outgrown: each page begun beyond `window_tokens` takes
    only `late_units`. With `chunked` they are chunks of so many tokens, let go of as a whole when the sequence enters
    the next one. `state_tokens`: what linear attention keeps of a sequence, as so many tokens of whole pages.
    """

    window_tokens: int | None = None
    page_units: int = 1
    late_units: int = 1
    state_tokens: float = 0.0
    chunked: bool = False

    def units(self, context_tokens: int, page_tokens: int) -> int:
        """The units of a sequence of so many tokens, its last page whole; the state takes whole pages."""
        pages = -(-context_tokens // page_tokens)
        if self.window_tokens is None:
            kept = pages
        elif self.chunked:
            kept = pages - (context_tokens - 1) // self.window_tokens * self.window_tokens // page_tokens
        else:
            kept = min(pages, -(-self.window_tokens // page_tokens))
        state = ceil(self.state_tokens / page_tokens)
        return self.page_units * (kept + state) + self.late_units * (pages - kept)

    def fits(self, context_tokens: int, page_tokens: int, pages: int) -> bool:
        """Whether so many pages of all layers hold one sequence until it has so many tokens."""
        most = self.units(context_tokens, page_tokens)
        if self.chunked and self.window_tokens and context_tokens > self.window_tokens:
            last = context_tokens // self.window_tokens * self.window_tokens  # a chunk that is full
            most = max(most, self.units(last, page_tokens))
        return most <= pages * self.page_units


#: Of a model whose layers all keep all tokens.
PLAIN_KV = KvShape()


class Conditions(NamedTuple):
    """What the time of an iteration may depend on beside its sequences."""

    version: int = 0  # of the replica's weights: updates that they have had
    short: bool = False  # more of its KV pages are in use than `StepCost.most_kv`
    level: int = -1  # how many of `StepCost.lengths` its responses are expected to reach on average; -1: all


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

    #: What sequences keep in the KV cache. Where some layers attend to windows only, what decode takes depends on how
    #: many context tokens lie in windows, too (`InWindows`).
    kv: KvShape = PLAIN_KV

    #: Whether iterations depend on `Conditions`: the share of KV pages in use above which they are `short`, the lengths
    #: of responses (tokens, ascending) that their `level` counts.
    conditional: bool = False
    most_kv: float = 1.0
    lengths: Sequence[int] = ()

    #: The steps that its decode curves are made of, whose look-ups are its own.
    parts: Sequence[StepCost] = ()

    #: Whether what a decode step yields of each sequence is drawn: for how many steps `accepted` holds; 0: it is not.
    drawn: int = 0

    def accepted(self, batch: int, context_tokens: float, in_windows: InWindows | None = None) -> tuple[float, ...]:  # noqa: ARG002
        """By drafted position the chance that all up to there are accepted. A step yields one token of each sequence
        more than these add up to, in expectation, and takes as many times `decode`."""
        return ()

    @cached_property
    def _under(self) -> dict[Conditions, StepCost]:
        return {}

    def under(self, conditions: Conditions) -> StepCost:
        """What iterations cost under these conditions."""
        if not self.conditional:
            return self
        if conditions not in self._under:
            self._under[conditions] = self._made_for(conditions)
        return self._under[conditions]

    def _made_for(self, conditions: Conditions) -> StepCost:
        raise NotImplementedError

    @property
    def best(self) -> StepCost:
        """A cost that iterations beat under no conditions."""
        return self

    @cached_property
    def curves(self) -> Curves:
        """The decode curves that were made."""
        return Curves(self._decode)

    def decode(self, batch: int, in_windows: InWindows | None = None) -> DecodeCurve:
        """The decode curve of `batch` ≥ 1 sequences, over the (skew-corrected) sum of their context tokens.

        Without `in_windows` their contexts are equal.
        """
        return self.curves.at(batch, in_windows)

    def _decode(self, batch: int, in_windows: InWindows | None) -> DecodeCurve:
        raise NotImplementedError

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of one prefill iteration over `chunks` (at least one)."""
        return self.mixed_s(0, 0.0, chunks)

    @abstractmethod
    def mixed_s(
        self, batch: int, context_tokens: float, chunks: Sequence[Chunk], in_windows: InWindows | None = None
    ) -> float:
        """Seconds of one iteration that decodes `batch` sequences (or none) and prefills `chunks` (at least one)."""

    def breakdown(self, batch: int, context_tokens: float) -> dict[str, float]:
        """Seconds of one decode step of equal contexts by part; they add up to it."""
        return {"step": self.decode(batch).step_s(context_tokens)}

    def lookups(self) -> Lookups:
        """The distinct shapes asked for so far, by how far they rest on measurements; empty if nobody counts."""
        for step in self.parts:
            self.curves.pass_on(step.decode)
        for other in self._under.values():
            if other is not self:
                other.lookups()
        return Lookups().merge(step.lookups() for step in self.parts)


# How far costs rest on measurements: every distinct look-up is interpolated or extrapolated ---------------------------


#: In the range that a fit was made over; outside.
Kind = Literal["interpolated", "extrapolated"]
KINDS: tuple[Kind, ...] = ("interpolated", "extrapolated")
_EVERYWHERE = (-inf, inf)


class Lookups:
    """Counts by operator, and one example of each way in which an operator was extrapolated.

    A shape that is asked for again is counted once where its time is kept, so the counts are of distinct shapes, not
    of calls.
    """

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[Kind]] = defaultdict(Counter)
        self.examples: dict[str, str] = {}

    def add(self, operator: str, kind: Kind, example: str = "") -> None:
        """One look-up of `operator`; `example` says what was outside of what, for extrapolated ones."""
        self.counts[operator][kind] += 1
        if kind == "extrapolated":
            self.examples.setdefault(operator, example)

    def add_within(self, operator: str, ranges: Mapping[str, tuple[float, float]] | None, **values: float) -> None:
        """One look-up of a fitted operator: extrapolated if one of the named values lies outside its measured range.

        Nothing is known about an operator without ranges: it counts as interpolated.
        """
        if ranges:
            for name, value in values.items():
                low, high = ranges.get(name, _EVERYWHERE)
                if not low <= value <= high:
                    self.add(operator, "extrapolated", f"{name} {value:g}, measured {low:g} to {high:g}")
                    return
        self.add(operator, "interpolated")

    def merge(self, others: Iterable[Lookups]) -> Lookups:
        """All of these and those together."""
        total = Lookups()
        for one in (self, *others):
            for operator, counts in one.counts.items():
                total.counts[operator].update(counts)
            for operator, example in one.examples.items():
                total.examples.setdefault(operator, example)
        return total

    def table(self) -> dict[str, dict[str, int]]:
        """operator -> kind -> count, every kind present."""
        return {operator: {kind: counts[kind] for kind in KINDS} for operator, counts in sorted(self.counts.items())}

    def note(self) -> list[str]:
        """One line on what was extrapolated, or none."""
        if not self.examples:
            return []
        total = sum(sum(counts.values()) for counts in self.counts.values())
        outside = sum(counts["extrapolated"] for counts in self.counts.values())
        found = self._outside("{operator} {count:,} (e.g. {example})")
        return [f"{outside:,} of {total:,} distinct shapes lie outside what the calibration was measured at: {found}"]

    def refuse_extrapolated(self, calibration: str) -> None:
        """Raises `CalibrationError` that names every operator which was extrapolated, with an example of each."""
        found = self._outside("{operator} ({count} shapes, e.g. {example})")
        refuse("strict", CalibrationError, calibration=calibration, found=found)

    def _outside(self, said: str) -> str:
        return "; ".join(
            said.format(operator=operator, count=self.counts[operator]["extrapolated"], example=example)
            for operator, example in sorted(self.examples.items())
        )
