"""Files that appear whole or not at all, where nothing of the user's is replaced unasked.

Pages, timelines, the charts of a folder, calibrations and whatever else can tell that rlsim wrote it are replaced
only if it did. Another file that the user names (`--json x.json`) is replaced, as other programs do it, unless it is
an input of the command or a part of some results.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsim.errors import ConfigError, RlsimError

#: What tells a file that rlsim wrote, within its first bytes: pages and charts, timelines, calibrations and clusters.
GENERATOR = '<meta name="generator" content="rlsim">'
SVG_MARK, PNG_MARK = b"<!-- rlsim -->", b"Software\0rlsim"
_MARKS = (
    b'<meta name="generator" content="rlsim', SVG_MARK, PNG_MARK, b'"simulator": "rlsim ', b"# Fitted by ",
    b"`rlsim calibrate`",
)  # fmt: skip
_MARKED_BYTES = 4_096
#: Files that hold the results of a directory together; their tables are Parquet.
_PARTS_OF_RESULTS = ("manifest.json", "advice.json", "sweep.json", "log.jsonl")


@contextmanager
def atomic_path(path: Path, error: type[RlsimError] = ConfigError) -> Iterator[Path]:
    """A temporary path beside `path`, moved onto it when the block ends well and removed when it does not.

    Links are followed: the file that they lead to is replaced. What is no file (`/dev/stdout`, a pipe) is the path
    itself. Raises `error` if it cannot be written (see `check_file`).
    """
    target = check_file(path, error)
    if target.exists() and not target.is_file():
        with _problems(path, error):
            yield target
        return
    with _problems(path, error):
        handle, name = tempfile.mkstemp(prefix=".rlsim-", suffix=target.suffix, dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
            flush(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def resolved(path: str | Path, error: type[RlsimError] = ConfigError) -> Path:
    """Where a path leads once all links are followed; raises `error` if no file can be there, whatever its name."""
    with _problems(path, error):
        target = Path(os.path.realpath(path))
        try:
            if stat.S_ISLNK(target.lstat().st_mode):
                raise OSError("a link that leads to itself")
        except FileNotFoundError:
            pass
    return target


def check_file(path: Path, error: type[RlsimError] = ConfigError, *, inputs: Iterable[str | Path] = ()) -> Path:
    """Where such a file would be written, links followed.

    Raises `error` if there is no folder for it, it cannot be written there, a folder is in its place, it is one of the
    `inputs` of the command, or a part of some results.
    """
    target = resolved(path, error)
    if not target.parent.is_dir():
        raise error(f"{path}: the folder {path.parent} does not exist")
    if target.is_dir():
        raise error(f"{path}: is a folder; give a file name")
    if target.exists():
        for one in inputs:
            if Path(one).exists() and target.samefile(one):
                raise error(f"{path}: is what the command reads; give another name")
        beside = any((target.parent / name).is_file() for name in _PARTS_OF_RESULTS)
        if target.name in _PARTS_OF_RESULTS or (target.suffix == ".parquet" and beside):
            raise error(f"{path}: is a part of results; give another name")
        if not target.is_file():
            return target
    check_writable(target.parent, path, error)
    return target


def check_own_file(path: Path, error: type[RlsimError] = ConfigError) -> Path:
    """The same for a file that can tell who wrote it: raises `error` also if one is there that rlsim did not write."""
    target = check_file(path, error)
    if target.is_file() and not written_by_rlsim(target):
        raise error(f"{path}: exists, and rlsim did not write it; move it away or give another name")
    return target


def written_by_rlsim(path: Path) -> bool:
    """Whether a page, chart, timeline, calibration or cluster file is one that rlsim wrote."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(_MARKED_BYTES)
    except (OSError, EOFError):
        return False
    return any(mark in head for mark in _MARKS)


def check_writable(folder: Path, shown: str | Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if no file can be made in a folder; `shown` is what the user wants to write."""
    with _problems(shown, error), tempfile.TemporaryFile(dir=folder):
        pass


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do that with folders
            raise
    finally:
        os.close(descriptor)


def reason(problem: Exception) -> str:
    """Why a file could not be read or written, in a line."""
    return (getattr(problem, "strerror", None) or str(problem)).partition("\n")[0]


@contextmanager
def _problems(shown: str | Path, error: type[RlsimError]) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise error(f"{shown}: cannot be written: {reason(problem)}") from None
    except ValueError as problem:
        if "\0" not in str(shown):
            raise
        raise error(f"{str(shown)!r}: cannot be written: {problem}") from None


def results_folder(name: str) -> Path:
    """Where the results of an experiment or sweep of that name go if nothing else is said: a folder in `results`."""
    return Path("results") / (re.sub(r"[/\\]+", "-", name).lstrip(".") or "unnamed")
