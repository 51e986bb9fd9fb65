"""The measuring itself: point after point until the budget is spent, and noisy points more than one chance. What was
measured is kept at once, one line a point, so that an interruption loses the point under way and no more."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import pandas as pd
from pydantic import Field, ValidationError, field_validator

from rlsim.base.schema import Schema
from rlsim.calibrate.measure.clock import NOISY, NOISY_ONCE, Timing
from rlsim.calibrate.measure.host import MachineFacts
from rlsim.calibrate.measurements import KEYS, Measurements
from rlsim.cost.calibration import Source
from rlsim.errors import CalibrationError

ATTEMPTS = 4  # at a noisy point
BETWEEN = 100  # other points before the next attempt, about a round: what disturbs a machine passes
ONCE = ("control", "graph_capture")  # operators that a layout change runs once
KINDS = ("", "noisy", "impossible")  # of refusals; none if a point was measured


S = TypeVar("S", bound=Schema)
#: Is told the point to measure next, how many of how many are done, and the seconds spent.
Report = Callable[["Point", int, int, float], None]


class Point(NamedTuple):
    """One row to measure: an operator and the values of its key columns, in the order of `measurements.KEYS`."""

    operator: str
    values: tuple[int | float | str, ...]

    def row(self) -> dict[str, Any]:
        return dict(zip(KEYS[self.operator], self.values, strict=True))


class Result(Schema):
    """What became of a point: its time, or, in `refused`, why there is none. `took_s` is what finding out cost."""

    point: Point
    seconds: Annotated[float, Field(ge=0)]
    spread: float = 0.0
    repeats: int = 0
    took_s: float
    refused: Annotated[str, Field(pattern=r"^((noisy|impossible): .*)?$")] = ""

    @field_validator("point")
    @classmethod
    def _of_the_table(cls, point: Point) -> Point:
        if len(KEYS.get(point.operator, ())) != len(point.values):
            raise ValueError(f"no values of an operator: {point.operator} {point.values}")
        return point


@dataclass
class Journal:
    """The journal file of one calibration run, open for more results: the machine, then a line for each result."""

    path: Path
    machine: MachineFacts
    results: dict[Point, Result] = field(default_factory=dict)

    @staticmethod
    def start(path: Path, machine: MachineFacts, *, fresh: bool = False) -> Journal:
        """The journal at `path`, begun for `machine`, or gone on with if there is one.

        A last line cut short by an interruption is removed. Raises `CalibrationError` if the journal there is damaged
        or of another machine or model; `fresh` discards it instead.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.read_bytes() if path.exists() else b""
            if there and not there.startswith(b'{"device":'):
                raise CalibrationError(f"{path}: is not rlsim's journal; move it away, or give another --out")
            lines = [] if fresh else there.split(b"\n")[:-1]  # what follows the last line break was cut short
            if not lines:
                path.write_text(machine.model_dump_json() + "\n", encoding="utf-8")
                return Journal(path, machine)
            before = _line(path, 1, lines[0], MachineFacts)
            machine.check_same(before, path)
            results = [_line(path, number, line, Result) for number, line in enumerate(lines[1:], 2)]
            os.truncate(path, there.rindex(b"\n") + 1)
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be written: {error.strerror}") from None
        return Journal(path, before, {result.point: result for result in results})

    def add(self, result: Result) -> None:
        """Keeps a result, on disk before this returns."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(result.model_dump_json(exclude_defaults=True) + "\n")
        except OSError as error:
            raise CalibrationError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.results[result.point] = result

    @property
    def spent_s(self) -> float:
        """Seconds that measuring took so far, over all runs."""
        return sum(result.took_s for result in self.results.values())

    def measurements(self, notes: Iterable[str] = ()) -> Measurements:
        """The measured points as tables; refused points are in none."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for point, result in self.results.items():
            if not result.refused:
                row = {**point.row(), "seconds": result.seconds, "spread": result.spread}
                rows.setdefault(point.operator, []).append(row)
        versions = self.machine.versions
        source = Source(
            project=f"own measurement on {self.machine.name}",
            commit=f"rlsim {versions.get('rlsim', '')}".strip(),
            licence="own",
            files=(self.path.name,),
            engine_version=f"torch {versions.get('torch', '')}".strip(),
        )
        return Measurements({name: pd.DataFrame(found) for name, found in rows.items()}, (source,), tuple(notes))


def _line(path: Path, number: int, line: bytes, kind: type[S]) -> S:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CalibrationError(
            f"{path}:{number}: damaged journal line: {reason}; mend it, or begin anew with --fresh"
        ) from None


def limit(operator: str) -> float:
    """The spread beyond which a point of this operator is refused."""
    return NOISY_ONCE if operator in ONCE else NOISY


def run_suite(
    points: Sequence[Point],
    journal: Journal,
    measure_point: Callable[[Point], Timing | str],
    *,
    budget_s: float,
    report: Report = lambda *_: None,
    now: Callable[[], float] = time.perf_counter,
) -> None:
    """Measures the points in their order into `journal` until they are done or `budget_s` seconds of measuring are
    spent, those of the journal included.

    `measure_point` gives a time, or why the device has none. A noisy point is tried again after some others; after four
    attempts it is refused, with the smallest spread it had.
    """
    waiting = deque(point for point in points if point not in journal.results)
    spent_s, took_s, tried = journal.spent_s, defaultdict[Point, float](float), defaultdict[Point, list[Timing]](list)
    while waiting and spent_s < budget_s:
        done, point = len(points) - len(waiting), waiting.popleft()
        report(point, done, len(points), spent_s)
        began = now()
        outcome = measure_point(point)
        took = now() - began
        spent_s += took
        took_s[point] += took
        if isinstance(outcome, str):
            journal.add(Result(point=point, seconds=0.0, took_s=took_s[point], refused=f"impossible: {outcome}"))
            continue
        tried[point].append(outcome)
        best, most, refused = min(tried[point], key=lambda one: one.spread), limit(point.operator), ""
        if best.spread > most:
            if len(tried[point]) < ATTEMPTS:
                waiting.insert(BETWEEN, point)
                continue
            refused = f"noisy: spread {best.spread:.0%} at the best of {ATTEMPTS} attempts, limit {most:.0%}"
        journal.add(Result(point=point, **asdict(best), took_s=took_s[point], refused=refused))


def counts(points: Sequence[Point], journal: Journal) -> dict[str, list[int]]:
    """What became of the planned points of every operator: measured, too noisy, not possible, left."""
    found: dict[str, list[int]] = {}
    for point in points:
        count, result = found.setdefault(point.operator, [0, 0, 0, 0]), journal.results.get(point)
        count[3 if result is None else KINDS.index(result.refused.partition(":")[0])] += 1
    return found
