"""The measuring itself: point after point until the budget is spent. Every attempt is on disk before the next begins,
one line each, so that an interruption loses the one under way and no more."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from rlsim.calibrate.measure.bench import NOISY, Timing
from rlsim.calibrate.measure.host import MachineFacts
from rlsim.calibrate.measurements import KEYS, Measurements
from rlsim.cost.calibration import Source
from rlsim.errors import CalibrationError

ATTEMPTS = 4  # at a noisy point
#: What became of a point.
MEASURED, TOO_NOISY, IMPOSSIBLE, LEFT = STATES = ("measured", "too noisy", "not possible", "left (budget)")

#: Is told the point to measure next, how many of how many are done, and the seconds spent.
Report = Callable[["Point", int, int, float], None]


class Point(NamedTuple):
    """One row to measure: an operator and the values of its key columns, in the order of `measurements.KEYS`."""

    operator: str
    values: tuple[int | float | str, ...]

    def row(self) -> dict[str, Any]:
        return dict(zip(KEYS[self.operator], self.values, strict=True))


@dataclass(frozen=True)
class Attempt:
    """One attempt at a point: its time, or why the device has none (`impossible`). `took_s` is what it cost."""

    took_s: float
    seconds: float = 0.0
    spread: float = 0.0
    repeats: int = 0
    impossible: str = ""


@dataclass
class Journal:
    """The journal file of one calibration run, open for more attempts: the machine, then a line for each attempt."""

    path: Path
    machine: MachineFacts
    attempts: defaultdict[Point, list[Attempt]] = field(default_factory=lambda: defaultdict(list))

    @staticmethod
    def start(path: Path, machine: MachineFacts, *, fresh: bool = False) -> Journal:
        """The journal at `path`, begun for `machine`, or gone on with if there is one.

        A last line cut short by an interruption is removed. Raises `CalibrationError` if the journal there is damaged
        or of another machine or model; `fresh` discards it instead.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.read_bytes() if path.exists() else b""
        if there and not there.startswith(b'{"device":'):
            raise CalibrationError(f"{path}: is not rlsim's journal; move it away, or give another --out")
        lines = [] if fresh else there.split(b"\n")[:-1]  # what follows the last line break was cut short
        if not lines:
            path.write_text(machine.model_dump_json() + "\n", encoding="utf-8")
            return Journal(path, machine)
        journal, number = Journal(path, machine), 1
        try:
            journal.machine = MachineFacts.model_validate_json(lines[0])
            for line in lines[1:]:
                number += 1
                record = json.loads(line)
                operator, values = record.pop("point")
                point = Point(operator, tuple(values))
                point.row()  # it has the columns of its table
                journal.attempts[point].append(Attempt(**record))
        except (ValueError, TypeError, LookupError, AttributeError):
            raise CalibrationError(f"{path}:{number}: damaged; mend the line, or begin anew with --fresh") from None
        machine.check_same(journal.machine, path)
        os.truncate(path, there.rindex(b"\n") + 1)
        return journal

    def add(self, point: Point, attempt: Attempt) -> None:
        """Keeps an attempt, on disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"point": point, **asdict(attempt)}) + "\n")
        self.attempts[point].append(attempt)

    @property
    def spent_s(self) -> float:
        """Seconds that measuring took so far, over all runs."""
        return sum(attempt.took_s for found in self.attempts.values() for attempt in found)

    def best(self, point: Point) -> Attempt:
        """The attempt at a point that has the smallest spread."""
        return min(self.attempts[point], key=lambda attempt: attempt.spread)

    def state(self, point: Point) -> str:
        """What became of a point, one of `STATES`."""
        if point not in self.attempts:
            return LEFT
        best = self.best(point)
        if best.impossible:
            return IMPOSSIBLE
        if best.spread <= NOISY:
            return MEASURED
        return LEFT if len(self.attempts[point]) < ATTEMPTS else TOO_NOISY

    def measurements(self, notes: Iterable[str] = ()) -> Measurements:
        """The measured points as tables; all others are in none."""
        rows = defaultdict[str, list[dict[str, Any]]](list)
        for point in self.attempts:
            if self.state(point) == MEASURED:
                best = self.best(point)
                rows[point.operator].append({**point.row(), "seconds": best.seconds, "spread": best.spread})
        versions = self.machine.versions
        source = Source(
            project=f"own measurement on {self.machine.name}",
            commit=f"rlsim {versions.get('rlsim', '')}".strip(),
            licence="own",
            files=(self.path.name,),
            engine_version=f"torch {versions.get('torch', '')}".strip(),
        )
        return Measurements({name: pd.DataFrame(found) for name, found in rows.items()}, (source,), tuple(notes))

    def counts(self, points: Iterable[Point]) -> dict[str, dict[str, int]]:
        """By operator, how many of these points are in each of `STATES`."""
        found: dict[str, dict[str, int]] = {}
        for point in points:
            found.setdefault(point.operator, dict.fromkeys(STATES, 0))[self.state(point)] += 1
        return found


def measure_all(
    rounds: Mapping[Point, int],
    journal: Journal,
    measure_point: Callable[[Point], Timing | str],
    *,
    budget_s: float,
    report: Report = lambda *_: None,
    now: Callable[[], float] = time.perf_counter,
) -> None:
    """Measures the points into `journal`, round after round in their order, until they are done or `budget_s` seconds
    of measuring are spent, those of the journal included.

    `measure_point` gives a time, or why the device has none. The noisy points of a round are tried again before the
    next round begins; after four attempts they are refused.
    """
    spent_s, done = journal.spent_s, sum(journal.state(point) != LEFT for point in rounds)
    for number, tried in itertools.product(sorted(set(rounds.values())), range(ATTEMPTS)):
        for point in (point for point, own in rounds.items() if own == number):
            if journal.state(point) != LEFT or len(journal.attempts.get(point, ())) != tried:
                continue
            if spent_s >= budget_s:
                return
            report(point, done, len(rounds), spent_s)
            began = now()
            found = measure_point(point)
            took_s = now() - began
            journal.add(point, Attempt(took_s, **({"impossible": found} if isinstance(found, str) else asdict(found))))
            spent_s += took_s
            done += journal.state(point) != LEFT
