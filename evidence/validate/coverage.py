"""Whether stated intervals hold: how many measurements lie inside the interval that others allow.

Errors of training calls are made by `scripts/fit_calibrations.py transfer`, which fits a training stack without each
group of runs, and lie in `transfer_calls.yaml`. Nothing is fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import Field
from scipy.special import stdtrit

from evidence.validate.rows import Row, markdown
from rlsim.base.schema import Schema, load
from rlsim.cost.assumed import MIDDLE_BATCH
from rlsim.cost.flops import Floats

CONFIDENCE = 0.9
CALLS = Path(__file__).with_name("transfer_calls.yaml")

#: A run that the model of a training stack cannot tell: its log has 20 to 36 s in every call that no tokens change.
OUTLIER = "veRL row 4"


class Line(NamedTuple):
    """The straight line through the log errors of a setting's runs over the doublings of their users.

    `level` is its value at `MIDDLE_BATCH` users, `tilt` its slope, and `noise` the errors' deviation from it.
    """

    level: float
    tilt: float
    noise: float


def errors_by_setting(rows: Iterable[Row], quantity: str) -> dict[str, Floats]:
    """By setting of the serving runs: an array of (doublings of `MIDDLE_BATCH` users, log error), one row per run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.quantity == quantity:
            setting, _, run = row.case.rpartition("/")
            doublings = np.log2(int(run.rpartition("x")[2]) / MIDDLE_BATCH)
            found.setdefault(setting, []).append((doublings, np.log1p(row.error)))
    return {setting: np.array(errors) for setting, errors in found.items()}


def line(errors: Floats) -> Line:
    """The straight line through the errors of one setting; flat through runs of fewer than three numbers of users."""
    if len(np.unique(errors[:, 0])) < 3:
        return Line(float(errors[:, 1].mean()), math.nan, float(errors[:, 1].std()))
    tilt, level = np.polyfit(errors[:, 0], errors[:, 1], 1)
    rest = errors[:, 1] - level - tilt * errors[:, 0]
    return Line(float(level), float(tilt), float(np.sqrt((rest**2).sum() / max(len(rest) - 2, 1))))


class Spread(NamedTuple):
    """Standard deviations of log errors around zero, over families: a model on a GPU under an engine.

    `family`: of the mean of a family's settings; `setting`: of a setting's level beside it. `tilt` and
    `noise`: see `Line`.
    """

    family: float
    setting: float
    tilt: float
    noise: float


def spread(errors: Mapping[str, Floats]) -> Spread:
    """Of errors by setting, whose name begins with its family's (all but its last component)."""
    lines = {setting: line(own) for setting, own in errors.items()}
    levels: dict[str, list[float]] = {}
    for setting, one in lines.items():
        levels.setdefault(_family(setting), []).append(one.level)
    means = {family: float(np.mean(own)) for family, own in levels.items()}
    freedom = len(lines) / max(len(lines) - len(means), 1)  # each family's mean is made of its settings
    beside = np.sqrt(freedom) * np.array([one.level - means[_family(setting)] for setting, one in lines.items()])
    tilts = [one.tilt for one in lines.values() if not math.isnan(one.tilt)] or [0.0]
    columns = (list(means.values()), beside, tilts, [one.noise for one in lines.values()])
    return Spread(*(float(np.sqrt(np.mean(np.square(column)))) for column in columns))


def inside(errors: Mapping[str, Floats]) -> dict[str, float]:
    """By setting: the share of its runs inside the 90% interval that the errors of the *other* families allow."""
    found = {}
    for setting, own in errors.items():
        others = {name: other for name, other in errors.items() if _family(name) != _family(setting)}
        family, level, tilt, noise = spread(others)
        half = np.sqrt(family**2 + level**2 + (tilt * own[:, 0]) ** 2 + noise**2)
        half *= quantile(len({_family(name) for name in others}))
        found[setting] = float((np.abs(own[:, 1]) <= half).mean())
    return found


def _family(setting: str) -> str:
    return setting.rpartition("/")[0]


def level_spread(errors: Mapping[str, Floats]) -> float:
    """Standard deviation of log errors around zero; every setting counts alike, however many errors it has."""
    return float(np.sqrt(np.mean([np.mean(own**2) for own in errors.values()])))


def levels_inside(errors: Mapping[str, Floats]) -> dict[str, int]:
    """By setting: how many of its log errors lie inside the 90% interval that the *other* settings' errors allow.

    Unlike in `inside`, the errors do not depend on the number of users.
    """
    found = {}
    for setting, own in errors.items():
        others = {name: other for name, other in errors.items() if name != setting}
        found[setting] = int((np.abs(own) <= quantile(len(others)) * level_spread(others)).sum())
    return found


def counted(errors: Mapping[str, Floats], settings: Iterable[str]) -> list[tuple[str, str]]:
    """For each of some settings, and for all together last: how many errors, and how many of them lie inside.

    A setting that has none has two empty cells.
    """
    inside_of, number = levels_inside(errors), {setting: len(own) for setting, own in errors.items()}
    cells = [(str(number[name]), str(inside_of[name])) if name in errors else ("", "") for name in settings]
    inside_all, total = sum(inside_of.values()), sum(number.values())
    return [*cells, (str(total), f"{inside_all} ({inside_all / total:.0%})")]


def quantile(settings: int) -> float:
    """Half of the 90% interval in standard deviations that were estimated from so many settings (Student's t)."""
    return float(stdtrit(settings, 0.5 + CONFIDENCE / 2))


class LeftOutCalls(Schema):
    """Runs that were left out of a fit together."""

    runs: tuple[str, ...]
    errors: tuple[float, ...] = Field(description="of log-probs and update of each run: rlsim / measured - 1")

    @property
    def name(self) -> str:
        """The names of the runs."""
        return ", ".join(self.runs)


class TransferCalls(Schema):
    """The errors, and where they come from."""

    date: str
    script: str
    source: str
    left_out: tuple[LeftOutCalls, ...]

    def log_errors(self, outlier: bool = True) -> dict[str, Floats]:
        """By name of what was left out; with the run of `OUTLIER` or without."""
        kept = [group for group in self.left_out if outlier or group.name != OUTLIER]
        return {group.name: np.log1p(np.array(group.errors)) for group in kept}


@cache
def shipped_calls() -> TransferCalls:
    """The errors that come with rlsim."""
    return load(CALLS, TransferCalls)


def calls_table() -> str:
    """How many calls lie inside the 90% interval that the other groups' errors allow, with the outlier and without."""
    groups = shipped_calls().left_out
    names = [group.name for group in groups]
    both = [counted(shipped_calls().log_errors(outlier), names) for outlier in (False, True)]
    ranges = [f"{min(group.errors):+.0%} to {max(group.errors):+.0%}" for group in groups]
    cells = [
        (name, errors, *without, *all_of_them)
        for name, errors, without, all_of_them in zip([*names, "all"], [*ranges, ""], *both, strict=True)
    ]
    return markdown(("left out", "errors", f"calls without {OUTLIER}", "inside", "calls with it", "inside"), cells)
