"""What a sweep's JSON files must hold: its definition, and for each point that is done the SHA-256 of its files."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from rlsim.experiment.manifest import Manifest
from rlsim.records import Record
from rlsim.sweeps.tables import COLUMNS, TAKEN, AxisColumn

PointName = Annotated[str, Field(pattern=r"^p[0-9a-f]{16}$")]
_KINDS = {"int64": int, "float64": float, "string": str, "bool": bool}


class PointRecord(Record):
    """A point, and its value on every axis by column."""

    point: PointName
    axes: dict[str, int | float | str | bool | None]


class SweepRecord(Record):
    """`sweep.json`."""

    rlsim: str
    name: str
    tables: list[str]
    base: dict[str, Any]
    inputs: dict[str, str] = Field(default={})
    axes: list[AxisColumn]
    points: list[PointRecord] = Field(min_length=1)

    @field_validator("tables")
    @classmethod
    def _known(cls, tables: list[str]) -> list[str]:
        for name in set(tables) - set(COLUMNS):
            raise ValueError(f"unknown table {name!r}; expected some of: {', '.join(COLUMNS)}")
        for name in {"steps", "summary"} - set(tables):
            raise ValueError(f"{name!r} is missing")
        return tables

    @model_validator(mode="after")
    def _consistent(self) -> SweepRecord:
        kinds = {axis.name: _KINDS[axis.dtype] for axis in self.axes}
        if len(kinds) < len(self.axes):
            raise ValueError("axes: a name appears twice")
        for name in TAKEN & set(kinds):
            raise ValueError(f"axes: {name!r} is a column of tables")
        if len({point.point for point in self.points}) < len(self.points):
            raise ValueError("points: a name appears twice")
        for i, point in enumerate(self.points):
            if set(point.axes) != set(kinds):
                raise ValueError(f"points.{i}.axes: expected a value for each of: {', '.join(kinds) or '(none)'}")
            for name, value in point.axes.items():
                fits = type(value) is kinds[name] and (type(value) is not int or -(2**63) <= value < 2**63)
                fits = fits and (type(value) is not float or math.isfinite(value))
                if value is not None and not fits:
                    raise ValueError(f"points.{i}.axes.{name}: expected {kinds[name].__name__}, got {value!r}")
        return self


class DoneRecord(Record):
    """`done/p….json`: the SHA-256 of every file of a point."""

    point: PointName
    files: dict[str, str]


class FailedRecord(Record):
    """`failed/p….json`: why a point has no results."""

    error: str
    details: str = ""


class PointManifest(Manifest):
    """The record that the files of a point carry in their metadata."""

    point: PointName
