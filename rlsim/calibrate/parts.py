"""A calibration in the making: what has been fitted so far, what is another calibration's, and what nothing gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import pandas as pd

from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.points import Fitted
from rlsim.cost.calibration import Calibration, Engine, Reference, Residual, Source, calibration_names
from rlsim.errors import CalibrationError

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
