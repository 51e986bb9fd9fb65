"""What was measured so far, one line a point, so that an interruption loses the point under way and no more."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from rlsim.calibrate.measure.host import MachineFacts
from rlsim.calibrate.measurements import KEYS, Measurements
from rlsim.cost.calibration import Source
from rlsim.errors import CalibrationError

VERSION = 1
_BEGIN = b'{"journal": '


@dataclass(frozen=True)
class Point:
    """One row to measure: an operator and the values of its key columns, in the order of `measurements.KEYS`."""

    operator: str
    values: tuple[str | float, ...]

    def row(self) -> dict[str, Any]:
        return dict(zip(KEYS[self.operator], self.values, strict=True))


@dataclass(frozen=True)
class Result:
    """What became of a point: its time, or, in `refused`, why there is none. `took_s` is what finding out cost."""

    point: Point
    seconds: float
    spread: float
    repeats: int
    took_s: float
    refused: str = ""


@dataclass
class Journal:
    """The journal file of one calibration run, open for more results."""

    path: Path
    machine: MachineFacts
    results: dict[Point, Result] = field(default_factory=dict)

    @staticmethod
    def start(path: Path, machine: MachineFacts, *, fresh: bool = False) -> Journal:
        """The journal at `path`, begun for `machine`, or gone on with if there is one.

        A last line cut short by an interruption is removed. Raises `CalibrationError` if the journal there is damaged
        or of another machine, model or version; `fresh` discards it instead.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.read_bytes() if path.exists() else b""
            if fresh and there and not there.startswith(_BEGIN):
                raise CalibrationError(f"{path}: is not rlsim's journal; move it away, or give another --out")
            if not fresh and b"\n" in there:
                journal = read_journal(path)
                machine.check_same(journal.machine, path)
                os.truncate(path, there.rindex(b"\n") + 1)
                return journal
            first = json.dumps({"journal": VERSION, "machine": machine.model_dump(mode="json")})
            path.write_text(first + "\n", encoding="utf-8")
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be written: {error.strerror}") from None
        return Journal(path, machine)

    def add(self, result: Result) -> None:
        """Keeps a result, on disk before this returns."""
        line: dict[str, Any] = {"operator": result.point.operator, **result.point.row()}
        line |= {name: getattr(result, name) for name in ("seconds", "spread", "repeats", "took_s")}
        if result.refused:
            line["refused"] = result.refused
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CalibrationError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.results[result.point] = result

    @property
    def spent_s(self) -> float:
        """Seconds that measuring took so far, over all runs."""
        return sum(result.took_s for result in self.results.values())

    def refused(self) -> list[Result]:
        """The points without a time: noisy, or beyond what the device can do."""
        return [result for result in self.results.values() if result.refused]

    def measurements(self, notes: Iterable[str] = ()) -> Measurements:
        """The measured points as tables; refused points are in none."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for result in self.results.values():
            if not result.refused:
                row = {**result.point.row(), "seconds": result.seconds, "spread": result.spread}
                rows.setdefault(result.point.operator, []).append(row)
        source = Source(
            project=f"own measurement on {self.machine.name}",
            commit=f"rlsim {self.machine.versions.get('rlsim', '')}".strip(),
            licence="own",
            files=(self.path.name,),
            engine_version=f"torch {self.machine.versions.get('torch', '')}".strip(),
        )
        return Measurements({name: pd.DataFrame(found) for name, found in rows.items()}, (source,), tuple(notes))


def read_journal(path: Path) -> Journal:
    """The journal at `path`, without a last line that was cut short. Raises `CalibrationError` if it is missing, empty
    or damaged."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line break was cut short while written
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from None
    journal: Journal | None = None
    for number, raw in enumerate(lines, 1):
        try:
            line = json.loads(raw)
            if not isinstance(line, dict):
                raise ValueError("expected an object")
            if journal is None:
                journal = Journal(path, _machine(line))
            else:
                result = _result(line)
                journal.results[result.point] = result
        except (ValueError, KeyError, TypeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise CalibrationError(
                f"{path}:{number}: damaged journal line: {reason}; mend it, or begin anew with --fresh"
            ) from None
    if journal is None:
        raise CalibrationError(f"{path}: the journal is empty")
    return journal


def _machine(line: dict[str, Any]) -> MachineFacts:
    if line.get("journal") != VERSION:
        raise ValueError(f"expected a journal of version {VERSION}, got {line.get('journal')!r}")
    try:
        return MachineFacts.model_validate(line["machine"])
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"machine.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _result(line: dict[str, Any]) -> Result:
    operator = line["operator"]
    if operator not in KEYS:
        raise ValueError(f"unknown operator {operator!r}")
    point = Point(operator, tuple(line[name] for name in KEYS[operator]))
    seconds, spread, refused = float(line["seconds"]), float(line["spread"]), str(line.get("refused", ""))
    if not refused and not (math.isfinite(seconds) and seconds > 0.0):
        raise ValueError(f"expected a positive time, got {line['seconds']!r}")
    return Result(point, seconds, spread, int(line["repeats"]), float(line["took_s"]), refused)
