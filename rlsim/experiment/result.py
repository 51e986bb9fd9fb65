"""The results of an experiment: tables in memory, and the directory they are written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from rlsim.experiment.columns import TABLES
from rlsim.experiment.directory import MANIFEST, reading, replacing
from rlsim.experiment.parquet import read_parquet, to_arrow, to_pandas, write_parquet
from rlsim.experiment.summary import summarise
from rlsim.records import file_sha256, sealed


@dataclass(frozen=True)
class Result:
    """Tables of an experiment (see rlsim.experiment.columns) and the manifest that says how they came to be."""

    steps: pd.DataFrame
    responses: pd.DataFrame
    stays: pd.DataFrame
    calls: pd.DataFrame
    switches: pd.DataFrame
    spans: pd.DataFrame
    manifest: Mapping[str, Any]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know: assumptions taken, systems left out, look-ups outside the calibration."""
        return tuple(self.manifest["notes"])

    def summary(self) -> pd.DataFrame:
        """One row per case and system: mean times, speedup with its interval, bubble share, switches."""
        return summarise(self.steps, self.manifest)

    def write(self, directory: str | Path, extra: Mapping[str, str] = MappingProxyType({})) -> Path:
        """Write all tables, `extra` texts by file name, and the manifest to `directory`, all or nothing.

        Earlier results there are replaced. Files that rlsim did not write stay; where they are in the way, or it is no
        directory of results, `ConfigError` is raised and nothing is changed.
        """
        with replacing(directory, extra) as scratch:
            for table, columns in TABLES.items():
                write_parquet(to_arrow(getattr(self, table), columns), scratch / f"{table}.parquet")
            for name, text in extra.items():
                (scratch / name).write_text(text, encoding="utf-8")
            files = {path.name: file_sha256(path) for path in sorted(scratch.iterdir())}
            (scratch / MANIFEST).write_bytes(sealed({**self.manifest, "files": files}))
        return Path(directory)


@dataclass(frozen=True)
class Results:
    """Results in a directory, whose tables are read one by one. Each is checked against the SHA-256 in the manifest."""

    folder: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, str]  # name -> SHA-256

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A table, or these columns of it; raises `ConfigError`, naming the file, if it is damaged."""
        wanted = [column for column in TABLES[name] if columns is None or column.name in columns]
        return to_pandas(read_parquet(self.path(name), wanted, self.sha256(name)))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"

    def sha256(self, name: str) -> str:
        """What the file of a table hashes to."""
        return self.files[f"{name}.parquet"]


@contextmanager
def open_results(directory: str | Path) -> Iterator[Results]:
    """The results in a directory that `Result.write` made, which nobody replaces while the block runs.

    Raises `ConfigError` if there are none.
    """
    with reading(Path(directory)) as found:
        yield Results(Path(directory), *found)


def read_result(directory: str | Path) -> Result:
    """All tables of the results in a directory; raises `ConfigError` if there are none, or they are damaged."""
    with open_results(directory) as found:
        return Result(**{table: found.table(table) for table in TABLES}, manifest=found.manifest)
