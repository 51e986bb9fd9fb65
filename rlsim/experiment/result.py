"""The results of an experiment: tables in memory, how they came to be, and the directory they are written to."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import Case
from rlsim.experiment.columns import TABLES
from rlsim.experiment.directory import MANIFEST, reading, replacing
from rlsim.experiment.frames import Frames
from rlsim.experiment.parquet import read_parquet, to_arrow, to_pandas, write_parquet
from rlsim.experiment.schema import Experiment
from rlsim.experiment.summary import summarise
from rlsim.records import file_sha256, sealed
from rlsim.version import __version__


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


# ---- how they came to be --------------------------------------------------------------------------------------------


def manifest_of(experiment: Experiment, cases: Sequence[Case], collected: list[Frames]) -> dict[str, Any]:
    """The manifest of a result, as docs/results.md describes it; `collected`: the tables of all runs."""
    loaded = cases[0].loaded
    return {
        "rlsim": __version__,
        "experiment": experiment.model_dump(mode="json"),
        "cluster": loaded.cluster.model_dump(mode="json"),
        "model": loaded.model.model_dump(mode="json"),
        "calibration": _calibration_record(loaded),
        "setups": {case.name: _setup_record(case.loaded) for case in cases},
        "seeds": list(experiment.seed_list),
        "baseline": cases[0].baseline,
        "systems": {case.name: [spec.name for spec in case.systems] for case in cases},
        "tuned": {case.name: case.chosen for case in cases},
        "plans": {case.name: case.plans() for case in cases},
        "worlds": {},
        "world_steps": {},
        "judge": {
            case.name: {names: placed.record() for names, placed in case.experiments().items()} for case in cases
        },
        "lookups": {case.name: case.lookups().table() for case in cases},
        "ledger": {case.name: case.ledger.model_dump() for case in cases},
        "notes": list(dict.fromkeys(note for case in cases for note in case.all_notes())),
        "hashes": {  # equal results have equal hashes, on any machine with the same library versions
            "trace": _hash(path.read_bytes() for path in loaded.trace_paths),
            "results": _hash(frames["steps"]["step_time_s"].to_numpy().tobytes() for frames in collected),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


@cache
def _versions() -> dict[str, str]:
    """Of the libraries that results hang on; reading them takes milliseconds."""
    return {name: version(name) for name in ("numpy", "pandas", "pyarrow", "scipy", "simpy")}


def _setup_record(loaded: LoadedExperiment) -> dict[str, Any]:
    """What a case's figures refer to: cases may differ in cluster, model, cap and calibration."""
    return {
        "cluster": loaded.cluster.name,
        "gpus": loaded.cluster.gpus,
        "gpus_per_node": loaded.cluster.gpus_per_node,
        "model": loaded.model.name,
        "cap_tokens": loaded.experiment.trace.cap,
        "batch": loaded.experiment.workflow.prompts * loaded.experiment.workflow.responses,
        "responses": loaded.experiment.workflow.responses,
        "calibration": _calibration_record(loaded),
    }


def _calibration_record(loaded: LoadedExperiment) -> dict[str, Any] | list[dict[str, Any]]:
    """The calibration; a list where there are several kinds of GPU."""
    told = {"name", "gpu", "engine", "provenance", "residuals"}
    first, *others = (known.model_dump(mode="json", include=told) for known in loaded.calibrations.values())
    return [first, *others] if others else first
