"""How far a simulation's costs rest on measurements: every distinct look-up is interpolated or extrapolated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import inf
from typing import Literal

from rlsim.errors import CalibrationError

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
        if self.examples:
            found = self._outside("{operator} ({count} shapes, e.g. {example})")
            raise CalibrationError(
                f"strict: calibration {calibration!r} was not measured at shapes that this run needs: {found}"
            )

    def _outside(self, said: str) -> str:
        return "; ".join(
            said.format(operator=operator, count=self.counts[operator]["extrapolated"], example=example)
            for operator, example in sorted(self.examples.items())
        )
