"""Settings of other programs by dotted key, such as `data.train_batch_size`, and the place that each is from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from rlsim.errors import ConfigError, shown
from rlsim.frameworks.draft import Entry

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
#: How alike a key and one that means something must be (`difflib`'s ratio) to be taken for a slip.
_MISSPELT = 0.93
#: The mapping that has this replaces what is inherited (NeMo-RL).
_REPLACES = "_override_"
#: Beyond it no number of tokens, sequences or GPUs can be meant.
_MOST = 10**12


@dataclass(frozen=True)
class Kind(Generic[T_co]):
    """What the value of a setting may be: in words, and as a test. `null` is no value, whatever the kind."""

    expected: str
    fits: Callable[[Any], bool]


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _number(fits: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and fits(value)


WHOLE = Kind[int]("a whole number of at least 1", _whole(1))
COUNT = Kind[int]("a whole number of at least 0", _whole(0))
INTEGER = Kind[int]("a whole number", _whole(-_MOST))
NUMBER = Kind[float]("a number of at least 0", _number(lambda value: 0.0 <= value < math.inf))
PERIOD = Kind[float]("a number of at least 0", _number(lambda value: value >= 0.0))  # infinity: never
SHARE = Kind[float]("a number above 0 and up to 1", _number(lambda value: 0.0 < value <= 1.0))
FLAG = Kind[bool]("true or false", lambda value: isinstance(value, bool))
TEXT = Kind[str]("text", lambda value: isinstance(value, str))
TYPE = Kind[Any]("the name of a type, true or false", lambda value: isinstance(value, str | bool))
ANYTHING = Kind[Any]("a value", lambda value: value is not None)
#: Kinds by their names in `rlsim/data/keys.csv`.
KINDS: Mapping[str, Kind[Any]] = {
    "whole": WHOLE, "count": COUNT, "integer": INTEGER, "number": NUMBER, "period": PERIOD, "share": SHARE,
    "flag": FLAG, "text": TEXT, "type": TYPE, "anything": ANYTHING,
}  # fmt: skip
#: Settings by the names that rlsim has for them: the kind of each, and its keys, of which the first that has a value
#: counts.
Names = Mapping[str, tuple[Kind[Any], tuple[str, ...]]]


@dataclass(frozen=True)
class Unknown:
    """Why a value cannot be told from the text, and the variable that would tell it ("" if none would).

    `unset`: nothing gives that variable, or argument, a value.
    """

    why: str
    variable: str = ""
    unset: bool = False


@dataclass(kw_only=True)
class Settings:
    """What files and overrides say (`given`), and what the program would take for the rest (`default`).

    `origin` has the place of what is given, `doubts` those keys whose value the text does not tell, `notes` what to
    know about reading them; `name` is that of the first file, as of an experiment, and `file` as messages have it.
    `program` and `option` name what the settings are of in messages; `asked` collects the keys that were asked for,
    `inherited` the files that others inherit from. Whatever asks for a key takes one of `names` as well.
    """

    program: str = ""
    option: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, tuple[str, Unknown]] = field(default_factory=dict)  # place, why
    default: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    name: str = ""
    file: str = "the configuration"
    asked: set[str] = field(default_factory=set)
    inherited: set[str] = field(default_factory=set)  # names of files that a file inherits from
    sourced: list[str] = field(default_factory=list)  # those that scripts source, without their ends
    names: Names = field(default_factory=dict)

    def put(
        self, data: Mapping[str, Any], place: str, prefix: str = "", *, lines: bool = False, replaces: bool = False
    ) -> None:
        """Take every leaf of a nested mapping; with `lines`, its line in the file `place` is added.

        None replaces the keys below it; with `replaces` any value does, keys the value above them, and a mapping that
        has `_override_` what was below it.
        """
        marks = getattr(data, "lc", None) if lines else None
        for key, value in data.items():
            name = f"{prefix}{key}"
            if value is None or (replaces and (not isinstance(value, Mapping) or value.get(_REPLACES))):
                for below in [other for other in self.given if other.startswith(f"{name}.")]:
                    del self.given[below]
            if isinstance(value, Mapping):
                if replaces:
                    self.given.pop(name, None)
                self.put(value, place, f"{name}.", lines=lines, replaces=replaces)
            elif key != _REPLACES or not replaces:
                mark = marks.data.get(key) if marks is not None and marks.data else None  # keys merged by << have none
                # A float of ruamel.yaml's own kind remembers how it was written.
                self.given[name] = float(value) if isinstance(value, float) else value
                self.origin[name] = f"{place}:{mark[0] + 1}" if mark else place

    def keys(self, *names: str) -> tuple[str, ...]:
        """The keys of these names; a key stands for itself, and has dots or dashes where there are names."""
        there = self.names
        plain = (name if "." in name or "--" in name or not there else "" for name in names)
        return tuple(key for name, own in zip(names, plain, strict=True) for key in ((own,) if own else there[name][1]))

    def key(self, name: str) -> str:
        return self.keys(name)[0]

    def get(self, kind: Kind[T], *keys: str) -> T | None:
        """The value of the first of these keys that has one: as given, else the program's default; None without.

        Raises `ConfigError` for a value of another kind, and for one that the text does not tell.
        """
        keys = self.keys(*keys)
        self.asked.update(keys)
        for key in keys:
            if key in self.doubts:
                place, unknown = self.doubts[key]
                give = f"{unknown.variable}=… or {key}=…" if unknown.variable else f"{key}=…"
                raise ConfigError(f"{place}: {key}: {unknown.why}; give {give} beside {self.option}")
            value = self.given.get(key)
            self._check_sections(kind, key)
            if value is not None:
                if not kind.fits(value):
                    raise ConfigError(f"{self.origin[key]}: {key}: expected {kind.expected}, got {shown(value)}")
                return value  # type: ignore[no-any-return]
        return next((self.default[key] for key in keys if self.default.get(key) is not None), None)

    def need(self, kind: Kind[T], *keys: str) -> T:
        """The same; raises `ConfigError` where there is no value."""
        value = self.get(kind, *keys)
        if value is None:
            key = self.key(keys[0])
            place = self.origin.get(key) or self.file
            near = get_close_matches(key, [one for one in self.given if one != key], n=1, cutoff=0.92)
            way = f"is {near[0]} ({self.origin.get(near[0])}) it?" if near else f"give {key}=… beside {self.option}"
            raise ConfigError(f"{place}: {key} has no value: expected {kind.expected}; {way}")
        return value

    def whole(self, *keys: str) -> int:
        """A whole number of at least 1, which must have a value."""
        return self.need(WHOLE, *keys)

    def text(self, *keys: str) -> str:
        return self.need(TEXT, *keys)

    def flag(self, *keys: str) -> bool:
        return bool(self.get(FLAG, *keys))

    def value(self, name: str) -> Any:
        """The value of one of `names`, None without."""
        return self.get(self.names[name][0], name)

    def needed(self, name: str) -> Any:
        return self.need(self.names[name][0], name)

    def entry(self, name: str) -> Entry:
        return Entry(self.needed(name), self.where(name))

    def told(self, kind: Kind[T], *keys: str) -> T | None:
        """The value of the first of these keys that has one which the text tells; None if none has."""
        known = [key for key in self.keys(*keys) if key not in self.doubts]
        return self.get(kind, *known) if known else None

    def _check_sections(self, kind: Kind[Any], key: str) -> None:
        """Raises `ConfigError` where one value is given for the section of a key, or keys below the key."""
        above = key.rpartition(".")[0]
        while above:
            if self.given.get(above) is not None:
                got = shown(self.given[above])
                raise ConfigError(f"{self.origin[above]}: {above}: expected keys below it, got {got}")
            above = above.rpartition(".")[0]
        below = next((other for other in self.given if other.startswith(f"{key}.")), "")
        if below and kind is not ANYTHING:
            raise ConfigError(f"{self.origin[below]}: {key}: expected {kind.expected}, got keys below it ({below})")

    def where(self, *keys: str) -> str:
        keys = self.keys(*keys)
        found = next((key for key in keys if self.given.get(key) is not None), None)
        if found is not None:
            return f"{found} ({self.origin[found]})"
        key = next((key for key in keys if self.default.get(key) is not None), keys[0])
        return f"{key}: {self.program}'s default"

    def said(self, *names: str) -> str:
        return "; ".join(map(self.where, names))

    def is_given(self, *keys: str) -> bool:
        """Whether a file or an override says one of these."""
        return any(self.given.get(key) is not None or key in self.doubts for key in self.keys(*keys))

    def has(self, section: str) -> bool:
        """Whether a file or an override says anything below this key."""
        return any(key.startswith(f"{section}.") for key in (*self.given, *self.doubts))

    # ---- what was not asked for -------------------------------------------------------------------------------------

    def unasked(self) -> list[str]:
        """Given keys that nobody has asked for; a section of which no key was asked for is one, `section.*`.

        Those of files that the first file inherits from are counted.
        """
        found, inherited = dict[str, None](), 0
        for key in (*self.given, *self.doubts):
            place = self.doubts[key][0] if key in self.doubts else self.origin[key]
            if key in self.asked or (key in self.given and self.given[key] is None):
                continue
            if place.rpartition(":")[0] in self.inherited:
                inherited += 1
                continue
            parts = key.split(".")
            heads = (".".join(parts[:count]) for count in range(1, len(parts)))
            head = next((head for head in heads if not any(one.startswith(f"{head}.") for one in self.asked)), None)
            found[f"{head}.*" if head else key] = None
        return [*found, *([f"and {inherited} keys of the files that it inherits from"] if inherited else [])]

    def check_spelling(self) -> None:
        """Raises `ConfigError` for a given key that nobody has asked for, and that is almost one that somebody has."""
        for key in self.given.keys() - self.asked:
            section, _, last = key.rpartition(".")
            beside = {one.rpartition(".")[2]: one for one in self.asked if one.rpartition(".")[0] == section}
            if near := get_close_matches(last, beside, n=1, cutoff=_MISSPELT):
                meant = beside[near[0]]
                raise ConfigError(f"{self.origin[key]}: unknown key {key}; did you mean {meant}?")
