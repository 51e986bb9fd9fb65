"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsim.errors import ConfigError, RlsimError

CHART_SUFFIXES = (".html", ".svg", ".png")


@contextmanager
def atomic_path(path: Path, error: type[RlsimError] = ConfigError) -> Iterator[Path]:
    """A temporary path beside `path`, moved onto it when the block ends well and removed when it does not.

    Raises `error` for a folder that does not exist or cannot be written to.
    """
    check_folder(path, error)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
    except OSError as problem:
        raise error(f"{path}: cannot be written: {problem.strerror}") from None
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as problem:
        raise error(f"{path}: cannot be written: {problem.strerror or problem}") from None
    finally:
        temporary.unlink(missing_ok=True)


def results_folder(name: str) -> Path:
    """Where the results of an experiment or sweep of that name go if nothing else is said: a folder in `results`."""
    return Path("results") / (re.sub(r"[/\\]+", "-", name).lstrip(".") or "unnamed")


def check_folder(path: Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if there is no folder for such a file, or a folder in its place."""
    if not path.parent.is_dir():
        raise error(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise error(f"{path}: is a folder; give a file name")


def check_chart_path(path: Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if a chart cannot be written as such a file."""
    if path.suffix not in CHART_SUFFIXES:
        raise error(f"{path}: a chart is written as one of {', '.join(CHART_SUFFIXES)}")


def save_chart(figure: Any, path: Path, error: type[RlsimError] = ConfigError) -> None:
    """An Altair chart as .html (which holds everything it needs), .svg or .png; raises `error` for another ending."""
    check_chart_path(path, error)
    with atomic_path(path, error) as temporary:
        if path.suffix == ".html":
            figure.save(temporary, format="html", inline=True)
        else:
            figure.save(temporary, format=path.suffix[1:], scale_factor=2 if path.suffix == ".png" else 1)
