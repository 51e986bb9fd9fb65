"""Files of settings, read with limits: YAML with line numbers and JSON, from people and programs that may be careless.

Traces, measurements of other programs and rlsim's own records have readers of their own (`rlsim.base.tables`,
`rlsim.base.records`). What no settings file needs (tags, dates, keys that are no names, hundreds of levels, aliases
that grow a thousandfold) is refused with file and line, before anything is made of it.
"""

from __future__ import annotations

import json
import stat
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsim.errors import ConfigError, printable, shown

if TYPE_CHECKING:
    from ruamel.yaml import YAML

MOST_BYTES = 512 * 1024  # ruamel.yaml reads some 60 kB a second
MOST_JSON_BYTES = 64 * 1024 * 1024
MOST_LEVELS = 40
#: Values of a file with every alias counted as what it stands for.
MOST_VALUES = 200_000
#: Whole numbers beyond this fit into no column of a table.
LARGEST_INT = 2**63 - 1

_TAG = "tag:yaml.org,2002:"
_TEXTS = {_TAG + kind for kind in ("str", "timestamp", "value", "merge")}  # a date is text, as in JSON
_TAGS = {*_TEXTS, *(_TAG + kind for kind in ("int", "float", "bool", "null", "seq", "map"))}
_SAID = {"int": "whole number", "float": "number", "bool": "true or false", "null": "null", "str": "text"}


class SyntaxConfigError(ConfigError):
    """Text that is no YAML at all."""


def _asked(question: Callable[[Path], bool]) -> Callable[[Path], bool]:
    """A question about a path, whose answer is no for a name that no file can have."""

    def ask(path: Path) -> bool:
        try:
            return question(path)
        except (OSError, ValueError):
            return False

    return ask


exists, is_file, is_folder = _asked(Path.exists), _asked(Path.is_file), _asked(Path.is_dir)


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file, UTF-8 with or without a byte-order mark.

    Raises `ConfigError` for a file that is missing, unreadable, larger than `most_bytes`, or no UTF-8 text.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: {'is a folder' if stat.S_ISDIR(mode) else 'is no regular file'}")
        with path.open("rb") as file:  # not more than can be meant, whatever size it says it has
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most_bytes:
        raise ConfigError(f"{path}: cannot be read: larger than {most_bytes // 1024:,} KiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: byte {error.start} is no UTF-8 text") from None


def read_yaml(path: Path) -> Any:
    """The parsed YAML of `path`, with line numbers kept on every mapping and sequence.

    Raises `ConfigError` if the file is missing, unreadable, empty, not YAML, or beyond the limits of this module.
    """
    data = _parsed(read_text(path), f"{path}:")
    if data is None:
        raise ConfigError(f"{path}: the file is empty")
    return data


def parse_yaml(text: str, shown: str) -> Any:
    """One value written as YAML, as plain Python; messages begin with `shown`.

    Raises `SyntaxConfigError` for text that is not YAML, another `ConfigError` for what is beyond the limits.
    """
    return plain(_parsed(text, f"{shown}: line "))


