"""Speedups in worlds that the calibration's errors allow (`rlsim.cost.draw`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from rlsim.experiment.summary import means

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
    number: int, seeds: Sequence[int], baseline: str, calibrated: pd.DataFrame, run: Callable[[int, int], pd.DataFrame]
) -> dict[str, dict[str, list[float]]]:
    """By case and system: how many times as large its speedup is in worlds 1 to `number` as it is `calibrated`.

    Worlds take the seeds in turn, one each, and are compared on the same one. `run` is given the number of a world and
    a seed, and runs all systems in it; what it returns and `calibrated` are rows of `steps`. A world in which a system
    does not fit is missing in that system's list.
    """
    known = {seed: _speedups(steps, baseline) for seed, steps in calibrated.groupby("seed")}
    found: dict[str, dict[str, list[float]]] = {}
    for world in range(1, number + 1):
        seed = seeds[(world - 1) % len(seeds)]
        for (case, system), speedup in _speedups(run(world, seed), baseline).items():
            if known[seed].get((case, system)):
                found.setdefault(case, {}).setdefault(system, []).append(speedup / known[seed][case, system])
    return found


def _speedups(steps: pd.DataFrame, baseline: str) -> dict[tuple[str, str], float]:
    """Those of one seed, by case and system; none in a case whose baseline did not run."""
    rows = means(steps, ["case", "system"]).reset_index()
    rates = dict(zip(zip(rows["case"], rows["system"], strict=True), rows["responses_per_s"], strict=True))
    return {
        (case, system): rate / rates[case, baseline]
        for (case, system), rate in rates.items()
        if (case, baseline) in rates
    }
