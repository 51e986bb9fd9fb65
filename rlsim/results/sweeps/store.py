"""The directory of a sweep: one Parquet file per table and point, each there whole or not at all.

    sweep.json                        the definition: experiment, points, axis columns
    steps/point=p0123…/part.parquet   a table, a file for each point
    done/p0123….json                  the SHA-256 of each file of a point, and its axes, written last: the point is done
    failed/p0123….json                why a point has no results
    points.parquet                    one row per point: its axes, done or failed, the error
    log.jsonl                         when what ran for how long: the only file that differs from run to run

Only the process that runs the sweep writes here, and only one at a time: it holds a lock that the system takes back
when it dies. Files are written in `.rlsim-tmp`, flushed to disk and then moved to their place. A file that does not
have its SHA-256 counts as missing. Other files are left alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlsim.base.output import check_folder, flush, reason
from rlsim.base.records import file_sha256, read_record, sealed
from rlsim.errors import ConfigError
from rlsim.experiment.columns import Column, opened, to_bytes
from rlsim.results.sweeps.points import Point
from rlsim.results.sweeps.tables import COLUMNS, RECORD, Axis, described
from rlsim.results.sweeps.task import Failed

DEFINITION = "sweep.json"
POINTS = "points.parquet"
LOG = "log.jsonl"
LOCK = ".rlsim-lock"
TEMPORARY = ".rlsim-tmp"
PART = "part.parquet"
_NAME = re.compile(r"p[0-9a-f]{16}")
#: All that rlsim writes here, `rlsim report` too.
_OWN = {DEFINITION, POINTS, LOG, LOCK, TEMPORARY, "done", "failed", "report.html", *COLUMNS}


class Store:
    """The files of one sweep."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The sole right to write here, and a clean place for temporary files.

        Raises `ConfigError` if another process has it, or the directory holds something else.
        """
        target = self._check_target()
        try:
            target.mkdir(parents=True, exist_ok=True)
            lock = (target / LOCK).open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.directory}: cannot be written: {reason(error)}") from None
        with lock:
            _take(lock.fileno(), self.directory)
            self._clean()
            try:
                yield
            finally:
                self._clean()

    def definition(self) -> dict[str, Any] | None:
        """What `write_definition` wrote; None if nothing has run here.

        Raises `ConfigError` if it is damaged, or rlsim did not write it.
        """
        try:
            return read_record(self.directory / DEFINITION)
        except FileNotFoundError:
            return None

    def earlier_definition(self) -> dict[str, Any] | None:
        """What `definition` returns, but None also if it is damaged: for callers that write it anew."""
        try:
            return self.definition()
        except ConfigError:
            return None

    def write_definition(self, definition: Mapping[str, Any]) -> None:
        self._write(self.directory / DEFINITION, sealed(definition))
        (self.directory / "done").mkdir(exist_ok=True)

    def path(self, table: str, point: str) -> Path:
        return self.directory / table / f"point={point}" / PART

    def done(self) -> set[str]:
        """Every point whose results are here."""
        return {path.stem for path in self.directory.glob("done/p*.json") if _NAME.fullmatch(path.stem)}

    def unfinished(self) -> set[str]:
        """Every point that has files here but is not done: it failed, or was interrupted."""
        parts = {path.name.removeprefix("point=") for path in self.directory.glob("*/point=*")}
        found = parts | {path.stem for path in self.directory.glob("failed/p*.json")}
        return set(filter(_NAME.fullmatch, found)) - self.done()

    def whole(self, point: Point, tables: Sequence[str]) -> bool:
        """Whether all these tables of a point are here under its axis columns, none of them damaged."""
        try:
            done = self._done(point.name)
            whole = all(file_sha256(self.path(table, point.name)) == done["files"].get(table) for table in tables)
        except (ConfigError, OSError):
            return False
        return whole and bool(done["axes"] == described(point.axes))

    def rows(self, table: str, point: str, columns: Sequence[Column]) -> pa.Table:
        """These columns of a table of a point that is done; raises `ConfigError`, naming the file, if it is damaged."""
        with self._read(table, point, columns) as file:
            return file.read(columns=[column.name for column in columns], use_threads=False)

    def record(self, point: str) -> dict[str, Any]:
        """The record that the summary of a point carries; raises `ConfigError`, naming the file, if it is damaged."""
        with self._read("summary", point, ()) as file:
            found: dict[str, Any] = json.loads(file.schema_arrow.metadata[RECORD])
            return found

    @contextmanager
    def _read(self, table: str, point: str, columns: Sequence[Column]) -> Iterator[pq.ParquetFile]:
        try:
            with opened(self.path(table, point), columns, self._done(point)["files"].get(table, "")) as file:
                yield file
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nrun the sweep again: it makes anew what is damaged, and nothing else"
            ) from None

    def _done(self, point: str) -> dict[str, Any]:
        """What `put` recorded of a point; raises `ConfigError` if that is not there, damaged or another's."""
        path = self._note("done", point)
        try:
            found = read_record(path)
        except FileNotFoundError:
            raise ConfigError(f"{path}: missing") from None
        if found["point"] != point:
            raise ConfigError(f"{path}: damaged: it is of point {found['point']}")
        return found

    def put(self, point: str, axes: Sequence[Axis], files: Mapping[str, bytes]) -> None:
        """Write the tables of a point, and last its axis columns and what its files hash to."""
        for table, data in files.items():
            self._write(self.path(table, point), data)
        hashes = {table: hashlib.sha256(data).hexdigest() for table, data in files.items()}
        self._write(self._note("done", point), sealed({"point": point, "axes": described(axes), "files": hashes}))
        self._note("failed", point).unlink(missing_ok=True)

    def fail(self, point: str, answer: Failed) -> None:
        self._write(self._note("failed", point), sealed(asdict(answer)))

    def failure(self, point: str) -> Failed | None:
        """Why a point has no results, if that was recorded."""
        try:
            return Failed(**read_record(self._note("failed", point)))
        except (FileNotFoundError, ConfigError):
            return None

    def remove(self, point: str) -> None:
        """Remove everything of a point, first that it is done."""
        folders = [self.path(table, point).parent for table in COLUMNS]
        for path in (self._note("done", point), self._note("failed", point), *(folder / PART for folder in folders)):
            path.unlink(missing_ok=True)
        for folder in folders:
            with suppress(OSError):  # it is not there, or holds what rlsim did not write
                folder.rmdir()

    def write_points(self, rows: pa.Table) -> None:
        self._write(self.directory / POINTS, to_bytes(rows))

    def log(self, entry: Mapping[str, Any]) -> None:
        try:
            with (self.directory / LOG).open("ab+") as file:
                file.seek(max(file.tell() - 1, 0))
                torn = file.read(1) not in (b"", b"\n")  # a full disk or a crash has cut the last line short
                file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"{self.directory / LOG}: cannot be written: {reason(error)}") from None

    def _note(self, kind: str, point: str) -> Path:
        """The file that says that a point is `done`, or why it `failed`."""
        return self.directory / kind / f"{point}.json"

    def _write(self, path: Path, data: bytes) -> None:
        """The file whole or not at all, even if the power fails."""
        temporary = self.directory / TEMPORARY / f"{path.parent.name}.{path.name}"
        try:
            temporary.parent.mkdir(exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {reason(error)}") from None

    def _clean(self) -> None:
        shutil.rmtree(self.directory / TEMPORARY, ignore_errors=True)

    def _check_target(self) -> Path:
        """The directory, links followed; raises `ConfigError` if it cannot be written, or holds no sweep."""
        target = check_folder(self.directory)
        if not target.exists():
            return target
        names = {path.name for path in target.iterdir()}
        if names - {LOCK, TEMPORARY} and (names - _OWN or not self.done()):
            try:
                found = self.definition()
            except ConfigError as error:
                raise ConfigError(f"{error}\n{self.directory} is left as it is; choose another directory") from None
            if found is None:
                raise ConfigError(f"{self.directory} exists and holds no sweep; choose another directory")
        return target


def _take(descriptor: int, directory: Path) -> None:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{directory}: another process is running a sweep here") from None
    except (ImportError, OSError):  # not on this system: nothing keeps two sweeps apart
        return
