"""Files that appear whole or not at all. What rlsim names itself is replaced only if rlsim wrote it."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError, RlsimError

#: What tells pages, charts, timelines and calibrations that rlsim wrote, within their first bytes.
GENERATOR = '<meta name="generator" content="rlsim">'
SVG_MARK, PNG_MARK = b"<!-- rlsim -->", b"Software\0rlsim"
_MARK = re.compile(
    rb'content="rlsim|<!-- rlsim|Software\0rlsim|"simulator": "rlsim |\A# Tables of '
    rb"|\A# (Fitted by .+; change that, not this\.|(This machine, as|The model as) `rlsim calibrate` )"
)
_MARKED_BYTES = 4_096


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


def write_text(path: Path, text: str, error: type[RlsimError] = ConfigError) -> None:
    """A text as a file, by `atomic_path`; half a surrogate pair, which UTF-8 has not, is spelled out."""
    with atomic_path(path, error) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_bytes(path: Path, data: bytes) -> None:
    """A file by `atomic_path`, in a folder that is made if need be; raises `ConfigError` if that is not possible."""
    make_folder(path.parent)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; raises `ConfigError` if that is not possible."""
    with _problems(folder, ConfigError):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(folder: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool | None]:
    """One process at a time writes to a folder, or many read it; false if another one does and this one does not wait.

    None where the system has no such locks.
    """
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield None
        return
    alone: bool | None = True
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            alone = False
        except OSError:  # a network file system
            alone = None
        yield alone
    finally:
        os.close(descriptor)


def resolved(path: str | Path, error: type[RlsimError] = ConfigError) -> Path:
    """Where a path leads once all links are followed; raises `error` if no file can be there, whatever its name."""
    with _problems(path, error):
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError("a link that leads to itself")
    return target


def check_file(path: Path, error: type[RlsimError] = ConfigError, *, inputs: Iterable[str | Path] = ()) -> Path:
    """Where such a file would be written, links followed.

    Raises `error` if there is no folder for it, it cannot be written there, a folder is in its place, or it is one of
    the `inputs` of the command.
    """
    with _problems(path, error):
        if path.exists() and not path.is_file() and not path.is_dir():
            return path  # `/dev/stdout` may lead to a pipe, which has no name
    target = resolved(path, error)
    read = target.exists() and any(Path(one).exists() and target.samefile(one) for one in inputs)
    refuse("file to write", error, path=path, target=target, read=read)
    check_writable(target.parent, path, error)
    return target


def check_files(*paths: Path | None, inputs: Iterable[str | Path] = ()) -> None:
    """`check_file` for all that a command writes, None for what it does not; raises `ConfigError` if two are one."""
    inputs, seen = tuple(inputs), set[Path]()
    for path in paths:
        if path is not None:
            target = check_file(path, inputs=inputs)
            if target in seen:
                raise ConfigError(f"{path}: two options write to this file; give different names")
            seen.add(target)


def check_own_file(path: Path, error: type[RlsimError] = ConfigError) -> Path:
    """`check_file` for a file that can tell who wrote it: raises `error` also if rlsim did not write the one there."""
    target = check_file(path, error)
    if target.is_file() and not written_by_rlsim(target):
        raise error(f"{path}: exists, and rlsim did not write it; move it away or give another name")
    return target


def written_by_rlsim(path: Path) -> bool:
    """Whether a page, chart, timeline, calibration or cluster file is one that rlsim wrote."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _MARK.search(file.read(_MARKED_BYTES)) is not None
    except (OSError, EOFError, zlib.error):
        return False


def check_writable(folder: Path, shown: str | Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if no file can be made in a folder; `shown` is what the user wants to write."""
    with _problems(shown, error), tempfile.TemporaryFile(dir=folder):
        pass


def check_folder(path: str | Path) -> Path:
    """Where a folder would be written, links followed; raises `ConfigError` if it is a file, or cannot be written."""
    target = resolved(path)
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{path} is a file; give a directory")
    check_writable(next(folder for folder in (target, *target.parents) if folder.exists()), path)
    return target


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
    except BrokenPipeError:  # the reader has gone, as of standard output
        raise
    except OSError as problem:
        raise error(f"{shown}: cannot be written: {reason(problem)}") from None


def results_folder(name: str) -> Path:
    """Where the results of an experiment or sweep of that name go if nothing else is said: a folder in `results`."""
    plain = re.sub(r"[/\\]+", "-", name).lstrip(".") or "unnamed"
    other = "" if plain == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"  # not that of the plain name
    return Path("results") / f"{plain}{other}"
