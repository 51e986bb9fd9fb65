"""What a bound of staleness means: the one definition for advice, its searches and its texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.summary import means

#: Kinds of bounds: the column of `rlsim.experiment.summary.means` that each bounds, and that in words.
KINDS: Mapping[str, tuple[str, str]] = {
    "eta": ("", "by the setting that admits work (η, lag, threshold …)"),
    "mean": ("staleness_mean", "in the mean of the responses trained on"),
    "p95": ("staleness_p95", "in 95% of the responses trained on"),
    "max": ("staleness_max", "in every response trained on"),
}


class Bound(NamedTuple):
    """So many updates of staleness, of one of the `KINDS`."""

    kind: str
    most: float

    @classmethod
    def of(cls, given: object) -> Bound:
        """A bound as users write it: `mean:0.5`, `p95:2`, `max:1`, `eta:1`, or a plain number, which is one of `eta`.

        Raises `ConfigError` for anything else.
        """
        kind, colon, number = str(given).partition(":")
        if not colon:
            kind, number = "eta", kind
        if kind not in KINDS:
            raise unknown_name("kind of staleness bound", kind, KINDS)
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if not 0 <= most < math.inf or (kind == "eta" and most != int(most)):
            whole = "a whole number of updates" if kind == "eta" else "a number of updates"
            raise ConfigError(f"max_staleness: expected {whole}, 0 or more, got {given!r} (or mean:1, p95:2, max:1)")
        return cls(kind, most)

    def measured(self, row: Mapping[Any, Any]) -> float:
        """What a run measured of it, to a tenth; 0 of a setting, which bounds by itself."""
        column = KINDS[self.kind][0]
        return round(float(row[column]), 1) if column else 0.0

    def keeps(self, row: Mapping[Any, Any]) -> bool:
        """Whether a run kept it."""
        return self.measured(row) <= self.most

    def beyond(self, staleness: float) -> str:
        """Why a system with so much of it is left out."""
        allowed = f"more than the {self.most:g} allowed"
        if self.kind == "eta":
            return f"its setting lets responses be {staleness:g} updates old, {allowed}"
        return f"its run was {staleness:g} updates stale {KINDS[self.kind][1]} ({KINDS[self.kind][0]}), {allowed}"

    def __str__(self) -> str:
        return f"up to {self.most:g} update{'s' * (self.most != 1)} allowed, {KINDS[self.kind][1]}"


#: No staleness is allowed.
NONE = Bound("eta", 0)


def staleness(steps: pd.DataFrame) -> pd.DataFrame:
    """What each system of one case measured: `means`, with the largest `staleness_max` of any step, steady or not."""
    return means(steps, ["system"]).assign(staleness_max=steps.groupby("system")["staleness_max"].max())
