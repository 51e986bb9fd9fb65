"""How figures are written in tables, on the terminal and on pages alike; a missing one is a dash."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rlsim.base.reading import shipped
from rlsim.base.refusals import code_of

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[Any, Any]


def is_missing(value: Any) -> bool:
    """Whether there is no such figure: None, or NaN in a column of numbers."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals and commas between thousands."""
    return "–" if is_missing(value) else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """An amount per second with three significant digits, or all those before the point."""
    if value is None or is_missing(value) or not value:
        return number(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def share(value: float | None, digits: int = 0) -> str:
    """A share in percent."""
    return "–" if is_missing(value) else f"{value:.{digits}%}"


def with_interval(row: Row, name: str, digits: int = 2) -> str:
    """The column `name` of a row with its 95% interval (`…_low`, `…_high`), which is left out where it is missing."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if is_missing(value):
        return "–"
    return f"{value:.{digits}f}" + ("" if is_missing(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def with_half(row: Row, name: str) -> str:
    """The column `name` of a row with half its 95% interval (`…_half`), which is left out where it is missing."""
    half = row[f"{name}_half"]
    return number(row[name], 1) + ("" if is_missing(half) else f" ±{half:.1f}")


def with_model(row: Row, name: str) -> str:
    """The column `name` of a row with its 95% interval over the calibration's errors (`…_model_low`, `…_high`), or with
    half that of its mean where none was drawn."""
    low, high = (row[f"{name}_model_{end}"] for end in ("low", "high"))
    return with_half(row, name) if is_missing(low) else f"{number(row[name], 1)} [{number(low, 0)}, {number(high, 0)}]"


def with_choice(system: str, tuned: Mapping[str, str]) -> str:
    """The name of a system, with what it chose if it is a tuned one."""
    return f"{system} ({tuned[system]})" if system in tuned else system


def listed(names: Sequence[str], most: int) -> str:
    """The first of many names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def few(texts: Sequence[str], most: int, what: str, lead: str = "") -> list[str]:
    """The first of many texts, and how many more there are of `what`."""
    return [*texts[:most], *([f"{lead}{len(texts) - most:,} more {what}"] if len(texts) > most else [])]


@dataclass(frozen=True)
class Table:
    """Headings and rows of text, which `rlsim.cli.tables` prints and a page shows.

    `words` are the numbers of columns that hold words, not numbers: on a terminal those at the front stand in every
    part of a table that is too wide. `prose` is that of a column which is folded there where there is no room for it; a
    page shows a `folded` table on demand.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: Collection[int] = (0,)
    prose: int = -1
    folded: bool = False
    form: ClassVar[str] = "table"

    @classmethod
    def of(cls, title: str, columns: Mapping[str, Sequence[str]], *words: int, **more: Any) -> Table:
        """A table by its columns; beside the first those of the numbers `words` hold words, too."""
        return cls(title, [*columns], [*zip(*columns.values(), strict=True)], **{"words": (0, *words), **more})


class Column(NamedTuple):
    """A row of `rlsim/data/tables.csv`: a heading, a cell as an expression over the figures of its row, and when there
    is such a column."""

    tables: str
    heading: str
    of: str
    when: str
    meaning: str  # for people; of some tables


@cache
def columns_of(table: str) -> tuple[Column, ...]:
    """The columns that a table may have."""
    return tuple(row for row in map(Column._make, shipped("tables.csv")) if table in row.tables.split())


def written(table: str, figures: pd.DataFrame | Iterable[Any], **known: Any) -> dict[str, list[str]]:
    """The columns of a table of these rows of figures, by heading; expressions know what is `known`, too, and the whole
    `row`: so may rows be records that are not mappings.

    Conditions may ask whether `some` row has more than 0 of a figure, and whether it is `known` of any.
    """
    rows: list[Any] = figures.to_dict("records") if hasattr(figures, "to_dict") else [*figures]
    facts = {**globals(), **known}
    facts |= {"some": lambda name: any(row[name] > 0 for row in rows)}
    facts |= {"known": lambda name: not all(is_missing(row[name]) for row in rows)}
    there = {one.heading: one.of for one in columns_of(table) if not one.when or eval(code_of(one.when), facts)}
    own = [{"row": row} | (row if isinstance(row, dict) else {}) for row in rows]
    return {name: [eval(code_of(of), facts, row) for row in own] for name, of in there.items()}
