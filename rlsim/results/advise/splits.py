"""How many GPUs generate, and at which TP, in systems that generate on GPUs of their own: what a search tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from rlsim.experiment.systems import SystemSpec, parse_systems
from rlsim.frameworks.keys import line_of
from rlsim.results.advise.asynchronous import Family

#: What a run of the search measured.
MEASURED = ("responses_per_s", "staleness_mean", "staleness_p95", "staleness_max", "rollout_idle", "trainer_idle")


class Point(NamedTuple):
    """A system to try: a variant of a family and, where it has a split, its TP and the GPUs that generate."""

    family: Family
    variant: int
    tp: int = 0
    rollout_gpus: int = 0

    @property
    def parts(self) -> dict[str, Any]:
        """The part of a system, as an experiment spells it."""
        split = {"tp": self.tp, "rollout_gpus": self.rollout_gpus} if self.family.split else {}
        return self.family.parts(self.variant, **split)

    @property
    def chosen(self) -> str:
        """What was chosen, in words."""
        ((_, parameters),) = self.parts.items()
        return ", ".join(f"{key} {value:g}" for key, value in parameters.items())

    def spec(self, name: str) -> SystemSpec:
        (found,) = parse_systems([{"name": name, "use": [self.parts]}])
        return found


#: What was measured at a point, by the names of `MEASURED`.
Probe = Mapping[str, float]
#: At a point at which the system does not fit.
NOTHING: Probe = dict.fromkeys(MEASURED, 0.0)


@dataclass(frozen=True)
class Splits:
    """What a search found: the best point of every family that keeps the bound, all that was tried, and why not."""

    best: Mapping[str, Point]
    tried: Mapping[Point, Probe]
    refused: Mapping[str, str]
    grids: Mapping[int, Sequence[int]]  # by TP: the numbers of GPUs that could generate

    def summary(self) -> pd.DataFrame:
        """One row per system: its split and what was measured there, how many were tried of how many.

        `rollout_gpus` of all generate at `tp`; `MEASURED` on the short run; `tried` and `feasible` splits of these
        settings, all TPs together; and the system as a `line` of `systems`.
        """
        rows = [
            {
                "system": name,
                "tp": best.tp,
                "rollout_gpus": best.rollout_gpus,
                **self.tried[best],
                "tried": sum(p.family is best.family and p.variant == best.variant for p in self.tried),
                "feasible": sum(map(len, self.grids.values())),
                "line": line_of(best.spec(name)),
            }
            for name, best in self.best.items()
            if best.family.split
        ]
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """All that was tried: the system, its split and settings, what was measured."""
        rows = [
            {"system": p.family.name, "tp": p.tp, "rollout_gpus": p.rollout_gpus, "settings": p.chosen, **probe}
            for p, probe in self.tried.items()
            if probe is not NOTHING
        ]
        return pd.DataFrame(rows)
