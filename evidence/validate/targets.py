"""How near rlsim is meant to come to each row (target), and what no error may exceed (bound), which only guards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from evidence.validate.rows import Row, Summary
from rlsim.base.schema import Schema, load

Statistic = Literal["mean", "median", "p90", "bias"]


class Target(Schema):
    """The |error| that rows are meant to stay within; part, kind and quantity are shell patterns."""

    part: str
    kind: str = "*"
    quantity: str = "*"
    within: float


class Bound(Schema):
    """A limit of a statistic of the |errors| of a group of rows (of the bias: of its size); names are shell patterns.

    `why`: what a group beyond its target lacks.
    """

    part: str
    group: str
    quantity: str
    kind: str = "*"
    statistic: Statistic = "mean"
    limit: float
    why: str = ""


class Targets(Schema):
    """Of targets and, for each statistic, of bounds the first that fits counts."""

    targets: tuple[Target, ...]
    bounds: tuple[Bound, ...]

    def within(self, row: Row) -> float:
        mine = row.part, row.quantity, row.kind
        fitting = (t.within for t in self.targets if all(map(fnmatch, mine, (t.part, t.quantity, t.kind))))
        return next(fitting, float("inf"))

    def cell(self, row: Row) -> str:
        within = self.within(row)
        return f"{within:.0%}" if abs(row.error) <= within else f"{within:.0%} **missed**"

    def checked(self, summaries: Iterable[Summary]) -> Iterator[Kept]:
        for summary in summaries:
            mine, seen = (summary.group, summary.quantity, summary.kind), set[Statistic]()
            for bound in self.bounds:
                fits = bound.part == summary.part and all(map(fnmatch, mine, (bound.group, bound.quantity, bound.kind)))
                if fits and bound.statistic not in seen:
                    seen.add(bound.statistic)
                    value = abs(float(getattr(summary, bound.statistic)))
                    yield Kept(summary.group, summary.quantity, bound.statistic, value, bound.limit, bound.why)


@dataclass(frozen=True)
class Kept:
    """A bound of one row or one group, and what it bounds."""

    what: str
    quantity: str
    statistic: str
    value: float
    limit: float
    why: str = ""

    @property
    def fine(self) -> bool:
        return self.value <= self.limit

    @property
    def shown(self) -> str:
        return f"{self.limit:.1%}" + ("" if self.fine else " **exceeded**")


def load_targets(evidence: Path) -> Targets:
    """The targets of the evidence, none where it is not here. Raises `ConfigError` for a damaged file."""
    path = evidence / "targets.yaml"
    return load(path, Targets) if path.exists() else Targets(targets=(), bounds=())


def bounds_of(targets: Targets, rows: Iterable[Row], summaries: Iterable[Summary]) -> list[Kept]:
    """The bounds of single rows, and those of groups."""
    own = [Kept(r.case, r.quantity, "row", abs(r.error), r.bound) for r in rows if r.bound is not None]
    return [*own, *targets.checked(summaries)]


def verdicts(targets: Targets, rows: Sequence[Row], bounds: Sequence[Kept]) -> list[str]:
    """What the rows come to: by kind how many are within their targets, the worst, the range of errors; then bounds."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        missed = [row for row in own if abs(row.error) > targets.within(row)]
        errors = [row.error for row in own]
        text = f"{len(own):,} {kind} rows: {len(own) - len(missed):,} within their target, {len(missed):,} missed"
        if missed:
            worst = max(missed, key=lambda row: abs(row.error))
            text += f" (worst: {worst.case}, {worst.quantity}, {worst.error:+.0%}; target {targets.within(worst):.0%})"
        lines.append(f"{text}; errors {min(errors):+.0%} to {max(errors):+.0%}")
    if bounds:
        kept = sum(bound.fine for bound in bounds)
        lines.append(f"no worse than before: {kept} of {len(bounds)} bounds")
    return lines
