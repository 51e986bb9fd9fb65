"""What a framework's settings are in an experiment: one table a framework, data/frameworks/NAME.yaml.

A row has `ours`, a key of the experiment or of a policy; `from`, the settings (by their names in data/keys.csv) that
say it, whose places are the comment; `is`, an expression over settings and facts (without it, the value of the first
setting), or a constant `value`; `if`, when the row counts; and `says`, another comment. Of several rows of one key the
first that counts is taken. Rows of `refused`, `note` and `missing` say instead what is not simulated, what to know, and
what bears on time and an experiment has not. Rows of a `fact` name what follows from settings, by `is` or `value`, for
other rows and for `rlsim.frameworks.adapter`, which takes the keys of `draft` too. In texts `[name]` is the place of a
setting, `{expression:format}` a value. In conditions and facts a setting without a value is None (a flag false), but
for `need('name')`, and no comparison with None holds.

`rlsim/data/keys.csv` has a setting's name, kind and key (several in turn), `defaults.csv` a key's default since a
release (empty: any), `unlike.csv` a key, when it matters, and what it does. They were read off
github.com/verl-project/verl (YAML of its trainers, 0.2 to 0.9, and of its asynchronous recipes), NVIDIA-NeMo/RL
(`GRPOConfig` and its kin, `examples/configs/grpo_math_1B.yaml`; the same in 0.7 and 7ea279a), inclusionAI/AReaL
(`areal/api/cli_args.py`, 1.0), THUDM/slime (`slime/utils/arguments.py`, 0.3 at 624b824), all Apache-2.0, and the
arguments of vLLM 0.9 to 0.26 and SGLang 0.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

from rlsim.base.reading import shipped
from rlsim.base.refusals import FUNCTIONS, code_of, holds
from rlsim.base.version import numbers_of
from rlsim.errors import ConfigError
from rlsim.frameworks.draft import Entry
from rlsim.frameworks.settings import ANYTHING, FLAG, KINDS, NUMBER, Kind, Names, Settings
from rlsim.models.hardware import Gpu

Row = Mapping[str, Any]
#: In texts, the place of a setting, or a value and its format.
_TOLD = re.compile(r"\[(\w+)\]|\{([^{}]+?)(?::([^{}:']*))?\}")


class Reading:
    """A framework's table over the settings of a configuration; `facts` are values that no row of it says."""

    def __init__(self, of: str, config: Settings, **facts: Any) -> None:
        tables = (shipped(f"frameworks/{name}.yaml") for name in (of, "speculation"))
        self.of, self._rows, self.config = of, [row for rows in tables for row in rows], config
        self.facts: dict[str, Any] = {
            "name": config.file, "program": config.program, "has": config.has, "given": self._given,
            "key": config.key, "place": self._section, "value": self._told, "each": self._each,
            "need": config.needed, "said": config.said, "whole": config.whole,
            **facts,
        }  # fmt: skip
        self.fact_names = {row["fact"] for row in self._rows if "fact" in row}

    def fact(self, name: str, get: Callable[[str], Any] | None = None) -> Any:
        """A fact: as given, else what the first row of it that counts says, None without."""
        if name in self.facts:
            return self.facts[name]
        get = get or self.config.value
        row = next((row for row in self._rows if row.get("fact") == name and self._counts(row, get, name)), None)
        if row is None or "is" not in row:
            return row and row["value"]
        return self._evaluated(row["is"], get, name)

    def refuse(self) -> None:
        if text := next(self._said("refused"), ""):
            raise ConfigError(text)

    def texts(self, kind: str) -> list[str]:
        return list(self._said(kind))

    def _said(self, kind: str) -> Iterator[str]:
        get = self._told if kind == "missing" else None
        return (self._text(row[kind]) for row in self._rows if kind in row and self._counts(row, get))

    def _told(self, name: str) -> Any:
        """The value of a setting; None too where the text does not tell it."""
        return self.config.told(self.config.names[name][0], name)

    def entries(self, section: str) -> dict[str, Entry]:
        """The keys of a section of the experiment, such as `training`, or of a policy."""
        return {key: self._entry(row) for key, row in self._counting(section).items()}

    def known(self, section: str) -> dict[str, Any]:
        """The values of a section that the text tells; without those that it does not."""
        found = {
            key: row["value"] if "value" in row else self._evaluated(row.get("is") or row["from"], self._told)
            for key, row in self._counting(section, self._told).items()
        }
        return {key: value for key, value in found.items() if value is not None}

    def _counting(self, section: str, get: Callable[[str], Any] | None = None) -> dict[str, Row]:
        """Of each key of a section the first row that counts."""
        found: dict[str, Row] = {}
        for row in self._rows:
            head, _, key = row.get("ours", "").rpartition(".")
            if head == section and key not in found and self._counts(row, get):
                found[key] = row
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
        kind = self.config.names[name][0]
        return [value for key in self.config.keys(name) if (value := self.config.told(kind, key)) is not None]

    def _counts(self, row: Row, get: Callable[[str], Any] | None = None, of: str = "") -> bool:
        try:
            return "if" not in row or bool(self._evaluated(row["if"], get or self.config.value, of))
        except TypeError:  # a comparison with None
            return False

    def _value(self, expression: str) -> Any:
        return self._evaluated(expression, self.config.needed)

    def _evaluated(self, expression: str, get: Callable[[str], Any], of: str = "") -> Any:
        """What an expression is worth; in that of a fact (`of`) its own name is a setting's."""
        return eval(code_of(expression), {"__builtins__": FUNCTIONS}, _Names(self, get, of))

    def _text(self, text: str) -> str:
        def told(found: re.Match[str]) -> str:
            return self.config.where(found[1]) if found[1] else format(self._value(found[2]), found[3] or "")

        return _TOLD.sub(told, text)

    def _section(self, name: str) -> str:
        """Where the first key of a section is given, and the key."""
        key = next(key for key in self.config.given if key.startswith(f"{name}."))
        return f"{self.config.origin[key]}: {key}"


