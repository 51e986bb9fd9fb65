"""`${…}` in settings, as OmegaConf resolves them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rlsim.base.reading import SyntaxConfigError, parse_yaml
from rlsim.frameworks.settings import Settings, Unknown

_INTERPOLATION = re.compile(r"\$\{(?:(?P<resolver>oc\.\w+|add|mul|div|max):)?(?P<body>[^${}]*)\}")
_DEEPEST = 20  # interpolations of interpolations
_MISSING = "???"
#: Resolvers of two numbers, which NeMo-RL registers.
_OF_TWO: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}


def parsed(text: str) -> Any:
    """A value as Hydra reads it: YAML, but for what YAML cannot read, which is text."""
    try:
        value = parse_yaml(text, "value")
    except SyntaxConfigError:
        return text
    return None if text == "None" else value


class _LeadsNowhereError(Exception):
    """An interpolation of a key, variable or resolver that is not there, or of itself."""


def interpolate(config: Settings) -> None:
    """Replace `${data.max_prompt_length}`, `${.key}`, `${oc.select:key,default}`; what leads nowhere is in doubt."""
    for key, value in list(config.given.items()):
        try:
            config.given[key] = _resolved(config, key, value, 0)
        except _LeadsNowhereError as error:
            del config.given[key]
            config.doubts[key] = (config.origin[key], Unknown(f"{error} has no value here"))


def _resolved(config: Settings, key: str, value: Any, depth: int) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return None if value == _MISSING else value
    found = _INTERPOLATION.search(value)
    if found is None or depth > _DEEPEST:
        raise _LeadsNowhereError(value)
    inner = _resolved(config, key, _looked_up(config, key, found), depth + 1)
    if found.span() == (0, len(value)) or inner is None:
        return inner
    return _resolved(config, key, value[: found.start()] + str(inner) + value[found.end() :], depth + 1)


def _looked_up(config: Settings, key: str, found: re.Match[str]) -> Any:
    """What one interpolation in the value of `key` stands for."""
    target, _, default = found["body"].partition(",")
    if found["resolver"] in _OF_TWO:
        return _of_two(found["resolver"], parsed(target), parsed(default), found[0])
    if target.startswith("."):
        above = len(target) - len(target.lstrip("."))
        target = ".".join([*key.split(".")[:-above], target.lstrip(".")])
    if found["resolver"] in (None, "oc.select"):
        config.asked.add(target)
        known = config.given.get(target, config.default.get(target))
        if known is not None:
            return known
    if default and found["resolver"] in (None, "oc.select", "oc.env"):
        return parsed(default)
    if found["resolver"] == "oc.select" or (
        not found["resolver"] and (target in config.given or target in config.default)
    ):
        return None
    raise _LeadsNowhereError(found[0])


def _of_two(resolver: str, first: Any, second: Any, written: str) -> Any:
    """What `${mul:2,3}` and its kin are; whole numbers stay whole."""
    try:
        value = _OF_TWO[resolver](first, second)
        return int(value) if value == int(value) else float(value)
    except (TypeError, ValueError, ArithmeticError):
        raise _LeadsNowhereError(written) from None
