"""How figures are written in tables, on the terminal and on pages alike; a missing one is a dash."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[Any, Any]
#: The columns of a table: by heading, how a row of figures is written there.
Columns = dict[str, Callable[[Row], str]]


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


def column(name: str, shown: Callable[..., str] = str, *how: Any) -> Callable[[Row], str]:
    """The figure `name` of a row, as `shown(figure, *how)` writes it."""
    return lambda row: shown(row[name], *how)


def written(columns: Columns, rows: Iterable[Row]) -> list[list[str]]:
    """The cells of a table."""
    return [[cell(row) for cell in columns.values()] for row in rows]


#: GPUs that do nothing, of those that generate and of those that train, where these are different ones.
APART: Columns = {"rollout idle": column("rollout_idle", share), "trainer idle": column("trainer_idle", share)}
#: Weight updates by which the responses trained on are behind.
STALE: Columns = {"stale": column("staleness_mean", number), "stale p95": column("staleness_p95", number, 1)}


def relaxed(summary: pd.DataFrame) -> Columns:
    """What relaxed synchrony costs and leaves idle: `APART` and `STALE`, each where a row of the summary has it."""
    apart, stale = summary["rollout_idle"].notna().any(), (summary["staleness_max"] > 0).any()
    return {**(APART if apart else {}), **(STALE if stale else {})}
