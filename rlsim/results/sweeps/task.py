"""The work of one point: what is sent to a worker, and what comes back."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlsim.errors import ConfigError, PolicyError, RlsimError
from rlsim.experiment.columns import to_arrow, to_bytes
from rlsim.experiment.run import run_loaded
from rlsim.results.sweeps.identity import inputs_of
from rlsim.results.sweeps.points import Point
from rlsim.results.sweeps.tables import COLUMNS, of_point

#: A point whose worker dies is given up after so many.
MOST_ATTEMPTS = 3
#: A worker process is replaced after so many points, so that memory it does not give back stays bounded.
POINTS_OF_A_WORKER = 100


@dataclass(frozen=True)
class Failed:
    """Why a point has no results."""

    error: str
    details: str = ""  # where in the code, for a mistake in it


@dataclass(frozen=True)
class Task:
    """A point as a worker gets it."""

    point: Point
    tables: tuple[str, ...]
    shown: str  # the experiment in messages
    folder: Path  # where its relative paths begin

    def run(self) -> Mapping[str, bytes] | Failed:
        """Simulate the point: its tables as Parquet files, by name. Never raises: what goes wrong is the answer."""
        try:
            return self._files()
        except RlsimError as error:
            return Failed(str(error), _own_traceback(error.__cause__) if isinstance(error, PolicyError) else "")
        except MemoryError:
            return Failed("out of memory")
        except Exception as error:  # a mistake of rlsim's own ends one point
            return Failed(f"{type(error).__name__}: {error}", _own_traceback(error))

    def _files(self) -> dict[str, bytes]:
        experiment = self.point.experiment(self.shown)
        _check_same(self.point.inputs, inputs_of(experiment, self.shown, self.folder))
        result = run_loaded(experiment, self.shown, self.folder)
        record = self._record(result.manifest)
        files = {}
        for table in self.tables:
            frame = result.summary() if table == "summary" else getattr(result, table)
            files[table] = to_bytes(of_point(to_arrow(frame, COLUMNS[table]), self.point.axes, record))
        return files

    def _record(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of the point, without what depends on where files lie."""
        model = {key: value for key, value in manifest["model"].items() if key != "source"}
        own = {"experiment": dict(self.point.config), "model": model, "inputs": dict(self.point.inputs)}
        return {"point": self.point.name, **manifest, **own}


class Answer(NamedTuple):
    """What became of a task (`Failed` if its process died), and how long that took (s)."""

    task: Task
    result: Mapping[str, bytes] | Failed
    elapsed_s: float


Answers = Generator[Answer, None, None]


def _check_same(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    changed = [what for what in expected if found.get(what) != expected[what]]
    if changed:
        raise ConfigError(
            f"where this point ran, these are not what they were when the sweep began: {', '.join(changed)}"
        )


def _own_traceback(error: BaseException | None) -> str:
    """File, line and function of every call, innermost last; files by name, so that it is the same everywhere."""
    calls = traceback.extract_tb(error.__traceback__ if error else None)
    return "\n".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)
