"""A sweep checked point by point as its runs would check it; nothing is simulated or searched for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlsim.errors import ConfigError, RlsimError
from rlsim.experiment.check import Checked, check_loaded
from rlsim.experiment.schema import Experiment
from rlsim.reading import plain
from rlsim.schema import validate
from rlsim.sweeps.points import MOST_MISTAKES, Definition, load_sweep


def check_sweep(
    source: str | Path, overrides: Iterable[str] = (), seeds: int | None = None
) -> tuple[str, list[Checked]]:
    """The name of a sweep and all its points, checked; the arguments are those of `load_sweep`.

    Raises `RlsimError` with all mistakes of all points, and the settings of the first point that has each.
    """
    definition = load_sweep(source, overrides=overrides, seeds=seeds)
    found: list[Checked] = []
    mistakes: dict[str, str] = {}
    for point in definition.points:
        try:
            experiment = validate(plain(point.config), Experiment, definition.shown)
            found.append(check_loaded(experiment, definition.folder, definition.shown))
        except RlsimError as error:
            settings = ", ".join(f"{axis.column.name}={axis.value}" for axis in point.axes)
            mistakes.setdefault(str(error), settings)
    if mistakes:
        raise ConfigError("\n".join(_told(mistakes, definition)))
    return definition.name, found


def _told(mistakes: dict[str, str], definition: Definition) -> Iterable[str]:
    for error, settings in list(mistakes.items())[:MOST_MISTAKES]:
        yield f"{error} (point {settings})" if settings else error
    if len(mistakes) > MOST_MISTAKES:
        yield f"and {len(mistakes) - MOST_MISTAKES} more mistakes of {definition.name}"
