"""An experiment checked as `run` checks it, and counted; nothing is simulated or searched for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsim.experiment.load import load_experiment
from rlsim.experiment.run import checked_cases, worlds_of
from rlsim.experiment.schema import Experiment


@dataclass(frozen=True)
class Checked:
    """An experiment that would run. A run is one system in one case, on one seed as calibrated or in one world."""

    name: str
    systems: tuple[int, ...]  # that can run, by case
    seeds: int
    worlds: int
    notes: tuple[str, ...]
    refused: bool  # by the framework or engine, as notes say

    @property
    def runs(self) -> int:
        return sum(self.systems) * (self.seeds + self.worlds)

    @property
    def counted(self) -> str:
        seeds = _span((self.seeds,), "seed")
        if self.worlds:
            seeds = f"({seeds} + {_span((self.worlds,), 'world')})"
        parts = (_span(self.systems, "system"), seeds, _span((len(self.systems),), "case"))
        return f"{' × '.join(parts)} = {_span((self.runs,), 'run')}"


def check_experiment(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
) -> Checked:
    """Check an experiment with its settings; the arguments and errors are those of `run`."""
    experiment, shown, folder = load_experiment(source, overrides, seeds)
    return check_loaded(experiment, folder, shown)


def check_loaded(experiment: Experiment, folder: Path, shown: str) -> Checked:
    """Check an experiment as `load_experiment` gave it; raises `RlsimError` for whatever does not exist or fit."""
    cases = checked_cases(experiment, folder, shown)
    notes = [f"{case.name}: {note}" if case.name else note for case in cases for note in case.notes]
    later = list(dict.fromkeys(name for case in cases for name in case.searched))
    if later:
        notes.append(
            f"whether the plans of {', '.join(later)} fit is known after the search that `rlsim run` begins with"
        )
    return Checked(
        experiment.name,
        tuple(len(case.systems) for case in cases),
        len(experiment.seed_list),
        worlds_of(experiment, cases),
        tuple(notes),
        any(case.refused for case in cases),
    )


def _span(counts: tuple[int, ...], what: str) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,} {what}{'' if high == 1 else 's'}" if low == high else f"{low:,} to {high:,} {what}s"