def plain(value: Any) -> Any:
    """Values as ruamel.yaml gives them without the line numbers and spellings that they remember."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def read_json(path: Path) -> Any:
    """The parsed JSON of `path`; raises `ConfigError` if it is missing, unreadable, not JSON or nested too deeply."""
    text = read_text(path, MOST_JSON_BYTES)
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not readable JSON: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits among them
        raise ConfigError(f"{path}: not readable JSON: {error}") from None


def _parsed(text: str, where: str) -> Any:
    """YAML as ruamel.yaml gives it, checked.

    `where` begins messages and ends so that `LINE:COLUMN` can follow it (`x.yaml:`, `--set a: line `); where neither is
    known it stands without that ending.
    """
    from ruamel.yaml.constructor import ConstructorError
    from ruamel.yaml.error import MarkedYAMLError

    place = where.removesuffix("line ").removesuffix(" ").removesuffix(":")
    try:
        data = _yaml().load(text)
    except RecursionError:
        raise ConfigError(f"{place}: nested deeper than {MOST_LEVELS} levels") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            place = f"{where}{mark.line + 1}:{mark.column + 1}"
        kind = ConfigError if isinstance(error, ConstructorError) else SyntaxConfigError
        raise kind(f"{place}: not valid YAML: {printable(str(error.problem or error.context))}") from None
    except Exception as error:  # ruamel.yaml raises much: for NUL, lone surrogates, lists in lists as keys
        raise SyntaxConfigError(f"{place}: not valid YAML: {printable(str(error).splitlines()[0])}") from None
    _check(data, place)
    return data


def _check(data: Any, place: str) -> None:
    """Raises `ConfigError` for keys that are no names, and for more levels or values than may be; aliases count."""
    sizes: dict[int, tuple[int, int]] = {}  # of every mapping and list: values within, and levels
    within: set[int] = set()

    def size(value: Any, level: int) -> tuple[int, int]:
        if not isinstance(value, Mapping | list):
            return 1, 0
        if id(value) in within:
            raise ConfigError(f"{place}: an alias stands for a value that holds itself")
        if id(value) not in sizes:
            if isinstance(value, Mapping):
                for key in value:
                    if isinstance(key, bool) or not isinstance(key, str | int):
                        raise ConfigError(f"{place}: expected a name as key, got {shown(key)}")
            within.add(id(value))
            inside = [size(item, level + 1) for item in (value.values() if isinstance(value, Mapping) else value)]
            within.remove(id(value))
            sizes[id(value)] = 1 + sum(count for count, _ in inside), 1 + max((below for _, below in inside), default=0)
        count, below = sizes[id(value)]
        if level + below > MOST_LEVELS:
            raise ConfigError(f"{place}: nested deeper than {MOST_LEVELS} levels")
        if count > MOST_VALUES:
            raise ConfigError(f"{place}: more than {MOST_VALUES:,} values, those that aliases stand for included")
        return sizes[id(value)]

    size(data, 0)


@cache
def _kinds() -> tuple[type[Any], type[Any]]:
    """A scanner that refuses deep brackets, and a constructor that refuses tags and tells wrong values."""
    from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
    from ruamel.yaml.nodes import ScalarNode
    from ruamel.yaml.scalarint import ScalarInt
    from ruamel.yaml.scanner import RoundTripScanner

    class Scanner(RoundTripScanner):
        def fetch_flow_collection_start(self, *arguments: Any, **named: Any) -> None:
            if self.flow_level > MOST_LEVELS:  # here, since looking ahead takes time quadratic in them
                raise ConstructorError(None, None, f"nested deeper than {MOST_LEVELS} levels", self.reader.get_mark())
            super().fetch_flow_collection_start(*arguments, **named)

    class Constructor(RoundTripConstructor):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            tag = str(node.tag)
            if node in self.recursive_objects:
                self._refuse(node, "an alias stands for a value that holds itself")
            if tag not in _TAGS:
                self._refuse(node, f"the tag {shown(tag.replace(_TAG, '!!'))} is not supported")
            if not isinstance(node, ScalarNode):
                return super().construct_object(node, deep)
            try:
                value = str(node.value) if tag in _TEXTS - {_TAG + "str"} else super().construct_object(node, deep)
            except (ValueError, ArithmeticError, LookupError):
                self._refuse(node, f"{shown(node.value)} is no {_SAID[tag.removeprefix(_TAG)]}")
            if isinstance(value, str) and (odd := next((c for c in value if not _is_text(c)), None)):
                self._refuse(node, f"text holds the control character {odd!r}")
            if isinstance(value, int) and abs(value) > LARGEST_INT:
                self._refuse(node, f"the number {str(node.value)[:20]}… is beyond {LARGEST_INT:,}")
            # Of 0 and 0x10 it remembers the spelling, in a type that no writer of YAML takes.
            return int(value) if isinstance(value, ScalarInt) else value

        @staticmethod
        def _refuse(node: Any, why: str) -> None:
            raise ConstructorError(None, None, why, node.start_mark)

    return Scanner, Constructor


def _yaml() -> YAML:
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt", pure=True)
    yaml.Scanner, yaml.Constructor = _kinds()
    return yaml


def _is_text(character: str) -> bool:
    return character in "\n\t\r" or unicodedata.category(character) not in ("Cc", "Cs")
