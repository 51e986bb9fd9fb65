"""Code that experiments and packages name as `module:attribute`: imported where its mistakes become messages.

Naming code runs it: an experiment file that names modules is as trusted as a program. What can be told apart without
running it is refused first: modules of Python's standard library hold no parts of a system and no workflows.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsim.errors import ConfigError, PolicyError, RlsimError, printable

#: Files and folders that modules named by users were loaded from.
_FOREIGN: set[str] = set()


def load_module(name: str, what: str) -> ModuleType:
    """The module of that name; raises `ConfigError` that begins with `what`, with the line at which it fails."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{what}: {name} is a module of Python's standard library")
    try:
        if not _ours(name):
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

    Errors that no line of such code took part in are left as they are. Where the block does nothing but make an object
    of the class `kind`, and that class is not rlsim's own, every error counts as the user's.
    """
    try:
        yield
    except RlsimError:
        raise
    except (Exception, SystemExit) as error:
        others = kind is not object and not _ours(kind.__module__)
        if isinstance(error, SystemExit) or others or _place(error):
            raise PolicyError(f"{what}: {told(error)}") from error
        raise


def told(error: BaseException) -> str:
    """What went wrong, with file and line of the code outside rlsim that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_foreign(error.filename) or error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    text = str(error) if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SystemExit):
        text = f"it leaves Python (exit code {error.code})"
    return printable(f"{_place(error)}{text}")


def _ours(module: str) -> bool:
    """Whether a module is a part of rlsim."""
    return module.partition(".")[0] == "rlsim"


def _place(error: BaseException | None) -> str:
    """`file:line: ` of the innermost line of a user's code that an error, or what caused it, passed; else empty."""
    place = ""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame in traceback.extract_tb(error.__traceback__):
            if name := _foreign(frame.filename):
                place = f"{name}:{frame.lineno}: "
        error = error.__cause__  # the engine's processes raise a copy
    return place


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
