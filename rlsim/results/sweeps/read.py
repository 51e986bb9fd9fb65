"""Reading a sweep's directory: every table of every point as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rlsim.errors import ConfigError
from rlsim.experiment.columns import TYPES
from rlsim.results.sweeps.store import DEFINITION, Store
from rlsim.results.sweeps.tables import COLUMNS, AxisColumn


@dataclass(frozen=True)
class SweepResult:
    """A sweep's directory. Tables are read when they are asked for; points that are not done are not in them.

    Pages of files are checked against their checksums: `ConfigError` names a file that is damaged.
    """

    directory: Path
    definition: Mapping[str, Any]  # of sweep.json

    @property
    def name(self) -> str:
        """The sweep's name."""
        return str(self.definition["name"])

    @property
    def axes(self) -> tuple[AxisColumn, ...]:
        """The columns of its axes."""
        return tuple(AxisColumn(**axis) for axis in self.definition["axes"])

    @property
    def points(self) -> pd.DataFrame:
        """One row per point, in the sweep's order: point, its axes, status (done, failed or missing), error."""
        frame: pd.DataFrame = self.points_table().to_pandas()
        return frame

    @property
    def failed(self) -> dict[str, str]:
        """Points that failed, and why."""
        return {row["point"]: row["error"] for row in self._rows if row["status"] == "failed"}

    def summary(self) -> pd.DataFrame:
        """One row per point, case and system: axes, mean times, speedup with its interval (see `Result.summary`)."""
        return self.table("summary")

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A table of all points in the sweep's order: `point`, the axes, and the table's columns, or those named.

        Raises `ConfigError` if the sweep did not keep the table, or a file of it is damaged.
        """
        kept = self.definition["tables"]
        if name not in kept:
            raise ConfigError(f"{self.directory} has no table {name!r}; it kept: {', '.join(kept)}")
        own = [column for column in COLUMNS[name] if columns is None or column.name in columns]
        axes = [axis for axis in self.axes if columns is None or axis.name in columns]
        # The axes are the definition's: files may still have those of an earlier one, if that was interrupted.
        settings = {"point": pa.string()} | {axis.name: TYPES[axis.dtype] for axis in axes}
        parts = []
        for row in self._rows:
            if row["status"] == "done":
                rows = self._store.rows(name, row["point"], own)
                for i, (column, dtype) in enumerate(settings.items()):
                    rows = rows.add_column(i, column, pa.array([row[column]] * len(rows), dtype))
                parts.append(rows)
        if not parts:
            return pd.DataFrame(columns=["point", *(axis.name for axis in self.axes), *(c.name for c in COLUMNS[name])])
        frame: pd.DataFrame = pa.concat_tables([p.replace_schema_metadata(None) for p in parts]).to_pandas()
        return frame

    def record(self, point: str) -> dict[str, Any]:
        """The manifest of a point that is done: its whole configuration, versions, notes (see docs/results.md)."""
        return self._store.record(point)

    def points_table(self) -> pa.Table:
        """`points` in Arrow."""
        types = {"point": pa.string()} | {axis.name: TYPES[axis.dtype] for axis in self.axes}
        types |= {"status": pa.string(), "error": pa.string()}
        return pa.Table.from_pylist(self._rows, schema=pa.schema(types.items()))

    @property
    def _store(self) -> Store:
        return Store(self.directory)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        done, rows = self._store.done(), []
        for point in self.definition["points"]:
            name = point["point"]
            failure = self._store.failure(name)
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
