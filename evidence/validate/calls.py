"""Errors of measured training calls under fits that have not seen them, and whether intervals from the others hold.

The errors are made by `scripts/fit_calibrations.py transfer`, which fits a training stack without each group of runs,
and shipped with rlsim (`transfer_calls.yaml`). Nothing is fitted here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from pydantic import Field

from evidence.validate.coverage import counted
from evidence.validate.rows import markdown
from rlsim.base.schema import load
from rlsim.cost.fits import Fitted
from rlsim.cost.packing import Floats

CALLS = Path(__file__).with_name("transfer_calls.yaml")

#: A run that the model of a training stack cannot tell: its log has 20 to 36 s in every call that no tokens change.
OUTLIER = "veRL row 4"


class LeftOutCalls(Fitted):
    """Runs that were left out of a fit together."""

    runs: tuple[str, ...]
    errors: tuple[float, ...] = Field(description="of log-probs and update of each run: rlsim / measured - 1")

    @property
    def name(self) -> str:
        """The names of the runs."""
        return ", ".join(self.runs)


class TransferCalls(Fitted):
    """The errors, and where they come from."""

    date: str
    script: str
    source: str
    left_out: tuple[LeftOutCalls, ...]

    def log_errors(self, outlier: bool = True) -> dict[str, Floats]:
        """By name of what was left out; with the run of `OUTLIER` or without."""
        kept = [group for group in self.left_out if outlier or group.name != OUTLIER]
        return {group.name: np.log1p(np.array(group.errors)) for group in kept}


@cache
def shipped_calls() -> TransferCalls:
    """The errors that come with rlsim."""
    return load(CALLS, TransferCalls)


def calls_table() -> str:
    """How many calls lie inside the 90% interval that the other groups' errors allow, with the outlier and without."""
    groups = shipped_calls().left_out
    names = [group.name for group in groups]
    both = [counted(shipped_calls().log_errors(outlier), names) for outlier in (False, True)]
    ranges = [f"{min(group.errors):+.0%} to {max(group.errors):+.0%}" for group in groups]
    cells = [
        (name, errors, *without, *all_of_them)
        for name, errors, without, all_of_them in zip([*names, "all"], [*ranges, ""], *both, strict=True)
    ]
    return markdown(("left out", "errors", f"calls without {OUTLIER}", "inside", "calls with it", "inside"), cells)
