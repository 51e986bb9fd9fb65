"""In which keys configurations differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: A key that a configuration does not have.
ABSENT = "(none)"
MOST_KEYS = 5


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all configurations, as key paths, with the value in each."""
    flat = [flattened(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    values = {key: [config.get(key, ABSENT) for config in flat] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as key paths and values; lists are values."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def shown(value: Any, width: int = 40) -> str:
    """A value of a configuration as text of at most so many characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 1] + "…"


def listed(changed: Mapping[str, Sequence[Any]]) -> str:
    """Differences of two configurations in a sentence: `trace.cap 8192 there, 4096 here`."""
    items = [f"{key} {shown(there)} there, {shown(here)} here" for key, (there, here) in changed.items()]
    more = [f"and {len(items) - MOST_KEYS} more keys"] if len(items) > MOST_KEYS else []
    return "; ".join(items[:MOST_KEYS] + more)
