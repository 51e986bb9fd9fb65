"""Files of settings, read with limits: YAML with line numbers and JSON.

Traces, measurements of other programs and rlsim's own records have readers of their own (`rlsim.base.tables`,
`rlsim.base.records`). These are the user's own files, which may be careless: mistakes are told with file and line.
"""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rlsim.base.catalogue import DATA
from rlsim.errors import ConfigError, printable

MOST_BYTES = 512 * 1024  # ruamel.yaml reads some 60 kB a second
MOST_JSON_BYTES = 64 * 1024 * 1024
#: Whole numbers beyond this fit into no column of a table.
LARGEST_INT = 2**63 - 1

_TAG = "tag:yaml.org,2002:"
#: Values that JSON has, too; those with other tags are read as text: dates, `=` and `<<`, what programs tag.
_VALUES = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null")}


class SyntaxConfigError(ConfigError):
    """Text that is no YAML at all."""


#: Of a path; no for a name that no file can have.
exists, is_file, is_folder = os.path.exists, os.path.isfile, os.path.isdir


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
    data = deepcopy(_parsed(read_text(path), f"{path}:"))
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


@cache
def shipped(name: str) -> Any:
    """A table of `rlsim/data`, read once: YAML as plain values, CSV as its rows of texts, the headings first."""
    path = DATA / name
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))
    return plain(read_yaml(path))


def records(name: str) -> list[dict[str, str]]:
    """The rows of such a CSV file by its headings."""
    head, *rows = shipped(name)
    return [dict(zip(head, row, strict=True)) for row in rows]


@lru_cache(maxsize=4096)
def _parsed(text: str, where: str) -> Any:
    """YAML as ruamel.yaml gives it, checked; for all who read the same text, as `tune` does at each of its trials.

    `where` begins messages and ends so that `LINE:COLUMN` can follow it (`x.yaml:`, `--set a: line `); where neither is
    known it stands without that ending.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import ConstructorError
    from ruamel.yaml.error import MarkedYAMLError

    place = where.removesuffix("line ").removesuffix(" ").removesuffix(":")
    yaml = YAML(typ="rt", pure=True)
    yaml.Constructor = _constructor()
    try:
        return yaml.load(text)
    except RecursionError:
        raise ConfigError(f"{place}: nested too deeply") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            place = f"{where}{mark.line + 1}:{mark.column + 1}"
        kind = ConfigError if isinstance(error, ConstructorError) else SyntaxConfigError
        raise kind(f"{place}: not valid YAML: {printable(str(error.problem or error.context))}") from None
    except Exception as error:  # ruamel.yaml raises much: for NUL, lone surrogates, lists in lists as keys
        raise SyntaxConfigError(f"{place}: not valid YAML: {printable(str(error).splitlines()[0])}") from None


@cache
def _constructor() -> type[Any]:
    """A constructor of what JSON has, whatever the tags; it refuses numbers which no column holds."""
    from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
    from ruamel.yaml.nodes import ScalarNode
    from ruamel.yaml.scalarint import ScalarInt

    class Constructor(RoundTripConstructor):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if not isinstance(node, ScalarNode):
                node.tag = f"{_TAG}{node.id[:3]}"  # a map or seq, whose parts know their places
            elif node.tag not in _VALUES:
                return str(node.value)
            value = super().construct_object(node, deep)
            if isinstance(value, int) and abs(value) > LARGEST_INT:
                why = f"the number {str(node.value)[:20]}… is beyond {LARGEST_INT:,}"
                raise ConstructorError(None, None, why, node.start_mark)
            # Of 0 and 0x10 it remembers the spelling, in a type that no writer of YAML takes.
            return int(value) if isinstance(value, ScalarInt) else value

    return Constructor
