"""Which run each is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsim.comparison.runs import Run
from rlsim.errors import unknown_name
from rlsim.units import token_count


class Baseline:
    """The baseline as a user names it (see `rlsim.comparison.compare.compare`), found for each run.

    Raises `CatalogueError` for one that no run has.
    """

    def __init__(self, runs: Sequence[Run], asked: str | None) -> None:
        self._runs = runs
        self.missing: list[str] = []  # runs without one
        # Names of a run's axes -> directory -> names of axes that both have -> their values -> runs.
        self._by_axes: dict[frozenset[str], dict[str, dict[tuple[str, ...], dict[tuple[Any, ...], list[Run]]]]] = {}
        self._default = asked is None
        self._directory = self._system = ""
        self._settings: dict[str, str] = {}  # of axes, as the user writes them
        directories = list(dict.fromkeys(run.directory for run in runs))
        systems = list(dict.fromkeys(run.system for run in runs))
        if asked is None:
            self._directory = directories[0] if len(directories) > 1 else ""
            return
        directory, colon, system = asked.rpartition(":")
        settings = _settings_in(asked, runs)
        if asked in systems:
            self._system = asked
        elif str(Path(asked)) in directories:
            self._directory = str(Path(asked))
        elif colon and str(Path(directory)) in directories and system in systems:
            self._directory, self._system = str(Path(directory)), system
        elif settings:
            self._settings = settings
        else:
            values = {f"{key}={value}" for run in runs for key, value in run.axes.items()}
            raise unknown_name("baseline", asked, {*systems, *directories, *values})

    def of(self, run: Run) -> Run | None:
        """The run that `run` is compared with; None, and it is noted, if there is none, or not one alone."""
        there = [one for one in self._same_axes(run) if self._matches(run, one)]
        elsewhere = self._directory or self._settings
        wanted = [self._system or (run.system if elsewhere else run.baseline)]
        if self._directory and self._default and there:
            wanted.append(there[0].baseline)
        for system in wanted:
            found = [one for one in there if one.system == system]
            if len(found) == 1:
                return found[0]
        self.missing.append(run.name)
        return None

    def _same_axes(self, run: Run) -> list[Run]:
        """Runs of the baseline's directory with equal values of the axes that both have, but for the named settings."""
        names = frozenset(run.axes)
        if names not in self._by_axes:
            self._by_axes[names] = {}
            for one in self._runs:
                shared = tuple(key for key in one.axes if key in names and key not in self._settings)
                values = tuple(one.axes[key] for key in shared)
                self._by_axes[names].setdefault(one.directory, {}).setdefault(shared, {}).setdefault(values, []).append(
                    one
                )
        there = self._by_axes[names].get(self._directory or run.directory, {})
        return [one for shared, found in there.items() for one in found.get(tuple(run.axes[key] for key in shared), ())]

    def _matches(self, run: Run, other: Run) -> bool:
        """Whether the other is of the same case and has the settings that the baseline was named by."""
        if not all(_is(other.axes.get(key), value) for key, value in self._settings.items()):
            return False
        return run.case == other.case or not (run.case and other.case)


def _settings_in(asked: str, runs: Sequence[Run]) -> dict[str, str]:
    """`KEY=VALUE` of an axis, or several with commas between, if some run has these values; else empty."""
    pairs = [text.partition("=") for text in asked.split(",")]
    for settings in ([asked.partition("=")], pairs):  # a value may have commas of its own
        found = {key.strip(): value.strip() for key, equals, value in settings if equals}
        if len(found) == len(settings) and any(
            all(_is(run.axes.get(key), value) for key, value in found.items()) for run in runs
        ):
            return found
    return {}


def _is(value: Any, text: str) -> bool:
    """Whether a value is the one that a user wrote as `4K` or `4096`."""
    if str(value) == text:
        return True
    try:
        return not isinstance(value, str) and value is not None and bool(value == token_count(text))
    except ValueError:
        return False
