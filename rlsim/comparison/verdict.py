"""Verdicts on the rows of a comparison: every sentence and colour that says who is faster is made here.

A table is judged in one unit: by the responses that a system trains on per second or, where a comparable system trains
on other lengths than the baseline, by the tokens. One interval decides: it reaches from the lowest to the highest end
of those that are known, over seeds and over the calibration's errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pandas as pd

from rlsim.experiment.notes import EXPLAINED
from rlsim.formats import Row, is_missing, rate, with_choice

Outcome = Literal["baseline", "faster", "as fast", "not told apart", "slower", "not comparable", "no speedup"]

#: Decimals of an interval: it decides by what is in print.
DIGITS = 3
#: By unit: the column of the ratio, and that of the amount per second.
_RATIO = {"responses": "speedup", "tokens": "token_speedup"}
RATES = {"responses": "responses_per_s", "tokens": "tokens_per_s"}
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
        return "" if math.isnan(self.low) else f"[{self.low:.{self.digits}f}, {self.high:.{self.digits}f}]"

    @property
    def digits(self) -> int:
        """Decimals that tell its figures from 1."""
        return DIGITS if any(0.9 < value < 1.1 for value in (self.ratio, self.low, self.high)) else 2


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
        unlike = [row for row in others if row.outcome != "as fast"]
        return next(iter(unlike or others), None)

    def gain(self, row: Judged, tuned: Mapping[str, str] | None = None) -> str:
        """How a row compares with the baseline: ratio, interval, and both rates."""
        interval = f"95% interval {row.low:.{row.digits}f} to {row.high:.{row.digits}f} over {row.over}"
        return (
            f"{row.ratio:.{row.digits}f} times the {self.unit} per second of {self._named(self.baseline, tuned)} "
            f"({interval if row.over else 'one seed, no interval'}; {rate(row.per_s)} against "
            f"{rate(self[self.baseline].per_s)})"
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
        return (self._answer(tuned), *((f"Not comparable: {whose}.",) if whose and len(self.rows) > 1 else ()))

    def _answer(self, tuned: Mapping[str, str] | None) -> str:
        first, base = self.first, self._named(self.baseline, tuned)
        if len(self.rows) == 1:
            (row,) = self.rows
            return f"{self._named(row.system, tuned)} trains on {self._rate(row)}; there is nothing to compare it with."
        if first is None or (known := self.runner_up) is None or known.why:
            return f"No system can be compared with {base} yet."
        if first.outcome == "no speedup":
            best = self._named(first.system, tuned)
            return f"{best} trains on the most: {self._rate(first)}. The baseline {self.baseline} did not run."
        top, gain = self._named(known.system, tuned), self.gain(known, tuned)
        equal = [row.system for row in self.rows if row.outcome == "as fast"]
        as_fast = f" {_listed(equal)} {'is' if len(equal) == 1 else 'are'} as fast as {base}." if equal else ""
        if known.outcome == "faster":
            return f"{top} is the fastest: {gain}."
        if self.faster:
            surest = self.faster[0]
            may = (
                f"{known.ratio:.{known.digits}f} times ({known.low:.{known.digits}f} to {known.high:.{known.digits}f})"
            )
            name = self._named(surest.system, tuned)
            return f"{name} is faster than {base}: {self.gain(surest, tuned)}. {top} may be faster still, with {may}."
        if known.outcome == "as fast":
            return f"All systems are as fast: {self._rate(known)}."
        if known.outcome == "slower":
            return f"Nothing beats {base}: {top} comes next, with {gain}.{as_fast}"
        if known.ratio > 1:
            return f"Nothing is surely faster than {base}: {top} cannot be told apart from it, with {gain}.{as_fast}"
        return f"Nothing beats {base}: {top} cannot be told apart from it, with {gain}.{as_fast}"

    def _rate(self, row: Judged) -> str:
        return f"{rate(row.per_s)} {self.unit} per second"

    @staticmethod
    def _named(system: str, tuned: Mapping[str, str] | None) -> str:
        return with_choice(system, tuned or {})


def judge(rows: pd.DataFrame | Iterable[Row], baseline: str) -> Verdict:
    """The verdict on systems of one case that saw the same responses.

    Of every row are read `system`, `speedup` and `token_speedup` with `…_low` and `…_high`, `speedup_model_low` and
    `…_high`, `responses_per_s`, `tokens_per_s` and `unsteady`, as in `Result.summary`; all but `system` and `speedup`
    may be missing.
    """
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    late = {str(row["system"]): why for row in records if (why := why_not_comparable(row))}
    unit = _unit(records)
    judged = [_judged(row, unit, baseline, late) for row in records]
    missing = -math.inf
    judged.sort(
        key=lambda row: (
            row.system not in late,
            missing if math.isnan(row.ratio) else row.ratio,
            missing if math.isnan(row.per_s) else row.per_s,
        ),
        reverse=True,
    )
    return Verdict(baseline, unit, tuple(judged))


def decided(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with the ratio and the interval that decide as their `speedup`, `speedup_low` and `speedup_high`."""
    records = rows.to_dict("records")
    unit = _unit(records)
    found = [_decided(row, unit)[:3] for row in records]
    names = ("speedup", "speedup_low", "speedup_high")
    ratios = pd.DataFrame(found, columns=names, index=rows.index, dtype=float)
    return rows.drop(columns=["speedup_model_low", "speedup_model_high"], errors="ignore").assign(
        **ratios, token_speedup=ratios["speedup"], token_speedup_low=ratios["speedup_low"],
        token_speedup_high=ratios["speedup_high"],
    )  # fmt: skip


