"""What no result may hold: times that are no numbers or negative, and steps that train on nothing."""

from __future__ import annotations

import numpy as np

from rlsim.errors import ConfigError, PolicyError
from rlsim.experiment.columns import TABLES
from rlsim.experiment.frames import Frames

#: Tables whose times are all known when a run ends; those of a response that was aborted are not.
_COMPLETE = ("steps", "calls", "spans")
#: Rounding of differences, relative to the end of the run.
_ROUNDING = 1e-9


def check_steps(frames: Frames, shown: str) -> None:
    """Raises `ConfigError` that begins with `shown` if a time of a run is NaN, infinite or negative.

    `PolicyError` for a step that trains on nothing: no throughput or ratio of such a run means anything.
    """
    nothing = frames["steps"]["trained"].to_numpy() == 0
    if nothing.any():
        raise PolicyError(f"{shown}: step {nothing.argmax()} trains on no response: was generation stopped too early?")
    end_s = float(frames["steps"]["step_time_s"].sum())
    for table in _COMPLETE:
        for name in (column.name for column in TABLES[table] if column.unit == "s" and column.name in frames[table]):
            values = frames[table][name].to_numpy(np.float64)
            wrong = ~(np.isfinite(values) & (values >= -_ROUNDING * max(end_s, 1.0)))
            if wrong.any():
                raise ConfigError(
                    f"{shown}: the column {name} of {table} comes out as {values[wrong][0]:g} s: some figure of the "
                    "cluster, the calibration or a policy is too large or negative"
                )
