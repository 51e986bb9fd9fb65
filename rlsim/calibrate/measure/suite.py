"""The measuring itself: every operator gets its share of the budget, and noisy points more than one chance."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlsim.calibrate.measure.clock import NOISY, NOISY_ONCE, Timing
from rlsim.calibrate.measure.journal import Journal, Point, Result
from rlsim.calibrate.measure.plan import FIRST, SHARES, Task

ATTEMPTS = 4  # at a noisy point
ONCE = ("control", "graph_capture")  # operators that a layout change runs once


def limit(operator: str) -> float:
    """The spread beyond which a point of this operator is refused."""
    return NOISY_ONCE if operator in ONCE else NOISY


BETWEEN = 10  # other points of its operator before the next attempt: what disturbs a machine passes


@dataclass(frozen=True)
class Count:
    """What became of one operator's points."""

    measured: int
    noisy: int
    impossible: int
    left: int


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `point` is the one it measures next."""

    spent_s: float
    budget_s: float
    done: int
    planned: int
    refused: int
    point: Point


#: Measures one task; a text says why the device cannot.
MeasureTask = Callable[[Task], Timing | str]


def run_suite(
    phases: Sequence[Mapping[str, Sequence[Task]]],
    journal: Journal,
    measure_task: MeasureTask,
    *,
    budget_s: float,
    report: Callable[[Progress], None] = lambda _: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Count]:
    """Measures the tasks of all phases into `journal` until they are done or `budget_s` seconds of measuring are spent,
    those of the journal included.

    Every phase gets the share of its operators, and what those before it left over; what the last leaves goes round
    again. Within a phase every operator gets a few points first (`plan.FIRST`), whatever they take; then that goes next
    which has used the smallest part of its share. A noisy point is tried again after some others of its operator;
    after four attempts it is refused, with the smallest spread it had.
    """
    planned = sum(len(found) for phase in phases for found in phase.values())
    spent_s = journal.spent_s
    queues = [_Queues(phase, journal) for phase in phases]
    weights = _weights(phases)
    limits = [budget_s * sum(weights[: i + 1]) / sum(weights) for i in range(len(phases))]
    for queue, limit_s in [*zip(queues, limits, strict=True), *((queue, budget_s) for queue in queues)]:
        while spent_s < (limit_s if queue.begun else budget_s) and (task := queue.next()) is not None:
            left = 1 + sum(len(found) for other in queues for found in other.waiting.values())
            report(Progress(spent_s, budget_s, planned - left, planned, len(journal.refused()), task.point))
            began = now()
            outcome = measure_task(task)
            took_s = now() - began
            spent_s += took_s
            queue.done(task, outcome, took_s)
    return counts(phases, journal)


def _weights(phases: Sequence[Mapping[str, Sequence[Task]]]) -> list[float]:
    """The share of every phase: of an operator in several, the part of its points that are there."""
    points: dict[str, int] = {}
    for phase in phases:
        for operator, found in phase.items():
            points[operator] = points.get(operator, 0) + len(found)
    return [sum(SHARES[operator] * len(found) / points[operator] for operator, found in p.items()) for p in phases]


class _Queues:
    """What is still to be measured of one phase, by operator."""

    def __init__(self, phase: Mapping[str, Sequence[Task]], journal: Journal) -> None:
        self.journal = journal
        known = journal.results
        self.waiting = {name: deque(task for task in found if task.point not in known) for name, found in phase.items()}
        self._settled = {name: len(found) - len(self.waiting[name]) for name, found in phase.items()}
        self._spent_s = {
            name: sum(known[task.point].took_s for task in found if task.point in known)
            for name, found in phase.items()
        }
        self._noisy: dict[Point, tuple[int, Timing, float]] = {}  # attempts, the best of them, their seconds

    @property
    def begun(self) -> bool:
        """Whether every operator has its first points."""
        return all(self._settled[name] >= FIRST[name] or not queue for name, queue in self.waiting.items())

    def next(self) -> Task | None:
        """The task that is due, off its queue; None if there is none left."""
        names = [name for name, queue in self.waiting.items() if queue]
        if not names:
            return None
        due = min(names, key=lambda name: (self._settled[name] >= FIRST[name], self._spent_s[name] / SHARES[name]))
        return self.waiting[due].popleft()

    def done(self, task: Task, outcome: Timing | str, took_s: float) -> None:
        """Keeps what became of a task, or puts it back."""
        operator, point = task.point.operator, task.point
        self._spent_s[operator] += took_s
        attempts, best, earlier_s = self._noisy.pop(point, (0, None, 0.0))
        took_s += earlier_s
        if isinstance(outcome, str):
            self.journal.add(Result(point, 0.0, 0.0, 0, took_s, f"impossible: {outcome}"))
        elif not outcome.noisy(limit(operator)):
            self.journal.add(Result(point, outcome.seconds, outcome.spread, outcome.repeats, took_s))
        else:
            best = outcome if best is None or outcome.spread < best.spread else best
            if attempts + 1 < ATTEMPTS:
                self._noisy[point] = (attempts + 1, best, took_s)
                self.waiting[operator].insert(BETWEEN, task)
                return
            reason = f"noisy: spread {best.spread:.0%} at the best of {ATTEMPTS} attempts, limit {limit(operator):.0%}"
            self.journal.add(Result(point, best.seconds, best.spread, best.repeats, took_s, reason))
        self._settled[operator] += 1


def counts(phases: Sequence[Mapping[str, Sequence[Task]]], journal: Journal) -> dict[str, Count]:
    """What became of the planned points of every operator."""
    planned: dict[str, list[Task]] = {}
    for phase in phases:
        for operator, tasks in phase.items():
            planned.setdefault(operator, []).extend(tasks)
    found = {}
    for operator, tasks in planned.items():
        results = [journal.results[task.point] for task in tasks if task.point in journal.results]
        measured = sum(not result.refused for result in results)
        noisy = sum(result.refused.startswith("noisy") for result in results)
        found[operator] = Count(measured, noisy, len(results) - measured - noisy, len(tasks) - len(results))
    return found
