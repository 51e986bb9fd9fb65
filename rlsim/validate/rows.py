"""One comparison, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

#: An input may be used to calibrate; an output is predicted, never fitted.
Kind = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: where it is from, what it was published or measured as, and what rlsim gives."""

    part: str
    case: str  # begins with the system's name: pat/h100-24k
    quantity: str  # with its unit: gen_time_s, speedup
    kind: Kind
    reference: float
    simulated: float
    note: str = ""

    @property
    def error(self) -> float:
        """simulated / reference − 1."""
        return self.simulated / self.reference - 1


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def table(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table, numbers to three significant digits."""
    cells = [
        (r.case, r.quantity, r.kind, number(r.reference), number(r.simulated), f"{r.error:+.1%}", r.note) for r in rows
    ]
    return markdown(("case", "quantity", "kind", "published", "rlsim", "error", "remark"), cells)


def number(value: float) -> str:
    """Three significant digits, thousands not in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
