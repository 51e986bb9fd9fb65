"""Settings of other programs that bear on time and that an experiment does not represent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlsim.init.settings import Settings

#: Of each key: when it matters (`_MATTERS`), and what it does that the experiment has not.
Table = Sequence[tuple[str, str, str]]
#: When a setting matters.
_MATTERS: dict[str, Callable[[Any], bool]] = {
    "on": lambda value: value is True,
    "off": lambda value: value is False,
    "set": bool,
    "above 1": lambda value: isinstance(value, int) and value > 1,
}


def unlike(config: Settings, table: Table) -> list[str]:
    """What of the table matters here, each with where it is said."""
    found = list[str]()
    for key, when, what in table:
        config.asked.add(key)
        value = config.given.get(key, config.default.get(key))
        if value is not None and _MATTERS[when](value):
            found.append(f"{config.where(key)} = {value}: {what}")
    return found
