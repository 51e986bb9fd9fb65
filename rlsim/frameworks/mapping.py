"""What a framework's settings are in an experiment: one table a framework, data/frameworks/NAME.yaml.

A row has `ours`, a key of the experiment or of a policy; `from`, the settings (by their names in data/keys.csv) that
say it, whose places are the comment; `is`, an expression over settings and facts (without it, the value of the first
setting), or a constant `value`; `if`, when the row counts; and `says`, another comment. Of several rows of one key the
first that counts is taken. Rows of `refused`, `note` and `missing` say instead what is not simulated, what to know, and
what bears on time and an experiment has not. In texts `[name]` is the place of a setting, `{expression:format}` a
value. In conditions a setting without a value is None (a flag false), and no comparison with None holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from rlsim.base.catalogue import data_dir
from rlsim.base.reading import plain, read_yaml
from rlsim.base.refusals import code_of
from rlsim.errors import ConfigError, unknown_name
from rlsim.frameworks.draft import Entry
from rlsim.frameworks.settings import FLAG, Settings

Row = Mapping[str, Any]
#: In texts, the place of a setting, or a value and its format.
_TOLD = re.compile(r"\[(\w+)\]|\{([^{}]+?)(?::([^{}:']*))?\}")
FUNCTIONS = {"bool": bool, "ceil": math.ceil, "max": max, "min": min, "str": str, "unknown_name": unknown_name}


@cache
def rows_of(of: str) -> tuple[Row, ...]:
    """The table of a framework."""
    return tuple(plain(read_yaml(data_dir("frameworks") / f"{of}.yaml")))


class Reading:
    """A framework's table over the settings of a configuration; `facts` are values that follow from several of them."""

    def __init__(self, of: str, config: Settings, **facts: Any) -> None:
        self._rows, self.config = (*rows_of(of), *rows_of("speculation")), config
        self.facts: dict[str, Any] = {
            "name": config.name, "program": config.program, "has": config.has, "given": self._given,
            "key": config.key, "place": self._section, "value": self._told, "each": self._each,
            **facts,
        }  # fmt: skip

    def refuse(self) -> None:
        """Raises `ConfigError` for the first thing that is not simulated."""
        if text := next(self._said("refused"), ""):
            raise ConfigError(text)

    def texts(self, kind: str) -> list[str]:
        """What the rows of `note` or `missing` say that count."""
        return list(self._said(kind))

    def _said(self, kind: str) -> Iterator[str]:
        get = self._told if kind == "missing" else None
        return (self._text(row[kind]) for row in self._rows if kind in row and self._counts(row, get))

    def _told(self, name: str) -> Any:
        """The value of a setting; None too where the text does not tell it."""
        return self.config.told(self.config.names[name][0], name)

    def entries(self, section: str) -> dict[str, Entry]:
        """The keys of a section of the experiment, such as `training`, or of a policy."""
        found: dict[str, Entry] = {}
        for row in self._rows:
            head, _, key = row.get("ours", "").rpartition(".")
            if head == section and key not in found and self._counts(row):
                found[key] = self._entry(row)
        return found

    def known(self, section: str) -> dict[str, Any]:
        """The values of a section that the text tells; without those that it does not."""
        found: dict[str, Any] = {}
        for row in self._rows:
            head, _, key = row.get("ours", "").rpartition(".")
            if head == section and key not in found and self._counts(row, self._told):
                value = row["value"] if "value" in row else self._evaluated(row.get("is") or row["from"], self._told)
                found |= {} if value is None else {key: value}
        return found

    def entry(self, key: str) -> Entry | None:
        """A key at the top of the experiment; None where no row of it counts."""
        return next((self._entry(row) for row in self._rows if row.get("ours") == key and self._counts(row)), None)

    def _entry(self, row: Row) -> Entry:
        settings = [row["from"]] if isinstance(row.get("from"), str) else row.get("from", [])
        if "value" in row:
            value = self._text(row["value"]) if isinstance(row["value"], str) else row["value"]
        else:
            value = self._value(row.get("is") or settings[0])
        return Entry(value, self._text(row["says"]) if "says" in row else self.config.said(*settings))

    def _given(self, name: str) -> bool:
        return name in self.config.names and self.config.is_given(name)

    def _each(self, name: str) -> list[Any]:
        """The values of all keys of a setting that the text tells."""
        kind = self.config.names[name][0]
        return [value for key in self.config.keys(name) if (value := self.config.told(kind, key)) is not None]

    def _counts(self, row: Row, get: Callable[[str], Any] | None = None) -> bool:
        try:
            return "if" not in row or bool(self._evaluated(row["if"], get or self.config.value))
        except TypeError:  # a comparison with None
            return False

    def _value(self, expression: str) -> Any:
        return self._evaluated(expression, self.config.needed)

    def _evaluated(self, expression: str, get: Callable[[str], Any]) -> Any:
        return eval(code_of(expression), {"__builtins__": FUNCTIONS}, _Names(self.config, self.facts, get))

    def _text(self, text: str) -> str:
        def told(found: re.Match[str]) -> str:
            return self.config.where(found[1]) if found[1] else format(self._value(found[2]), found[3] or "")

        return _TOLD.sub(told, text)

    def _section(self, name: str) -> str:
        """Where the first key of a section is given, and the key."""
        key = next(key for key in self.config.given if key.startswith(f"{name}."))
        return f"{self.config.origin[key]}: {key}"


class _Names(dict[str, Any]):
    """Facts, and settings by their names as `get` has them; a flag without a value is false."""

    def __init__(self, config: Settings, facts: Mapping[str, Any], get: Callable[[str], Any]) -> None:
        super().__init__(facts)
        self._config, self._get = config, get

    def __missing__(self, name: str) -> Any:
        if name in FUNCTIONS:
            raise KeyError(name)
        is_flag = name in self._config.names and self._config.names[name][0] is FLAG
        if is_flag and self._get == self._config.needed:
            return self._config.flag(name)
        value = self._get(name) if name in self._config.names else None
        return bool(value) if is_flag else value
