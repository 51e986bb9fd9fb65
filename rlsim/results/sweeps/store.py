"""The directory of a sweep: one Parquet file per table and point, each there whole or not at all.

    sweep.json                        the definition: experiment, points, axis columns
    steps/point=p0123…/part.parquet   a table, a file for each point
    summary/point=p0123…/part.parquet the last one that is written: the point is done
    failed/p0123….json                why a point has no results
    points.parquet                    one row per point: its axes, done or failed, the error
    log.jsonl                         when what ran for how long: the only file that differs from run to run

Only one process at a time writes here: it holds a lock that the system takes back when it dies. A file counts as
missing if a page of it does not have its checksum, or it is another point's. Other files are left alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rlsim.base.output import check_folder, locked, make_folder, reason, write_bytes
from rlsim.base.records import read_record, sealed, unsealed
from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError
from rlsim.experiment.columns import TYPES, Column, field_of, read_parquet
from rlsim.results.sweeps.points import Point
from rlsim.results.sweeps.tables import COLUMNS, RECORD, AxisColumn
from rlsim.results.sweeps.task import Failed

DEFINITION = "sweep.json"
POINTS = "points.parquet"
LOG = "log.jsonl"
PART = "part.parquet"
_NAME = re.compile(r"p[0-9a-f]{16}")
#: All that rlsim writes here, `rlsim report` too.
_OWN = {DEFINITION, POINTS, LOG, "failed", "report.html", *COLUMNS}


class Store:
    """The files of one sweep."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The sole right to write here, with nothing left over from writers that died.

        Raises `ConfigError` if another process has it, or the directory holds something else.
        """
        target = self._check_target()
        make_folder(target)
        with locked(target, wait=False) as alone:
            refuse("lock of a sweep", folder=self.directory, alone=alone)
            for left in target.rglob(".rlsim-*.*"):
                left.unlink(missing_ok=True)
            yield

    def definition(self) -> dict[str, Any] | None:
        """What `write_definition` wrote; None if nothing has run here.

        Raises `ConfigError` if it is damaged, or rlsim did not write it.
        """
        try:
            return read_record(self.directory / DEFINITION)
        except FileNotFoundError:
            return None

    def write_definition(self, definition: Mapping[str, Any]) -> None:
        write_bytes(self.directory / DEFINITION, sealed(definition))

    def path(self, table: str, point: str) -> Path:
        return self.directory / table / f"point={point}" / PART

    def done(self) -> set[str]:
        names = (path.parent.name.removeprefix("point=") for path in self.directory.glob(f"summary/point=p*/{PART}"))
        return set(filter(_NAME.fullmatch, names))

    def unfinished(self) -> set[str]:
        """Every point that has files here but is not done: it failed, or was interrupted."""
        parts = {path.name.removeprefix("point=") for path in self.directory.glob("*/point=*")}
        found = parts | {path.stem for path in self.directory.glob("failed/p*.json")}
        return set(filter(_NAME.fullmatch, found)) - self.done()

    def whole(self, point: Point, tables: Sequence[str]) -> bool:
        """Whether all these tables of a point are here under its axis columns, none of them damaged."""
        axes = [axis.column for axis in point.axes]
        try:
            found = {table: self.rows(table, point.name, COLUMNS[table], every=True).schema for table in tables}
        except ConfigError:
            return False
        whole = (pa.schema(map(field_of, (*axes, *COLUMNS[table]))) for table in tables)
        return all(schema.equals(own, check_metadata=False) for schema, own in zip(found.values(), whole, strict=True))

    def rows(self, table: str, point: str, columns: Sequence[Column], *, every: bool = False) -> pa.Table:
        """These columns of a table of a point that is done, or `every` one.

        Raises `ConfigError`, naming the file, if it is damaged or another point's.
        """
        path = self.path(table, point)
        try:
            found = read_parquet(path, columns, every=every)
            metadata = found.schema.metadata or {}
            if RECORD not in metadata or unsealed(metadata[RECORD], path).get("point") != point:
                raise ConfigError(f"{path}: is not of point {point}")
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nrun the sweep again: it makes anew what is damaged, and nothing else"
            ) from None
        return found

    def record(self, point: str) -> dict[str, Any]:
        """The record that the summary of a point carries; raises `ConfigError`, naming the file, if it is damaged."""
        return unsealed(self.rows("summary", point, ()).schema.metadata[RECORD], self.path("summary", point))

    def put(self, point: str, files: Mapping[str, bytes]) -> None:
        """Write the tables of a point, the summary last."""
        for table, data in files.items():
            write_bytes(self.path(table, point), data)
        self._failed(point).unlink(missing_ok=True)

    def fail(self, point: str, answer: Failed) -> None:
        write_bytes(self._failed(point), sealed(asdict(answer)))

    def failure(self, point: str) -> Failed | None:
        try:
            return Failed(**read_record(self._failed(point)))
        except (FileNotFoundError, ConfigError):
            return None

    def remove(self, point: str) -> None:
        """Remove everything of a point, first that it is done."""
        paths = [self.path(table, point) for table in ("summary", *COLUMNS)]
        for path in (*paths, self._failed(point)):
            path.unlink(missing_ok=True)
        for path in paths:
            with suppress(OSError):  # it is not there, or holds what rlsim did not write
                path.parent.rmdir()

    def log(self, entry: Mapping[str, Any]) -> None:
        try:
            with (self.directory / LOG).open("ab+") as file:
                file.seek(max(file.tell() - 1, 0))
                torn = file.read(1) not in (b"", b"\n")  # a full disk or a crash has cut the last line short
                file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"{self.directory / LOG}: cannot be written: {reason(error)}") from None

    def _failed(self, point: str) -> Path:
        return self.directory / "failed" / f"{point}.json"

    def _check_target(self) -> Path:
        """The directory, links followed; raises `ConfigError` if it cannot be written, or holds no sweep."""
        target = check_folder(self.directory)
        if not target.exists():
            return target
        names = {path.name for path in target.iterdir() if not path.name.startswith(".rlsim-")}
        if names and (names - _OWN or not self.done()):
            try:
                found = self.definition()
            except ConfigError as error:
                raise ConfigError(f"{error}\n{self.directory} is left as it is; choose another directory") from None
            if found is None:
                raise ConfigError(f"{self.directory} exists and holds no sweep; choose another directory")
        return target


@dataclass(frozen=True)
class SweepResult:
    """A sweep's directory. Tables are read when they are asked for; points that are not done are not in them.

    Pages of files are checked against their checksums: `ConfigError` names a file that is damaged.
    """

    directory: Path
    definition: Mapping[str, Any]  # of sweep.json

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def axes(self) -> tuple[AxisColumn, ...]:
        return tuple(AxisColumn(**axis) for axis in self.definition["axes"])

    @property
    def points(self) -> pd.DataFrame:
        """One row per point, in the sweep's order: point, its axes, status (done, failed or missing), error."""
        return self.points_table().to_pandas()  # type: ignore[no-any-return]

    @property
    def failed(self) -> dict[str, str]:
        return {row["point"]: row["error"] for row in self._rows if row["status"] == "failed"}

    def summary(self) -> pd.DataFrame:
        """One row per point, case and system: axes, mean times, speedup with its interval (see `Result.summary`)."""
        return self.table("summary")

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A table of all points in the sweep's order: `point`, the axes, and the table's columns, or those named.

        Raises `ConfigError` if the sweep did not keep the table, or a file of it is damaged.
        """
        kept = self.definition["tables"]
        refuse("table of a sweep", folder=self.directory, name=name, kept=kept)
        own = [column for column in COLUMNS[name] if columns is None or column.name in columns]
        axes = [axis for axis in self.axes if columns is None or axis.name in columns]
        # The axes are the definition's: files may still have those of an earlier one, if that was interrupted.
        settings = {"point": pa.string()} | {axis.name: TYPES[axis.dtype] for axis in axes}
        parts = []
        for row in self._rows:
            if row["status"] == "done":
                rows = Store(self.directory).rows(name, row["point"], own)
                for i, (column, dtype) in enumerate(settings.items()):
                    rows = rows.add_column(i, column, pa.array([row[column]] * len(rows), dtype))
                parts.append(rows)
        if not parts:
            return pd.DataFrame(columns=["point", *(axis.name for axis in self.axes), *(c.name for c in COLUMNS[name])])
        frame: pd.DataFrame = pa.concat_tables([p.replace_schema_metadata(None) for p in parts]).to_pandas()
        return frame

    def record(self, point: str) -> dict[str, Any]:
        """The manifest of a point that is done: its whole configuration, versions, notes (see docs/results.md)."""
        return Store(self.directory).record(point)

    def notes(self) -> list[str]:
        """What the runs noted, at how many of the points that are done; the most frequent first."""
        records = [self.record(row["point"]) for row in self._rows if row["status"] == "done"]
        counts = Counter(note for record in records for note in record["notes"])
        return [f"{note} ({count:,} of {len(records):,} points)" for note, count in counts.most_common()]

    def points_table(self) -> pa.Table:
        types = {"point": pa.string()} | {axis.name: TYPES[axis.dtype] for axis in self.axes}
        types |= {"status": pa.string(), "error": pa.string()}
        return pa.Table.from_pylist(self._rows, schema=pa.schema(types.items()))

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        store, rows = Store(self.directory), []
        done = store.done()
        for point in self.definition["points"]:
            name = point["point"]
            failure = store.failure(name)
            status = "done" if name in done else "failed" if failure else "missing"
            error = failure.error if failure and status == "failed" else ""
            rows.append({"point": name, **point["axes"], "status": status, "error": error})
        return rows


def read_sweep(directory: str | Path) -> SweepResult:
    """The sweep in a directory, finished or not; raises `ConfigError` if there is none."""
    folder = Path(directory)
    definition = Store(folder).definition()
    if definition is None:
        raise ConfigError(f"{folder} holds no sweep (no {DEFINITION})")
    return SweepResult(folder, definition)
