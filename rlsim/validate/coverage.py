"""Whether stated intervals hold: how many measurements lie inside the interval that others allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from rlsim.cost.draw import MIDDLE_BATCH
from rlsim.cost.packing import Floats
from rlsim.validate.rows import Row

CONFIDENCE = 0.9


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
    """The straight line through the errors of one setting."""
    tilt, level = np.polyfit(errors[:, 0], errors[:, 1], 1)
    rest = errors[:, 1] - level - tilt * errors[:, 0]
    return Line(float(level), float(tilt), float(np.sqrt((rest**2).sum() / max(len(rest) - 2, 1))))


def spread(lines: Iterable[Line]) -> Line:
    """Standard deviations of `level`, `tilt` and `noise` over the settings, around zero."""
    return Line(*np.sqrt((np.array(list(lines)) ** 2).mean(axis=0)).tolist())


def inside(errors: Mapping[str, Floats]) -> dict[str, float]:
    """By setting: the share of its runs inside the 90% interval that the *other* settings' errors allow."""
    lines = {setting: line(own) for setting, own in errors.items()}
    found = {}
    for setting, own in errors.items():
        others = [other for name, other in lines.items() if name != setting]
        level, tilt, noise = spread(others)
        half = quantile(len(others)) * np.sqrt(level**2 + (tilt * own[:, 0]) ** 2 + noise**2)
        found[setting] = float((np.abs(own[:, 1]) <= half).mean())
    return found


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
