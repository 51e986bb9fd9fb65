"""The results of an experiment: tables in memory, and the directory they are written to."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd

from rlsim.errors import ConfigError
from rlsim.experiment.columns import TABLES

MANIFEST = "manifest.json"


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
        from rlsim.experiment.summary import summarise

        return summarise(self)

    def write(self, directory: str | Path) -> Path:
        """Write all tables and the manifest as `directory`, all or nothing.

        An earlier results directory there is replaced; anything else is left alone and raises `ConfigError`.
        """
        target = Path(directory)
        check_target(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written: {error.strerror}") from None
        try:
            for table in TABLES:
                _write_parquet(getattr(self, table), table, scratch / f"{table}.parquet")
            text = json.dumps(self.manifest, indent=2, ensure_ascii=False)
            (scratch / MANIFEST).write_text(text + "\n", encoding="utf-8")
            scratch.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return target


def check_target(directory: str | Path) -> None:
    """Raises `ConfigError` if something is there that is neither results nor an empty directory."""
    target = Path(directory)
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or (target / MANIFEST).is_file())):
        raise ConfigError(f"{target} exists and holds no rlsim results; choose another directory")


def read_result(directory: str | Path) -> Result:
    """The results in a directory that `Result.write` made; raises `ConfigError` if there are none."""
    folder = Path(directory)
    manifest = read_manifest(folder)
    try:
        tables = {table: pd.read_parquet(folder / f"{table}.parquet") for table in TABLES}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the results are damaged: {error}") from None
    return Result(**tables, manifest=manifest)


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest of a results directory; raises `ConfigError` if there is none."""
    folder = Path(directory)
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder} holds no rlsim results (no {MANIFEST})")
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: the results are damaged: {error}") from None
    return manifest


def _write_parquet(frame: pd.DataFrame, table: str, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = pa.Table.from_pandas(frame, preserve_index=False)
    fields = []
    for column in TABLES[table]:
        field = arrow.schema.field(column.name)
        fields.append(field.with_metadata({"unit": column.unit, "meaning": column.meaning}))
    metadata = cast("dict[bytes, bytes]", arrow.schema.metadata or {})
    pq.write_table(arrow.cast(pa.schema(fields, metadata=metadata)), path, compression="zstd")
