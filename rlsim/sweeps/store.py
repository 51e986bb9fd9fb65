"""The directory of a sweep: one Parquet file per table and point, each there whole or not at all.

    sweep.json                        the definition: experiment, points, axis columns
    steps/point=p0123…/part.parquet   a table, a file for each point; one that has its `summary`, written last, is done
    failed/p0123….json                why a point has no results
    points.parquet                    one row per point: its axes, done or failed, the error
    log.jsonl                         when what ran for how long: the only file that differs from run to run

Only the process that runs the sweep writes here, and only one at a time: it holds a lock that the system takes back
when it dies. Files are written in `.tmp`, flushed to disk and then moved to their place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlsim.errors import ConfigError
from rlsim.sweeps.points import Point
from rlsim.sweeps.tables import COLUMNS, has_axes, to_bytes, with_axes
from rlsim.sweeps.task import Failed

DEFINITION = "sweep.json"
POINTS = "points.parquet"
LOG = "log.jsonl"
LOCK = ".lock"
TEMPORARY = ".tmp"
PART = "part.parquet"
#: Missing: to be run. Restamp: its results are there, under the axis columns of an earlier definition.
State = Literal["missing", "restamp", "done"]


class Store:
    """The files of one sweep."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The sole right to write here, and a clean place for temporary files.

        Raises `ConfigError` if another process has it, or the directory holds something else.
        """
        self._check_target()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / LOCK).open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.directory}: cannot be written: {error.strerror}") from None
        with lock:
            _take(lock.fileno(), self.directory)
            self._clean()
            try:
                yield
            finally:
                self._clean()

    def definition(self) -> dict[str, Any] | None:
        """What `write_definition` wrote; None if nothing has run here.

        Raises `ConfigError` if it is damaged, or not the definition of a sweep.
        """
        path = self.directory / DEFINITION
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: damaged: {error}") from None
        if not isinstance(found, dict) or not set(found) >= {"rlsim", "name", "tables", "axes", "points"}:
            raise ConfigError(f"{path}: not written by rlsim sweep; choose another directory")
        return cast("dict[str, Any]", found)

    def write_definition(self, definition: Mapping[str, Any]) -> None:
        """Write what the sweep is."""
        text = json.dumps(definition, indent=1, ensure_ascii=False) + "\n"
        self._write(self.directory / DEFINITION, text.encode())

    def path(self, table: str, point: str) -> Path:
        """The file of one table of one point."""
        return self.directory / table / f"point={point}" / PART

    def done(self) -> set[str]:
        """Every point whose results are here."""
        return {path.parent.name.removeprefix("point=") for path in self.directory.glob(f"summary/point=*/{PART}")}

    def unfinished(self) -> set[str]:
        """Every point that has left something here, but no results: it failed, or was interrupted."""
        parts = {path.name.removeprefix("point=") for path in self.directory.glob("*/point=*")}
        return (parts | {path.stem for path in self.directory.glob("failed/p*.json")}) - self.done()

    def state(self, point: Point, tables: Sequence[str]) -> State:
        """What there is of a point; a file that cannot be read counts as missing."""
        if not self.path("summary", point.name).is_file():
            return "missing"
        try:
            schemas = {table: pq.read_schema(self.path(table, point.name)) for table in tables}
        except (OSError, pa.ArrowException):
            return "missing"
        return "done" if all(has_axes(s, point.axes, table) for table, s in schemas.items()) else "restamp"

    def put(self, point: str, files: Mapping[str, bytes]) -> None:
        """Write the tables of a point, the summary last."""
        for table, data in sorted(files.items(), key=lambda item: item[0] == "summary"):
            self._write(self.path(table, point), data)
        (self.directory / "failed" / f"{point}.json").unlink(missing_ok=True)

    def restamp(self, point: Point, tables: Sequence[str]) -> bool:
        """Give a point's tables the axis columns of the present definition; whether all of them could be read."""
        try:
            rows = {table: pq.ParquetFile(self.path(table, point.name)).read() for table in tables}
        except (OSError, pa.ArrowException):
            return False
        self.put(point.name, {table: to_bytes(with_axes(r, point.axes, table)) for table, r in rows.items()})
        return True

    def fail(self, point: str, answer: Failed) -> None:
        """Record why a point has no results."""
        text = json.dumps({"error": answer.error, "details": answer.details}, indent=1, ensure_ascii=False) + "\n"
        self._write(self.directory / "failed" / f"{point}.json", text.encode())

    def failure(self, point: str) -> Failed | None:
        """Why a point has no results, if that was recorded."""
        try:
            return Failed(**json.loads((self.directory / "failed" / f"{point}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def remove(self, point: str) -> None:
        """Remove everything of a point, the summary first."""
        for table in ("summary", *(name for name in COLUMNS if name != "summary")):
            shutil.rmtree(self.path(table, point).parent, ignore_errors=True)
        (self.directory / "failed" / f"{point}.json").unlink(missing_ok=True)

    def write_points(self, rows: pa.Table) -> None:
        """Write the table of points."""
        self._write(self.directory / POINTS, to_bytes(rows))

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        try:
            with (self.directory / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.directory / LOG}: cannot be written: {error.strerror}") from None

    def _write(self, path: Path, data: bytes) -> None:
        """The file whole or not at all, even if the power fails."""
        temporary = self.directory / TEMPORARY / f"{path.parent.name}.{path.name}"
        try:
            temporary.parent.mkdir(exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush_folder(path.parent)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None

    def _clean(self) -> None:
        shutil.rmtree(self.directory / TEMPORARY, ignore_errors=True)

    def _check_target(self) -> None:
        target = self.directory
        if not target.exists():
            return
        if not target.is_dir():
            raise ConfigError(f"{target} is a file; give a directory")
        names = {path.name for path in target.iterdir()}
        if DEFINITION not in names and names - {LOCK, TEMPORARY}:
            raise ConfigError(f"{target} exists and holds no sweep; choose another directory")


def _take(descriptor: int, directory: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system: nothing keeps two sweeps apart
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{directory}: another process is running a sweep here") from None


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot
        pass
    finally:
        os.close(descriptor)
