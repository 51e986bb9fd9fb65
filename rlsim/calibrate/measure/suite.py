"""The measuring itself: point after point until the budget is spent, and noisy points more than one chance."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlsim.calibrate.measure.clock import NOISY, NOISY_ONCE, Timing
from rlsim.calibrate.measure.journal import Journal, Point, Result

ATTEMPTS = 4  # at a noisy point
BETWEEN = 10  # other points before the next attempt: what disturbs a machine passes
ONCE = ("control", "graph_capture")  # operators that a layout change runs once


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `point` is the one it measures next."""

    spent_s: float
    budget_s: float
    done: int
    planned: int
    refused: int
    point: Point


def limit(operator: str) -> float:
    """The spread beyond which a point of this operator is refused."""
    return NOISY_ONCE if operator in ONCE else NOISY


def run_suite(
    points: Sequence[Point],
    journal: Journal,
    measure_point: Callable[[Point], Timing | str],
    *,
    budget_s: float,
    report: Callable[[Progress], None] = lambda _: None,
    now: Callable[[], float] = time.perf_counter,
) -> None:
    """Measures the points in their order into `journal` until they are done or `budget_s` seconds of measuring are
    spent, those of the journal included.

    `measure_point` gives a time, or why the device has none. A noisy point is tried again after some others; after four
    attempts it is refused, with the smallest spread it had.
    """
    waiting = deque(point for point in points if point not in journal.results)
    spent_s, noisy = journal.spent_s, dict[Point, list[Result]]()
    while waiting and spent_s < budget_s:
        left = len(waiting)
        point = waiting.popleft()
        report(Progress(spent_s, budget_s, len(points) - left, len(points), len(journal.refused()), point))
        began = now()
        outcome = measure_point(point)
        took_s = now() - began
        spent_s += took_s
        if isinstance(outcome, str):
            journal.add(Result(point, 0.0, 0.0, 0, took_s, f"impossible: {outcome}"))
            continue
        result = Result(point, outcome.seconds, outcome.spread, outcome.repeats, took_s)
        tried = [*noisy.pop(point, []), result]
        took_s = sum(one.took_s for one in tried)
        if not outcome.noisy(limit(point.operator)):
            journal.add(replace(result, took_s=took_s))
        elif len(tried) < ATTEMPTS:
            noisy[point] = tried
            waiting.insert(BETWEEN, point)
        else:
            best = min(tried, key=lambda one: one.spread)
            reason = f"spread {best.spread:.0%} at the best of {ATTEMPTS} attempts, limit {limit(point.operator):.0%}"
            journal.add(replace(best, took_s=took_s, refused=f"noisy: {reason}"))


@dataclass(frozen=True)
class Count:
    """What became of one operator's points."""

    measured: int
    noisy: int
    impossible: int
    left: int


def counts(points: Sequence[Point], journal: Journal) -> dict[str, Count]:
    """What became of the planned points of every operator."""
    found = {}
    for operator in dict.fromkeys(point.operator for point in points):
        own = [point for point in points if point.operator == operator]
        refused = [journal.results[point].refused for point in own if point in journal.results]
        measured, noisy = refused.count(""), sum(reason.startswith("noisy") for reason in refused)
        found[operator] = Count(measured, noisy, len(refused) - measured - noisy, len(own) - len(refused))
    return found
