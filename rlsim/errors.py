"""Every error that rlsim raises for a person to read.

All derive from `RlsimError`; the command line prints the message alone and leaves with exit code 2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Characters that a terminal obeys or that reorder what a person reads, but for tabs and ends of lines.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class RlsimError(Exception):
    """Base of all errors caused by input; its text is one complete message for a person."""


class ConfigError(RlsimError):
    """A YAML file or an override does not say what the schema expects."""


class CatalogueError(RlsimError):
    """A GPU, cluster, model, calibration, trace or policy of that name does not exist."""


class TraceError(RlsimError):
    """A trace file is missing, damaged or holds values that no response can have."""


class CalibrationError(RlsimError):
    """A calibration is missing, damaged, or does not fit the GPU it is used for."""


class CapacityError(RlsimError):
    """Something does not fit into GPU memory."""


class PolicyError(RlsimError):
    """A policy asked for something that makes no sense at that moment."""


@contextmanager
def about(what: str, kind: type[RlsimError] = RlsimError) -> Iterator[None]:
    """Errors of this kind in the block begin with `what` they are about."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{what}: {error}") from None


#: Arguments of functions that users call: the types that each may have, and these in words.
_ARGUMENTS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "source": ((str, Path, Mapping), "a file, a name or a mapping"),
    "overrides": ((Mapping, Iterable), "KEY=VALUE texts or a mapping of keys to values"),
    "seeds": ((int, type(None)), "a number of seeds"),
    "workers": ((int, type(None)), "a number of processes"),
    "axes": ((Mapping, type(None)), "a mapping of keys to lists of values"),
    "out": ((str, Path, type(None)), "a directory"),
    "strict": ((bool,), "True or False"),
    "what_if": ((bool,), "True or False"),
    "progress": ((Callable, type(None)), "a function"),  # type: ignore[dict-item]
}


def check_arguments(**given: Any) -> None:
    """Raises `ConfigError` for an argument (by its name) of another type than `_ARGUMENTS` says."""
    for name, value in given.items():
        kinds, what = _ARGUMENTS[name]
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits or (name == "overrides" and isinstance(value, str)):
            raise ConfigError(f"{name}: expected {what}, got {value!r}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> CatalogueError:
    """The error for a name that no catalogue holds, with the nearest valid names."""
    return CatalogueError(f"unknown {kind} {shown(name)}; {nearest(name, known, 'known')}")


def nearest(name: str, known: Iterable[str], otherwise: str = "there are") -> str:
    """`did you mean ...?` of the valid names like this one; if none is like it, all of them after `otherwise`."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"{otherwise}: {', '.join(names)}" if names else "there are none"


def printable(text: str) -> str:
    """The text with control characters as escapes (`\\x1b`); tabs and ends of lines stay.

    Names in files are anyone's: everything on its way to a terminal passes here (see `rlsim.cli.terminal`).
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def one_line(text: str) -> str:
    """The text on one line, printable: for names that are used as they come."""
    return printable(" ".join(text.split()))


def shown(value: Any, most: int = 60) -> str:
    """A value in a message: its `repr`, not longer than `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested ever deeper
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= most else text[: most - 3] + "...")