class _Names(dict[str, Any]):
    """Facts but for `of`, and settings by their names as `get` has them; a flag without a value is false."""

    def __init__(self, reading: Reading, get: Callable[[str], Any], of: str) -> None:
        super().__init__(reading.facts)
        self._reading, self._get, self._of = reading, get, of

    def __missing__(self, name: str) -> Any:
        config, needed = self._reading.config, self._get == self._reading.config.needed
        if name in FUNCTIONS:
            raise KeyError(name)
        if name in self._reading.fact_names and name != self._of:
            return self._reading.fact(name, None if needed else self._get)
        is_flag = name in config.names and config.names[name][0] is FLAG
        if is_flag and needed:
            return config.flag(name)
        value = self._get(name) if name in config.names else None
        return bool(value) if is_flag else value


#: Key, when it matters (`_MATTERS`), and what it does that an experiment has not.
UnlikeRow = tuple[str, str, str]


def _rows(name: str, of: str) -> Iterator[list[str]]:
    return (row[1:] for row in shipped(name) if row[0] == of)


@cache
def names(of: str) -> Names:
    """The settings of a framework, or of an engine below it, by name."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for name, kind, key in _rows("keys.csv", of):
        found[name] = KINDS[kind], (*found.get(name, (None, ()))[1], key)
    return found


@cache
def default_values(of: str, release: str = "") -> dict[str, Any]:
    """The default of every key that bears on time; None where there is none."""
    rows = _rows("defaults.csv", of)
    return {key: json.loads(value) for since, key, value in rows if numbers_of(since) <= numbers_of(release)}


@cache
def newest(of: str) -> str:
    """The newest release of whose defaults the table knows; empty where it names none."""
    return max((since for since, *_ in _rows("defaults.csv", of)), key=numbers_of, default="")


@cache
def unlike_rows(of: str, *sections: str) -> tuple[UnlikeRow, ...]:
    """What a framework, or an engine below these sections of a framework, has that an experiment has not."""
    rows = [(key, when, what) for key, when, what in _rows("unlike.csv", of)]
    flags = bool(sections) and sections[0].startswith("--")  # slime's have dashes
    rows = [(key.replace("_", "-"), when, what) for key, when, what in rows] if flags else rows
    return tuple((section + key, when, what) for section in sections or ("",) for key, when, what in rows)


#: The kind of a setting, and when it matters.
_MATTERS: dict[str, tuple[Kind[Any], Callable[[Any], bool]]] = {
    "on": (FLAG, bool),
    "off": (FLAG, lambda value: not value),
    "set": (ANYTHING, bool),
    "above 1": (NUMBER, lambda value: value > 1),
}


def unlike(config: Settings, table: Iterable[UnlikeRow]) -> list[str]:
    """What of the table matters here, each with where it is said."""
    found = list[str]()
    for key, when, what in table:
        kind, matters = _MATTERS[when]
        value, where = config.told(kind, key), config.where(key)
        if kind is ANYTHING and (below := [other for other in config.given if other.startswith(f"{key}.")]):
            config.asked.update(below)
            value = ", ".join(f"{other.removeprefix(f'{key}.')}={config.given[other]}" for other in below)
            where = f"{key} ({config.origin[below[0]]})"
        if key in config.doubts:
            config.asked.add(key)
            place, unknown = config.doubts[key]
            found.append(f"{key} ({place}), {unknown.why}: {what}")
        elif value is not None and matters(value):
            found.append(f"{where} = {value}: {what}")
    return found


#: How an engine is used, as vLLM's `UsageContext` tells: its class `LLM`, a server, or its asynchronous engine.
Use = Literal["class", "server", "engine"]


def own_limits(engine: str, gpu: Gpu, use: Use = "class") -> dict[str, Any]:
    """The fields of `EngineConfig` that the engine sets by itself on such a GPU; empty for one that is not known."""
    values = {"gib": gpu.memory_bytes / 2.0**30, "gpu": gpu.name, "use": use}
    rows = shipped("frameworks/engines.yaml").get(engine, [])
    return {key: value for row in rows if holds(row["if"], values) for key, value in row["sets"].items()}
