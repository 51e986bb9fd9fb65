"""How figures are written in tables, on the terminal and on pages alike; a missing one is a dash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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


def with_interval(row: Mapping[Any, Any], name: str, digits: int = 2) -> str:
    """The column `name` of a row with its 95% interval (`…_low`, `…_high`), which is left out where it is missing."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if is_missing(value):
        return "–"
    return f"{value:.{digits}f}" + ("" if is_missing(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def with_choice(system: str, tuned: Mapping[str, str]) -> str:
    """The name of a system, with what it chose if it is a tuned one."""
    return f"{system} ({tuned[system]})" if system in tuned else system
