"""A calibration in the making: what has been fitted so far, what is another calibration's, and what nothing gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Calibration, Engine, Reference, Residual, Source, calibration_names
from rlsim.errors import CalibrationError

# Points ---------------------------------------------------------------------------------------------------------------

# Measured against fitted, point by point: what the chart draws and the residuals sum up.

#: `error` = fitted / measured - 1; `held_out`: the fit has not seen the point.
COLUMNS = ("operator", "label", "measured_s", "fitted_s", "error", "held_out")
#: Values by variable, a table's columns among them: what was measured over which range.
Ranges = pd.DataFrame | Mapping[str, ArrayLike]
T_co = TypeVar("T_co", covariant=True)


def point_rows(
    operator: str,
    labels: Sequence[str],
    measured_s: Iterable[float],
    fitted_s: Iterable[float],
    held_out: NDArray[Any] | Sequence[bool] | bool,
) -> pd.DataFrame:
    """The points of one operator as a table with `COLUMNS`, one row for each label."""
    frame = pd.DataFrame(
        {
            "operator": [operator] * len(labels),
            "label": list(labels),
            "measured_s": np.fromiter(measured_s, float, len(labels)),
            "fitted_s": np.fromiter(fitted_s, float, len(labels)),
            "held_out": np.broadcast_to(np.asarray(held_out, dtype=bool), len(labels)),
        }
    )
    frame["error"] = frame.fitted_s / frame.measured_s - 1.0
    return frame[list(COLUMNS)]


def join(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """All points in one table; an empty one with the same columns if there are none."""
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else point_rows("", [], [], [], [])


def error_sizes(errors: NDArray[np.float64]) -> dict[str, float]:
    """Mean, median and 90th percentile of the size of relative errors, and their median (`bias`)."""
    size = np.abs(errors)
    found = {"mean": size.mean(), "median": np.median(size), "p90": np.quantile(size, 0.9), "bias": np.median(errors)}
    return {name: float(value) for name, value in found.items()}


def residual(predicted: Iterable[float], measured: Iterable[float], ranges: Ranges, note: str = "") -> Residual:
    """Error statistics of a prediction and the ranges it was measured over."""
    errors = np.fromiter(predicted, float) / np.fromiter(measured, float) - 1.0
    sizes = error_sizes(errors)
    return Residual(
        count=len(errors),
        median=sizes["median"],
        p90=sizes["p90"],
        bias=sizes["bias"],
        ranges={str(name): (float(np.min(values)), float(np.max(values))) for name, values in ranges.items()},
        note=note,
    )


def residual_of(points: pd.DataFrame, ranges: Ranges, note: str) -> Residual:
    """The residual of the held-out points; of all of them, and the note says so, if none is held out."""
    unseen = points[points.held_out]
    if unseen.empty:
        unseen, note = points, f"in sample: {note}"
    return residual(unseen.fitted_s, unseen.measured_s, ranges, note)


@dataclass(frozen=True)
class Fitted(Generic[T_co]):
    """What is fitted to some tables, its residuals by name, its points, and notes on what was not measured."""

    fit: T_co
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    points: pd.DataFrame = field(default_factory=lambda: join([]))
    notes: tuple[str, ...] = ()


# A calibration in the making ------------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass
class Parts:
    """What has been fitted so far, what is the base's, and what nothing gives."""

    measured: Measurements
    name: str
    gpu: str
    engine: Engine
    reference: Reference
    base: Calibration | None
    notes: list[str]
    residuals: dict[str, Residual] = field(default_factory=dict)
    points: list[pd.DataFrame] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not any(operator in self.measured for operator in self.measured.tables):
            raise CalibrationError(f"{self.name}: nothing was measured, every table is empty")

    def add(self, part: Fitted[T]) -> T:
        self.residuals.update(part.residuals)
        self.points.append(part.points)
        self.notes.extend(part.notes)
        return part.fit

    def take(
        self, what: str, own: Fitted[T | None] | None, lent: T | None, otherwise: str = "", *operators: str
    ) -> T | None:
        """What was fitted; else what the base lends, noted as `what` with the residuals of these operators (by default
        of that name). Without either there is none, and `otherwise` is missing."""
        if own is not None and (fit := self.add(own)) is not None:
            return fit
        if lent is not None:
            self.borrowed.append(what)
            self.borrow_residuals(*(operators or (what,)))
        elif otherwise:
            self.missing.append(otherwise)
        return lent

    def borrow_residuals(self, *operators: str) -> None:
        """The base's residuals of these operators, marked as not this calibration's own."""
        if self.base is not None:
            self.residuals |= {
                key: item.model_copy(update={"note": f"of {self.base.name}, not measured here. {item.note}".strip()})
                for operator in operators
                for key, item in self.base.residuals.items()
                if key == operator or key.startswith(f"{operator}_")
            }

    def check(self) -> None:
        """Raises `CalibrationError` if anything is missing, with the nearest calibration that could give it."""
        if not self.missing:
            return
        known = calibration_names()
        same = [one for one in known if one.startswith(f"{self.gpu}-")]
        same = same or [one for one in known if one.endswith(f"-{self.engine}")]
        own = f"{self.gpu}-{self.engine}"
        near = own if own in known else next(iter(same), next(iter(known), "NAME"))
        raise CalibrationError(
            f"{self.name}: not measured: {', '.join(self.missing)}; measure it, or take it from another calibration: "
            f"--base {near}"
        )

    def sources(self) -> tuple[Source, ...]:
        """Where the numbers are from: the measurements, and the base's sources if anything is taken from it."""
        own = Source(project="own measurements", commit="as measured", licence="own", files=())
        sources = self.measured.sources or (own,)
        borrowed = self.base.provenance.sources if self.base is not None and self.borrowed else ()
        return tuple(dict.fromkeys((*sources, *borrowed)))
