"""Verdicts on the rows of a comparison: every sentence and colour that says who is faster is made here.

A table is judged in one unit: by the responses that a system trains on per second or, where a comparable system trains
on other lengths than the baseline, by the tokens. One interval decides: it reaches from the lowest to the highest end
of those that are known, over seeds and over the calibration's errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from rlsim.base.formats import Row, listed, rate, with_choice
from rlsim.experiment.summary import ENDS, EXPLAINED

Outcome = Literal["baseline", "faster", "as fast", "not told apart", "slower", "not comparable", "no speedup"]

#: Decimals of an interval: it decides by what is in print.
DIGITS = 3
#: A half that is left of these, which binary numbers fall short of, is printed as the next hundredth.
HALF = 1e-9
#: By unit: the column of the amount per second, and that of the ratio.
RATES = {"responses": "responses_per_s", "tokens": "tokens_per_s"}
_RATIO = {"responses": "speedup", "tokens": "token_speedup"}


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
    def texts(self) -> list[str]:
        """The ratio and the interval's ends, with the decimals that tell this system's from 1."""
        figures = (self.ratio, self.low, self.high)
        digits = DIGITS if any(0.9 < figure < 1.1 for figure in figures) else 2
        return [f"{figure + HALF:.{digits}f}" for figure in figures]

    @property
    def interval(self) -> str:
        return "" if math.isnan(self.low) else "[{1}, {2}]".format(*self.texts)


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
        return {row.system: row.outcome for row in self.rows}

    @property
    def first(self) -> Judged | None:
        """The row with the best ratio (the best rate where there is no baseline), None if none is comparable."""
        return next((row for row in self.rows if not row.why), None)

    @property
    def faster(self) -> tuple[Judged, ...]:
        return tuple(row for row in self.rows if row.outcome == "faster")

    @property
    def runner_up(self) -> Judged | None:
        """The best row beside the baseline, and beside what is as fast if there is any other; None if there is none."""
        others = [row for row in self.rows if row.system != self.baseline]
        return next((row for row in others if row.outcome != "as fast"), others[0] if others else None)

    def gain(self, row: Judged, tuned: Mapping[str, str] | None = None) -> str:
        ratio, low, high = row.texts
        over = f"95% interval {low} to {high} over {row.over}" if row.over else "one seed, no interval: more seeds tell"
        return (
            f"{ratio} times the {self.unit} per second of {with_choice(self.baseline, tuned or {})} "
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
        what = "Not comparable" if len(self.rows) > 1 else "Not steady"
        return (self._answer(tuned or {}), *((f"{what}: {whose}.",) if whose else ()))

    def _answer(self, tuned: Mapping[str, str]) -> str:
        first, known, base = self.first, self.runner_up, with_choice(self.baseline, tuned)
        per_s = f"{rate((first or self.rows[0]).per_s)} {self.unit} per second"
        best = with_choice((first or self.rows[0]).system, tuned)
        if len(self.rows) == 1:
            return f"{best} trains on {per_s}; there is nothing to compare it with."
        if first is None or known is None or known.why:
            return f"No system can be compared with {base} yet."
        if first.outcome == "no speedup":
            return f"{best} trains on the most: {per_s}. The baseline {self.baseline} did not run."
        top, gain = with_choice(known.system, tuned), self.gain(known, tuned)
        if known.outcome == "faster":
            return f"{top} is the fastest: {gain}."
        if self.faster:
            surest, (ratio, low, high) = self.faster[0], known.texts
            sure = f"{with_choice(surest.system, tuned)} is faster than {base}: {self.gain(surest, tuned)}."
            return f"{sure} {top} may be faster still, with {ratio} times ({low} to {high})."
        if known.outcome == "as fast":
            return f"All systems are as fast: {rate(known.per_s)} {self.unit} per second."
        apart = known.outcome != "slower"
        nothing = f"Nothing {'is surely faster than' if apart and known.ratio > 1 else 'beats'} {base}"
        equal = [row.system for row in self.rows if row.outcome == "as fast"]
        as_fast = f" {listed(equal, 4)} {'is' if len(equal) == 1 else 'are'} as fast as {base}." if equal else ""
        return f"{nothing}: {top} {'cannot be told apart from it' if apart else 'comes next'}, with {gain}.{as_fast}"


def judge(rows: pd.DataFrame | Iterable[Row], baseline: str) -> Verdict:
    """The verdict on systems of one case that saw the same responses.

    Of every row are read `system`, `speedup` and `token_speedup` with `…_low` and `…_high`, `speedup_model_low` and
    `…_high`, `responses_per_s`, `tokens_per_s` and `unsteady`, as in `Result.summary`; all but `system` and `speedup`
    may be missing.
    """
    table = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    unit, figures, over = _decided(table)
    names, late = table["system"].astype(str).to_numpy(), _unsteady(table)
    per_s = table.reindex(columns=[RATES[unit]]).to_numpy(float)[:, 0]
    waits = "its baseline cannot be compared" if (late[names == baseline] != "").any() else ""
    judged = []
    for i in np.lexsort((-per_s, -figures[:, 0], late != "")).tolist():  # what is missing comes last
        name, why, (ratio, low, high), known = str(names[i]), str(late[i]) or waits, figures[i].tolist(), over[i]
        said = "not comparable" if why else outcome(ratio, low, high)
        if name == baseline:
            said, low, high, known = "baseline", math.nan, math.nan, ""
        judged.append(Judged(name, said, ratio, low, high, known, float(per_s[i]), why))
    return Verdict(baseline, unit, tuple(judged))


def decided(rows: pd.DataFrame, verdicts: Mapping[tuple[str, str], Verdict]) -> pd.DataFrame:
    """Rows of several points and cases, with what decides at each (`verdicts`) as their `speedup` and `token_speedup`,
    its `unit`, and why they cannot be compared as `unsteady`."""
    whole = [verdicts[key] for key in zip(rows["point"], rows["case"], strict=True)]
    judged = [one[system] for one, system in zip(whole, rows["system"], strict=True)]
    figures = np.array([(row.ratio, row.low, row.high) for row in judged]).reshape(-1, 3)
    columns: dict[str, Any] = {f"{n}{end}": figures[:, i] for n in _RATIO.values() for i, end in enumerate(ENDS)}
    columns |= {"unit": [one.unit for one in whole], "unsteady": [row.why for row in judged]}
    return rows.drop(columns=["speedup_model_low", "speedup_model_high"], errors="ignore").assign(**columns)


def _decided(rows: pd.DataFrame) -> tuple[str, Any, list[str]]:
    """The unit that decides; of every row the ratio in it, with the interval that decides; and what that is over.

    Tokens decide where a comparable system trains on other lengths than the baseline: its ratio by tokens is another.
    """
    columns = [f"{name}{end}" for name in (*_RATIO.values(), "speedup_model") for end in ENDS]
    responses, tokens, errors = np.split(rows.reindex(columns=columns).to_numpy(float), 3, axis=1)
    unlike = abs(responses[:, 0] / tokens[:, 0] - 1) > EXPLAINED
    unit, own = ("tokens", tokens) if (unlike & (_unsteady(rows) == "")).any() else ("responses", responses)
    errors = errors * own[:, :1] / responses[:, :1]  # they are known of responses; lengths stay as they are
    ends = np.fmin(own, errors)[:, 1], np.fmax(own, errors)[:, 2]
    known = ~np.isnan([own[:, 1], errors[:, 1]]).T
    over = [" and ".join(np.array(["seeds", "the calibration's errors"])[row]) for row in known]
    return unit, np.column_stack([own[:, 0], *(end.round(DIGITS) for end in ends)]), over


def _unsteady(rows: pd.DataFrame) -> Any:
    found = rows.reindex(columns=["unsteady"])["unsteady"]
    return found.where(found.notna(), "").to_numpy(str)


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
