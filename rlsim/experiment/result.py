"""The results of an experiment: tables in memory, how they came to be, and the directory they are written to.

Files move to their places whole and one by one, the manifest, which has their SHA-256, last: a crash leaves the old
results, the new ones, or some that readers tell from both.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from rlsim.base.formats import written
from rlsim.base.output import check_folder, flush, locked, reason, written_by_rlsim
from rlsim.base.records import file_sha256, read_record, sealed
from rlsim.base.refusals import refuse
from rlsim.base.version import __version__
from rlsim.errors import ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import Case
from rlsim.experiment.columns import TABLES, read_parquet, to_arrow, to_pandas, write_parquet
from rlsim.experiment.frames import Frames
from rlsim.experiment.schema import Experiment
from rlsim.experiment.summary import summarise
from rlsim.experiment.verdict import judge

MANIFEST = "manifest.json"
_NEW = ".rlsim-new-"
#: Written from results by other commands; out of date when there are new ones.
_DERIVED = ("report.html", "timeline.json", "timeline.json.gz")


#: By column: the values of rows that are wanted.
Only = Mapping[str, Collection[Any]]


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
        """What a reader should know: assumptions taken, systems left out, what rates count (`manifest`: look-ups)."""
        return tuple(self.manifest["notes"])

    def summary(self) -> pd.DataFrame:
        """One row per case and system: mean times, speedup with its interval, bubble share, switches."""
        return summarise(self.steps, self.manifest)

    def _repr_html_(self) -> str:
        """The table that `rlsim run` prints and its verdict, case by case, as notebooks show them."""
        shown = ""
        for case, rows in self.summary().groupby("case", sort=False):
            tuned = self.manifest["tuned"].get(case, {})
            verdict = judge(rows, str(self.manifest["baseline"]))
            columns = {"case": str(case)} if case else {}
            table = pd.DataFrame({**columns, **written("run", rows, tuned=tuned, verdict=verdict)})
            shown += f"{table.to_html(index=False, border=0)}<p>{escape(' '.join(verdict.sentences(tuned)))}</p>"
        return shown

    def table(self, name: str, columns: Sequence[str], only: Only) -> pd.DataFrame:
        """These columns of a table, of the rows whose values are among those of `only`."""
        rows: pd.DataFrame = getattr(self, name)
        for column, values in only.items():
            rows = rows[rows[column].isin(values)]
        return rows[list(columns)].reset_index(drop=True)

    def write(self, directory: str | Path) -> Path:
        """Write all tables and the manifest to `directory`, where they replace earlier results.

        Other files there stay. Raises `ConfigError` if it cannot be written, or is no directory of results.
        """
        target = check_target(directory)
        made = [folder for folder in (target, *target.parents) if not folder.exists()]
        try:
            target.mkdir(parents=True, exist_ok=True)
            with locked(target):
                for left in target.glob(f"{_NEW}*"):
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=_NEW, dir=target) as scratch:
                    self._write_whole(Path(scratch))
                    for name in _DERIVED:
                        if written_by_rlsim(target / name):
                            (target / name).unlink()
                    for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == MANIFEST):
                        path.replace(target / path.name)
                flush(target)
        except BaseException as error:
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError):
                raise ConfigError(f"{directory}: cannot be written: {reason(error)}") from None
            raise
        return Path(directory)

    def _write_whole(self, scratch: Path) -> None:
        """Write everything to a new folder, down to the disk."""
        for table, columns in TABLES.items():
            write_parquet(to_arrow(getattr(self, table), columns), scratch / f"{table}.parquet")
        files = {path.name: file_sha256(path) for path in sorted(scratch.iterdir())}
        (scratch / MANIFEST).write_bytes(sealed({**self.manifest, "files": files}))
        for path in scratch.iterdir():
            flush(path)


@dataclass(frozen=True)
class Results:
    """Results in a directory, whose tables are read one by one. Each is checked against the SHA-256 in the manifest."""

    folder: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, str]  # name -> SHA-256

    def table(self, name: str, columns: Sequence[str] | None = None, only: Only = MappingProxyType({})) -> pd.DataFrame:
        """A table, or these columns of it, of rows whose values are among those of `only`; raises `ConfigError`, naming
        the file, if it is damaged."""
        wanted, file = [one for one in TABLES[name] if columns is None or one.name in columns], f"{name}.parquet"
        return to_pandas(read_parquet(self.folder / file, wanted, self.files[file], only))


@contextmanager
def open_results(directory: str | Path) -> Iterator[Results]:
    """The results in a directory that `Result.write` made, which nobody replaces while the block runs.

    Waits for who replaces them. Raises `ConfigError` if there are none, or they are not as they were written.
    """
    folder = Path(directory)
    with locked(folder, shared=True):
        try:
            manifest = read_record(folder / MANIFEST)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no rlsim results (no {MANIFEST})") from None
        files = manifest.pop("files")
        yield Results(folder, manifest, files)


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


# ---- the directory ---------------------------------------------------------------------------------------------------


def check_target(directory: str | Path, name: str | None = None) -> Path:
    """The directory, links followed, if results can be written there.

    Raises `ConfigError` if they cannot, or it holds what is no results, or those of an experiment of another name than
    `name`.
    """
    target = check_folder(directory)
    names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if MANIFEST not in names:
        tables = {f"{table}.parquet" for table in TABLES}
        if names <= tables or any(name.startswith(_NEW) for name in names):  # a first write that was interrupted
            return target
        raise ConfigError(f"{directory} exists and holds no rlsim results; choose another directory")
    try:
        there = read_record(target / MANIFEST)["experiment"]["name"]
    except ConfigError as error:
        raise ConfigError(f"{error}\n{directory} is left as it is; choose another directory") from None
    refuse("results", directory=directory, there=there, name=name)
    return target


def earlier(directory: str | Path) -> Mapping[str, Any] | None:
    """The manifest of the results in a directory; None if there are none that can be read."""
    try:
        with open_results(directory) as found:
            return found.manifest
    except ConfigError:
        return None
