"""One comparison, summaries of many, and tables of them; how near rlsim is meant to come to each row (target), and what
no error may exceed (bound), which only guards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd

from rlsim.base.schema import Schema, load, validate
from rlsim.base.tables import csv_errors
from rlsim.errors import ConfigError

#: An input may be used to calibrate; an output is predicted, never fitted; left-out: under a fit that has not seen it.
Kind = Literal["input", "output", "left-out"]
S = TypeVar("S", bound=Schema)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: where it is from, what it was published or measured as, and what rlsim gives."""

    part: str
    case: str  # begins with what it is about: pat/h100-24k, h100-sxm-sglang/..., vllm/qwen3-32b/...
    quantity: str  # with its unit: gen_time_s, speedup
    reference: float
    simulated: float
    note: str = ""
    kind: Kind = "output"
    bound: float | None = None  # what |error| must not exceed

    @property
    def error(self) -> float:
        return self.simulated / self.reference - 1

    @property
    def cells(self) -> tuple[str, ...]:
        figures = number(self.reference), number(self.simulated)
        return (self.case, self.quantity, self.kind, *figures, f"{self.error:+.1%}")

    def record(self) -> dict[str, Any]:
        """The row as JSON has it, numbers to six significant digits."""
        names = ("part", "case", "quantity", "kind", "reference", "simulated", "error")
        return {name: _digits(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of all rows of one group and quantity, as shares."""

    part: str
    group: str
    quantity: str
    kind: Kind
    count: int
    mean: float  # of the absolute errors, as median and p90
    median: float
    p90: float
    bias: float  # mean signed error: positive, rlsim says more than was measured

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = (f"{value:.1%}" for value in (self.mean, self.median, self.p90))
        return (self.group, self.quantity, self.kind, f"{self.count:,}", *sizes, f"{self.bias:+.1%}")

    def record(self) -> dict[str, Any]:
        """The summary as JSON has it: `error` is the mean of |error|."""
        names = {"case": "group", "rows": "count", "error": "mean"}
        keys = ("part", "case", "quantity", "kind", "rows", "error", "median", "p90", "bias")
        return {key: _digits(getattr(self, names.get(key, key))) for key in keys}


def _digits(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_rows(path: Path, kind: type[S]) -> list[S]:
    """The rows of a CSV file as records of that kind; empty cells have its defaults, other columns are left out.

    Raises `ConfigError` with the row for a table that is missing or damaged.
    """
    with csv_errors(path, ConfigError):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    records = table[[name for name in table if name in kind.model_fields]].to_dict("records")
    cells = [{name: cell for name, cell in record.items() if cell} for record in records]
    return [validate(one, kind, f"{path}, row {number}") for number, one in enumerate(cells, 2)]


def summarise(rows: Iterable[Row], depth: int) -> list[Summary]:
    """One summary for each quantity, kind and first `depth` components of the case, in order of appearance."""
    groups: dict[tuple[str, str, str, Kind], list[float]] = {}
    for row in rows:
        group = "/".join(row.case.split("/")[:depth])
        groups.setdefault((row.part, group, row.quantity, row.kind), []).append(row.error)
    found = []
    for key, errors in groups.items():
        size = np.abs(errors)
        figures = (np.mean(size), np.median(size), np.quantile(size, 0.9), np.mean(errors))
        found.append(Summary(*key, len(errors), *map(float, figures)))
    return found


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def summary_table(summaries: Iterable[Summary]) -> str:
    """Summaries as a Markdown table."""
    headings = ("what", "quantity", "kind", "rows", "mean error", "median", "p90", "bias")
    return markdown(headings, [summary.cells for summary in summaries])


def number(value: float) -> str:
    """Three significant digits, thousands not in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
