"""Speedups in worlds that the calibration's errors allow (`rlsim.cost.draw`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from rlsim.experiment.result import Result
from rlsim.experiment.summary import summarise

#: Called with (runs done, runs in all, what runs next).
Progress = Callable[[int, int, str], None]


class Together:
    """Tells of the runs as calibrated and of those in worlds, one seed each, as of one number of runs."""

    def __init__(self, told: Progress, seeds: int, worlds: int) -> None:
        self.worlds = worlds
        self._told, self._seeds, self._before = told, seeds, 0

    def calibrated(self, done: int, runs: int, what: str) -> None:
        """Told of the runs as calibrated."""
        self._before = runs
        self._told(done, runs + self.worlds * (runs // self._seeds), what)

    def world(self, number: int) -> Progress:
        """Told of the runs of a world."""

        def told(done: int, runs: int, what: str) -> None:
            before = self._before + (number - 1) * runs
            self._told(before + done, self._before + self.worlds * runs, f"world {number} of {self.worlds}: {what}")

        return told


def in_worlds(
    number: int, seeds: Sequence[int], calibrated: Result, run: Callable[[int, int], Result]
) -> dict[str, dict[str, list[float]]]:
    """By case and system: how many times as large its speedup is in worlds 1 to `number` as it is `calibrated`.

    Worlds take the seeds in turn, one each, and are compared on the same one. `run` is given the number of a world and
    a seed, and runs all systems in it. A world in which a system does not fit is missing in that system's list.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for world in range(1, number + 1):
        seed = seeds[(world - 1) % len(seeds)]
        known = _speedups(summarise(calibrated.steps[calibrated.steps["seed"] == seed], calibrated.manifest))
        for (case, system), speedup in _speedups(run(world, seed).summary()).items():
            if known.get((case, system)):
                found.setdefault(case, {}).setdefault(system, []).append(speedup / known[case, system])
    return found


def _speedups(summary: pd.DataFrame) -> dict[tuple[str, str], float]:
    rows = summary.dropna(subset=["speedup"])
    return dict(zip(zip(rows["case"], rows["system"], strict=True), rows["speedup"], strict=True))