def outcome(ratio: float, low: float, high: float) -> Outcome:
    """What a ratio with its interval says; without an interval the ratio alone decides.

    What is 1.00 in print is `as fast`, unless the interval is wide and includes 1.
    """
    if math.isnan(ratio):
        return "no speedup"
    low, high = (ratio, ratio) if math.isnan(low) else (low, high)
    if _is_one(ratio) and (not low <= 1 <= high or (_is_one(low) and _is_one(high))):
        return "as fast"
    return "faster" if low > 1 else "slower" if high < 1 else "not told apart"


def why_not_comparable(row: Row) -> str:
    """Why a row's throughput would not last; "" if it would."""
    return "" if is_missing(why := row.get("unsteady")) else str(why)


def _judged(row: Row, unit: str, baseline: str, late: Mapping[str, str]) -> Judged:
    name, per_s = str(row["system"]), _figure(row, RATES[unit])
    why = late.get(name) or ("its baseline cannot be compared" if baseline in late else "")
    ratio, low, high, over = _decided(row, unit)
    if name == baseline:
        return Judged(name, "baseline", ratio, math.nan, math.nan, "", per_s, why)
    return Judged(name, "not comparable" if why else outcome(ratio, low, high), ratio, low, high, over, per_s, why)


def _decided(row: Row, unit: str) -> tuple[float, float, float, str]:
    """The ratio that decides, its interval, and what that is taken over."""
    column = _RATIO[unit]
    ratio = _figure(row, column)
    scale = ratio / _figure(row, "speedup")  # the calibration's errors are known of responses; lengths stay as they are
    seeds = [_figure(row, f"{column}{end}") for end in ("_low", "_high")]
    model = [scale * _figure(row, f"speedup_model{end}") for end in ("_low", "_high")]
    known = {"seeds": seeds, "the calibration's errors": model}
    known = {what: ends for what, ends in known.items() if not math.isnan(ends[0])}
    ends = [end for pair in known.values() for end in pair] or [math.nan]
    return ratio, round(min(ends), DIGITS), round(max(ends), DIGITS), " and ".join(known)


def _unit(records: Iterable[Row]) -> str:
    """Tokens where a comparable system trains on other lengths than the baseline, else responses."""
    return "tokens" if any(not why_not_comparable(row) and _lengths_differ(row) for row in records) else "responses"


def _lengths_differ(row: Row) -> bool:
    """Whether a system trains on other lengths than the baseline: its ratio by tokens is another."""
    responses, tokens = _figure(row, "speedup"), _figure(row, "token_speedup")
    return abs(responses / tokens - 1) > EXPLAINED if tokens else False


def _figure(row: Row, name: str) -> float:
    value = row.get(name)
    return math.nan if is_missing(value) else float(value or 0.0)


def _is_one(ratio: float) -> bool:
    """Whether a ratio is 1.00 in print."""
    return f"{ratio:.2f}" == "1.00"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
