"""Code that experiments and packages name as `module:attribute`: imported where its mistakes become messages.

Naming code runs it: an experiment file that names modules is as trusted as a program. What can be told apart without
running it is refused first: modules of Python's standard library hold no parts of a system and no workflows.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rlsim.errors import ConfigError, PolicyError, RlsimError, printable

#: Files and folders that modules named by users were loaded from.
_FOREIGN: set[str] = set()


def load_module(name: str, what: str) -> ModuleType:
    """The module of that name; raises `ConfigError` that begins with `what`, with the line at which it fails."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{what}: {name} is a module of Python's standard library")
    try:
        if not is_ours(name):
            _FOREIGN.update(_roots(name))
        return importlib.import_module(name)
    except RlsimError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} cannot be loaded: {told(error)}") from error


def load_object(name: str, what: str) -> Any:
    """What `module:attribute` names; raises `ConfigError` that begins with `what` if there is no such thing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{what} cannot be loaded: expected module:name, got {name!r}")
    module = load_module(module_name, what)
    try:
        return getattr(module, attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} cannot be loaded: {told(error)}") from error


@contextmanager
def blamed(what: str, kind: type = object) -> Iterator[None]:
    """Turns errors of a user's code in the block into `PolicyError`s that begin with `what`, and so attempts to exit.

    `PolicyError`s get that beginning too; the exception of the user's code is their `__cause__`. Errors that no line of
    such code took part in are left as they are. Where the block does nothing but make an object of the class `kind`,
    and that class is not rlsim's own, every error counts as the user's.
    """
    try:
        yield
    except PolicyError as error:
        if str(error).startswith(what):
            raise
        raise PolicyError(f"{what}: {error}") from origin(error)
    except RlsimError:
        raise
    except (Exception, SystemExit) as error:
        if kind is not object and not is_ours(kind.__module__):
            raise PolicyError(f"{what}: {kind.__name__}(): {told(error, vars(kind).get('__init__'))}") from error
        if isinstance(error, SystemExit) or _line(error):
            raise PolicyError(f"{what}: {told(error)}") from error
        raise


class Line(NamedTuple):
    """A line of a user's code: the file as messages have it, the line's number, and its text."""

    file: str
    number: int | None
    text: str

    def put(self, what: str) -> str:
        """`file:line: what (line 6: text)`."""
        text = f" (line {self.number}: {self.text})" if self.text else ""
        return printable(f"{self.file}:{self.number}: {what}{text}")


def told(error: BaseException, function: Any = None) -> str:
    """What went wrong, with file, line and text of the code outside rlsim that raised it.

    `function` is what was called: its file is a user's, and its definition is named if no line of it was reached.
    """
    if isinstance(error, SyntaxError) and error.filename:
        file = _foreign(error.filename) or error.filename
        return Line(file, error.lineno, (error.text or "").strip()).put(f"{type(error).__name__}: {error.msg}")
    text = str(error) if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SystemExit):
        text = f"it leaves Python (exit code {error.code})"
    line = _line(error, getattr(getattr(unwrap(function), "__code__", None), "co_filename", ""))
    return line.put(text) if line else defined(function, text)


def defined(function: Any, what: str) -> str:
    """`what`, with file, line and text of the definition of a function of a user's; alone if it is none."""
    code = getattr(function, "__code__", None)
    if code is None or is_ours(function.__module__):
        return printable(what)
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return Line(_named(code.co_filename), code.co_firstlineno, text).put(what)


def is_ours(module: str) -> bool:
    """Whether a module is a part of rlsim."""
    return module.partition(".")[0] == "rlsim"


def origin(error: BaseException) -> BaseException | None:
    """What a `PolicyError` was made of: the first cause that is none; another error is its own."""
    cause: BaseException | None = error
    while isinstance(cause, PolicyError):
        cause = cause.__cause__
    return cause


def _line(error: BaseException | None, own: str = "") -> Line | None:
    """The innermost line of a user's code, or of the file `own`, that an error, or what caused it, passed."""
    line = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == own or _foreign(frame.filename):
                line = Line(_named(frame.filename), frame.lineno, frame.line or "")
        error = error.__cause__  # the engine's processes raise a copy
    return line


def _named(file: str) -> str:
    """A file of a user's code in messages: the same on any machine."""
    return _foreign(file) or Path(file).name


def _foreign(file: str) -> str:
    """A file of a user's code from where its module or package lies, the same on any machine; empty for another."""
    roots = (root for root in _FOREIGN if file == root or file.startswith(root + os.sep))
    return next((Path(file).relative_to(Path(root).parent).as_posix() for root in roots), "")


def _roots(name: str) -> list[str]:
    """The file of a module, or the folders of its package, found without importing it."""
    top = name.partition(".")[0]
    spec = None if top == "__main__" else importlib.util.find_spec(top)
    if spec is None:
        return []
    return list(spec.submodule_search_locations or ([spec.origin] if spec.origin else []))
