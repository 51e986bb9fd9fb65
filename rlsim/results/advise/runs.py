"""The runs that an advice rests on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsim.experiment.case import Execute
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.experiment.run import Progress, run_loaded


@dataclass(frozen=True)
class Runner:
    """Runs the experiment with other settings, on the same responses."""

    source: str | Path | Mapping[str, Any]
    settings: Mapping[str, Any]
    execute: Execute
    progress: Progress | None

    def __call__(
        self, what: str, settings: Mapping[str, Any], optional: Collection[str], *, what_if: bool = False
    ) -> Result:
        """The results; systems named in `optional` are left out with a note where they do not fit.

        `what_if`: with the worth of what is assumed.
        """

        def told(done: int, total: int, name: str) -> None:
            if self.progress:
                self.progress(done, total, f"{what}: {name}" if name else what)

        loaded = load_experiment(self.source, {**self.settings, **settings})
        return run_loaded(*loaded, execute=self.execute, progress=told, optional=optional, what_if=what_if)
