"""Settings of other programs that bear on time and that an experiment does not represent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rlsim.frameworks.settings import ANYTHING, FLAG, NUMBER, Kind, Settings
from rlsim.frameworks.tables import Row

#: The kind of a setting, and when it matters.
_MATTERS: dict[str, tuple[Kind[Any], Callable[[Any], bool]]] = {
    "on": (FLAG, bool),
    "off": (FLAG, lambda value: not value),
    "set": (ANYTHING, bool),
    "above 1": (NUMBER, lambda value: value > 1),
}


def unlike(config: Settings, table: Iterable[Row]) -> list[str]:
    """What of the table matters here, each with where it is said."""
    found = list[str]()
    for key, when, what in table:
        kind, matters = _MATTERS[when]
        value, where = config.told(kind, key), config.where(key)
        if kind is ANYTHING and (below := [other for other in config.given if other.startswith(f"{key}.")]):
            config.asked.update(below)
            value = ", ".join(f"{other.removeprefix(f'{key}.')}={config.given[other]}" for other in below)
            where = f"{key} ({config.origin[below[0]]})"
        if value is not None and matters(value):
            found.append(f"{where} = {value}: {what}")
    return found
