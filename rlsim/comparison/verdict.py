"""Verdicts on the rows of a comparison: every sentence and colour that says who is faster is made here.

A table is judged in one unit: by the responses that a system trains on per second or, where a comparable system trains
on other lengths than the baseline, by the tokens. One interval decides: it reaches from the lowest to the highest end
of those that are known, over seeds and over the calibration's errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pandas as pd

from rlsim.experiment.summary import EXPLAINED
from rlsim.formats import Row, is_missing, rate, with_choice

Outcome = Literal["baseline", "faster", "as fast", "not told apart", "slower", "not comparable", "no speedup"]

#: Decimals of an interval: it decides by what is in print.
DIGITS = 3
#: By unit: the column of the amount per second, and that of the ratio.
RATES = {"responses": "responses_per_s", "tokens": "tokens_per_s"}
_RATIO = {"responses": "speedup", "tokens": "token_speedup"}
#: Names in a sentence, at most.
_MOST_NAMES = 4


class Judged(NamedTuple):
    """The verdict on one system: its ratio to the baseline with the interval that decides, which may be missing."""

    system: str
    outcome: Outcome
    ratio: float
    low: float
    high: float
    over: str  # what the interval is taken over; "" where there is none
    per_s: float  # what it trains on, in the unit of the table
    why: str  # why it cannot be compared; "" if it can

    @property
    def interval(self) -> str:
        """The interval that decides, for a table."""
        return "" if math.isnan(self.low) else f"[{self._text(self.low)}, {self._text(self.high)}]"

    @property
    def span(self) -> str:
        """The interval that decides, for a sentence."""
        return f"{self._text(self.low)} to {self._text(self.high)}"

    @property
    def times(self) -> str:
        """The ratio, for a sentence."""
        return f"{self._text(self.ratio)} times"

    def _text(self, figure: float) -> str:
        """A figure with the decimals that tell this system's from 1."""
        near = any(0.9 < value < 1.1 for value in (self.ratio, self.low, self.high))
        return f"{figure:.{DIGITS if near else 2}f}"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a table: its rows, the best first, and those that cannot be compared last."""

    baseline: str
    unit: str  # that decides: responses or tokens
    rows: tuple[Judged, ...]

    def __getitem__(self, system: str) -> Judged:
        return next(row for row in self.rows if row.system == system)

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The verdict on every system, by name."""
        return {row.system: row.outcome for row in self.rows}

    @property
    def first(self) -> Judged | None:
        """The row with the best ratio (the best rate where there is no baseline), None if none is comparable."""
        return next((row for row in self.rows if not row.why), None)

    @property
    def faster(self) -> tuple[Judged, ...]:
        """The rows that are faster than the baseline, the best first."""
        return tuple(row for row in self.rows if row.outcome == "faster")

    @property
    def runner_up(self) -> Judged | None:
        """The best row beside the baseline, and beside what is as fast if there is any other; None if there is none."""
        others = [row for row in self.rows if row.system != self.baseline]
        return next((row for row in others if row.outcome != "as fast"), others[0] if others else None)

    def gain(self, row: Judged, tuned: Mapping[str, str] | None = None) -> str:
        """How a row compares with the baseline: ratio, interval, and both rates."""
        over = f"95% interval {row.span} over {row.over}" if row.over else "one seed, no interval"
        return (
            f"{row.times} the {self.unit} per second of {with_choice(self.baseline, tuned or {})} "
            f"({over}; {rate(row.per_s)} against {rate(self[self.baseline].per_s)})"
        )

    def sentences(self, tuned: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """What the table says: who is fastest, or that nobody is; and who cannot be compared, and why.

        `tuned` is what tuned systems chose, by name.
        """
        late: dict[str, list[str]] = {}
        for row in self.rows:
            if row.why:
                late.setdefault(row.why, []).append(row.system)
        whose = "; ".join(f"{', '.join(names)} ({why})" for why, names in late.items())
        return (self._answer(tuned or {}), *((f"Not comparable: {whose}.",) if whose and len(self.rows) > 1 else ()))

    def _answer(self, tuned: Mapping[str, str]) -> str:
        first, known, base = self.first, self.runner_up, with_choice(self.baseline, tuned)
        if len(self.rows) == 1:
            (row,) = self.rows
            return f"{with_choice(row.system, tuned)} trains on {self._rate(row)}; there is nothing to compare it with."
        if first is None or known is None or known.why:
            return f"No system can be compared with {base} yet."
        if first.outcome == "no speedup":
            best = with_choice(first.system, tuned)
            return f"{best} trains on the most: {self._rate(first)}. The baseline {self.baseline} did not run."
        top, gain = with_choice(known.system, tuned), self.gain(known, tuned)
        if known.outcome == "faster":
            return f"{top} is the fastest: {gain}."
        if self.faster:
            surest = self.faster[0]
            sure = f"{with_choice(surest.system, tuned)} is faster than {base}: {self.gain(surest, tuned)}."
            return f"{sure} {top} may be faster still, with {known.times} ({known.span})."
        if known.outcome == "as fast":
            return f"All systems are as fast: {self._rate(known)}."
        apart = known.outcome != "slower"
        nothing = f"Nothing {'is surely faster than' if apart and known.ratio > 1 else 'beats'} {base}"
        equal = [row.system for row in self.rows if row.outcome == "as fast"]
        as_fast = f" {_listed(equal)} {'is' if len(equal) == 1 else 'are'} as fast as {base}." if equal else ""
        return f"{nothing}: {top} {'cannot be told apart from it' if apart else 'comes next'}, with {gain}.{as_fast}"

    def _rate(self, row: Judged) -> str:
        return f"{rate(row.per_s)} {self.unit} per second"


def judge(rows: pd.DataFrame | Iterable[Row], baseline: str) -> Verdict:
    """The verdict on systems of one case that saw the same responses.

    Of every row are read `system`, `speedup` and `token_speedup` with `…_low` and `…_high`, `speedup_model_low` and
    `…_high`, `responses_per_s`, `tokens_per_s` and `unsteady`, as in `Result.summary`; all but `system` and `speedup`
    may be missing.
    """
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    unit, late = _unit(records), {str(row["system"]): _unsteady(row) for row in records}
    judged = [_judged(row, unit, baseline, late) for row in records]

    def rank(row: Judged) -> tuple[float, ...]:
        return (not late[row.system], *(-math.inf if math.isnan(one) else one for one in (row.ratio, row.per_s)))

    return Verdict(baseline, unit, tuple(sorted(judged, key=rank, reverse=True)))


def decided(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with the ratio and the interval that decide as their `speedup` and as their `token_speedup`."""
    records = rows.to_dict("records")
    unit = _unit(records)
    found = pd.DataFrame([_decided(row, unit)[:3] for row in records], index=rows.index, dtype=float)
    columns = {f"{name}{end}": found[i] for name in _RATIO.values() for i, end in enumerate(("", "_low", "_high"))}
    return rows.drop(columns=["speedup_model_low", "speedup_model_high"], errors="ignore").assign(**columns)


def outcome(ratio: float, low: float, high: float) -> Outcome:
    """What a ratio with its interval says; without an interval the ratio alone decides.

    What is 1.00 in print is `as fast`, unless the interval is wide and includes 1.
    """
    if math.isnan(ratio):
        return "no speedup"
    low, high = (ratio, ratio) if math.isnan(low) else (low, high)
    one, *ends = (f"{figure:.2f}" == "1.00" for figure in (ratio, low, high))
    if one and (not low <= 1 <= high or all(ends)):
        return "as fast"
    return "faster" if low > 1 else "slower" if high < 1 else "not told apart"


def _judged(row: Row, unit: str, baseline: str, late: Mapping[str, str]) -> Judged:
    name, per_s = str(row["system"]), _figure(row, RATES[unit])
    why = late[name] or ("its baseline cannot be compared" if late.get(baseline) else "")
    ratio, low, high, over = _decided(row, unit)
    if name == baseline:
        return Judged(name, "baseline", ratio, math.nan, math.nan, "", per_s, why)
    return Judged(name, "not comparable" if why else outcome(ratio, low, high), ratio, low, high, over, per_s, why)


def _decided(row: Row, unit: str) -> tuple[float, float, float, str]:
    """The ratio that decides, its interval, and what that is taken over."""
    ratio, ends = _figure(row, _RATIO[unit]), dict[str, tuple[float, ...]]()
    scale = ratio / _figure(row, "speedup")  # the calibration's errors are known of responses; lengths stay as they are
    for over, name, times in (("seeds", _RATIO[unit], 1.0), ("the calibration's errors", "speedup_model", scale)):
        both = tuple(times * _figure(row, f"{name}{end}") for end in ("_low", "_high"))
        if not math.isnan(both[0]):
            ends[over] = both
    known = [end for both in ends.values() for end in both] or [math.nan]
    return ratio, round(min(known), DIGITS), round(max(known), DIGITS), " and ".join(ends)


def _unit(records: Iterable[Row]) -> str:
    """Tokens where a comparable system trains on other lengths than the baseline (its ratio by tokens is another)."""
    for row in records:
        responses, tokens = _figure(row, "speedup"), _figure(row, "token_speedup")
        if not _unsteady(row) and tokens and abs(responses / tokens - 1) > EXPLAINED:
            return "tokens"
    return "responses"


def _unsteady(row: Row) -> str:
    """Why a row's throughput would not last; "" if it would."""
    return "" if is_missing(why := row.get("unsteady")) else str(why)


def _figure(row: Row, name: str) -> float:
    value = row.get(name)
    return math.nan if is_missing(value) else float(value or 0.0)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
