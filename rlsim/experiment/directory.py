"""The directory of some results: which of its files are rlsim's, and how new ones take their place.

New files are written whole in `.rlsim-new-…`, which then is renamed to `.rlsim-next`: from that moment they are the
results. They move to their places one by one, the manifest last; who finds `.rlsim-next` after a crash, a reader or the
next writer, goes on with that. Files that rlsim did not write stay where they are, or the directory is refused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlsim.errors import ConfigError
from rlsim.experiment.columns import TABLES
from rlsim.output import check_writable, flush, reason, resolved, written_by_rlsim
from rlsim.records import file_sha256, read_record

MANIFEST = "manifest.json"
_NEW, _NEXT = ".rlsim-new-", ".rlsim-next"
#: Written from results by other commands; out of date when there are new ones.
_DERIVED = ("report.html", "timeline.json", "timeline.json.gz")


def check_target(directory: str | Path, extra: Collection[str] = (), name: str | None = None) -> None:
    """Check that results, with a manifest, all tables and `extra` files, can be written there.

    Raises `ConfigError` if they cannot, or if that would replace what rlsim did not write, or the results of an
    experiment of another name than `name`.
    """
    target = resolved(directory)
    there = earlier(directory)
    if name is not None and there and there["experiment"]["name"] != name:
        raise ConfigError(
            f"{directory} holds the results of another experiment, {there['experiment']['name']}, and this one is "
            f"{name}: name another directory (--out), or remove that one"
        )
    if target.is_dir():
        with _locked(target):
            _check(target, directory, extra)
    elif target.exists():
        raise ConfigError(f"{directory} is a file; give a directory")
    else:
        check_writable(next(parent for parent in target.parents if parent.exists()), directory)


@contextmanager
def replacing(directory: str | Path, extra: Collection[str] = ()) -> Iterator[Path]:
    """A folder to write new results to, which are those of `directory` when the block ends well.

    Links are followed. Raises `ConfigError` as `check_target` does; then nothing is changed.
    """
    check_target(directory, extra)
    target = resolved(directory)
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _locked(target) as alone:
            _check(target, directory, extra)  # again: others may have written there since
            for left in target.glob(f"{_NEW}*") if alone else ():
                shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=_NEW, dir=target))
            try:
                yield scratch
                for path in (*scratch.iterdir(), scratch):
                    flush(path)
                scratch.rename(target / _NEXT)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            _finish(target)
    except BaseException as error:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(f"{directory}: cannot be written: {reason(error)}") from None
        raise


def earlier(directory: str | Path) -> dict[str, Any] | None:
    """The manifest of the results in a directory; None if there are none that can be read."""
    try:
        with reading(Path(directory)) as (manifest, _):
            return manifest
    except ConfigError:
        return None


def finish(directory: Path) -> None:
    """Go on with a replacement that was interrupted when the new results were there; raises `ConfigError`."""
    if (directory / _NEXT).is_dir():
        try:
            with _locked(directory):
                _finish(directory)
        except OSError as error:
            raise ConfigError(
                f"{directory}: writing results was interrupted, and cannot go on: {reason(error)}; "
                f"the new ones are in {directory / _NEXT}"
            ) from None


@contextmanager
def reading(folder: Path) -> Iterator[tuple[dict[str, Any], Mapping[str, str]]]:
    """The manifest of a results directory, and the SHA-256 of its files by name; nobody replaces them in the block.

    Waits for who replaces them. Raises `ConfigError` if there is none, or it is not as it was written.
    """
    finish(folder)
    with _locked(folder, shared=True):
        try:
            manifest = read_record(folder / MANIFEST)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no rlsim results (no {MANIFEST})") from None
        yield manifest, manifest.pop("files")


def _check(target: Path, shown: str | Path, extra: Collection[str]) -> None:
    """`check_target` for an existing directory whose lock is held."""
    check_writable(target, shown)
    _finish(target)
    names = {path.name for path in target.iterdir() if not path.name.startswith(_NEW)}
    if names and MANIFEST not in names:
        raise ConfigError(f"{shown} exists and holds no rlsim results; choose another directory")
    try:
        known = {MANIFEST, *_own_files(target)} if names else set()
    except ConfigError as error:
        raise ConfigError(f"{error}\n{shown} is left as it is; choose another directory") from None
    taken = {MANIFEST, *extra, *(f"{table}.parquet" for table in TABLES)} & names - known
    if taken:
        raise ConfigError(
            f"{shown} holds {', '.join(sorted(taken))}, which rlsim did not write or which was changed since; "
            "move it away or choose another directory"
        )


def _finish(target: Path) -> None:
    """`finish` for a directory whose lock is held."""
    new = target / _NEXT
    if not new.is_dir():
        return
    if (new / MANIFEST).is_file():
        kept = {MANIFEST, *read_record(new / MANIFEST)["files"]}
        for name in (_own_files(target) if (target / MANIFEST).is_file() else set()) - kept:
            (target / name).unlink(missing_ok=True)
        for path in sorted(new.iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(target / path.name)
        flush(target)
    new.rmdir()


def _own_files(target: Path) -> set[str]:
    """The files beside a manifest that rlsim wrote; raises `ConfigError` if the manifest is not rlsim's."""
    listed = read_record(target / MANIFEST)["files"]
    own = {name for name in listed if (target / name).is_file() and file_sha256(target / name) == listed[name]}
    return own | {name for name in _DERIVED if written_by_rlsim(target / name)}


@contextmanager
def _locked(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """One process at a time writes results to a folder, or many read them; whether the system could see to that."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            alone = True
        except OSError:  # a network file system that has no locks
            alone = False
        yield alone
    finally:
        os.close(descriptor)
