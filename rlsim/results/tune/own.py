"""What the user's own runs say: a calibration fitted to a log, and how far predictions of such runs lay off.

It is kept beside the configuration, in a folder of its own: `run.sh` has `run.rlsim/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.output import write_text
from rlsim.calibrate.from_run import FromRun, from_run
from rlsim.calibrate.write import write
from rlsim.errors import CalibrationError, ConfigError
from rlsim.frameworks.verl.log import read_log
from rlsim.results.tune.trial import LOG_PROBS, Configuration, Run, tried
from rlsim.trace import write_trace
from rlsim.trace.importers import import_trace

#: Phases of a step: of a run's means those that together are the same as metrics of a log.
PHASES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generation": (("gen_time_s",), ("gen_s",)),
    "old log-probs": (("old_log_prob_s",), ("old_log_prob_s",)),
    "reference log-probs": (("ref_log_prob_s",), ("ref_log_prob_s",)),
    "log-probs": (LOG_PROBS, ("log_probs_s",)),
    "values": (("values_s",), ("values_s",)),
    "training": (("train_time_s",), ("update_actor_s", "update_critic_s")),
    "step": (("step_time_s",), ("step_s",)),
}
#: First steps of a log, which are slower, and draws of a prediction.
_WARMUP, _DRAWS = 2, 3


@dataclass(frozen=True)
class Own:
    """The folder of a configuration's own runs."""

    folder: Path

    @classmethod
    def of(cls, configuration: Configuration) -> Own:
        """That beside the first file of the configuration; raises `ConfigError` where it is none."""
        path = Path(configuration.sources[0])
        if not path.is_file():
            raise ConfigError(f"{path}: a history is kept beside a file: give the configuration as one")
        return cls(path.with_suffix(".rlsim"))

    @property
    def calibration(self) -> Path:
        return self.folder / "calibration.yaml"

    @property
    def checks(self) -> list[dict[str, Any]]:
        """What `check` found, the oldest first."""
        path = self.folder / "checks.json"
        if not path.is_file():
            return []
        try:
            return list(json.loads(path.read_text(encoding="utf-8"))["checks"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: is damaged: delete it to begin anew") from None

    @property
    def error(self) -> float | None:
        """How far predicted steps lay off, in the mean of the checks; None before the first."""
        errors = [abs(check["errors"]["step"]) for check in self.checks if "step" in check["errors"]]
        return float(np.mean(errors)) if errors else None

    def corrected(self, configuration: Configuration) -> Configuration:
        """The configuration with the calibration of the last log, if there is one and no other is named."""
        if self.calibration.is_file() and configuration.options.calibration is None:
            return configuration.with_files(calibration=self.calibration)
        return configuration

    def fitted(self, configuration: Configuration, log: Path, rollouts: Path | None) -> tuple[Configuration, FromRun]:
        """The configuration with a calibration fitted to a log of it and, if given, the lengths of its own rollouts.

        Raises `CalibrationError` for a log that cannot be fitted to, `TraceError` for what holds no rollouts.
        """
        self.folder.mkdir(exist_ok=True)
        if rollouts is not None:
            write_trace(import_trace(rollouts, name="rollouts"), self.folder / "rollouts.parquet")
            configuration = configuration.with_files(trace=self.folder / "rollouts.parquet")
        said = configuration.experiment({}).model_dump(mode="json", exclude_unset=True)
        found = from_run(log, said, trace=configuration.options.trace)
        write(found.calibration, self.calibration)
        return configuration.with_files(calibration=self.calibration), found

    def check(self, configuration: Configuration, log: Path, seed: int = 0) -> tuple[pd.DataFrame, str]:
        """How far the prediction of a configuration lies off a log of it, by phase; it is added to `checks`.

        Columns: phase, predicted_s, measured_s (medians of the steps after the first two), error (relative, positive =
        predicted too slow). The calibration of the next tuning is fitted to the log; the text says why where it cannot.
        Raises `CalibrationError` where the log has no seconds of a step.
        """
        steps = read_log(log).steps.iloc[_WARMUP:]
        runs = [tried(configuration, {}, Run(seed + draw)) for draw in range(_DRAWS)]
        if problem := next((one.problem for one in runs if one.kind), ""):
            raise ConfigError(problem)
        rows = []
        for phase, (ours, theirs) in PHASES.items():
            measured_s = float(steps[list(theirs)].sum(axis=1, min_count=1).median())
            predicted_s = float(np.mean([sum(one.means.get(name, 0.0) for name in ours) for one in runs]))
            if measured_s > 0 and predicted_s > 0:
                rows.append((phase, predicted_s, measured_s, predicted_s / measured_s - 1.0))
        if not rows:
            raise CalibrationError(f"{log}: no step after the first {_WARMUP} logs how long it took")
        table = pd.DataFrame(rows, columns=["phase", "predicted_s", "measured_s", "error"])
        errors = dict(zip(table["phase"], table["error"].tolist(), strict=True))
        self.folder.mkdir(exist_ok=True)
        done = [*self.checks, {"log": log.name, "steps": len(steps), "errors": errors}]
        write_text(self.folder / "checks.json", json.dumps({"checks": done}, indent=2) + "\n")
        try:
            self.fitted(replace(configuration, options=replace(configuration.options, calibration=None)), log, None)
        except CalibrationError as error:
            return table, str(error)
        return table, ""
