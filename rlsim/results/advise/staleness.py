"""The ranking under a bound of staleness: what is tried, what keeps it and gains, and the best split of the GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.experiment.run import checked_cases
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import parse_systems
from rlsim.results.advise.asynchronous import Family, families, steps_for
from rlsim.results.advise.bound import NONE, Bound, staleness
from rlsim.results.advise.ranking import STALE, free_name, ranking
from rlsim.results.advise.runs import Runner
from rlsim.results.advise.split_search import Search
from rlsim.results.advise.splits import Point, Splits

#: Periods of steady steps in every run of a full advice, and of a quick one.
PERIODS, QUICK_PERIODS = 5, 3
#: Why parts of systems are not tried though they may be as stale as that.
_PART = "--max-staleness tries whole systems: name it among the systems"
#: Systems that are tried under staleness by a quick advice, and those that go on with all seeds.
QUICK = ("roll_flash", "areal", "one_step_off", "verl_fully_async")
QUICK_CONTENDERS = 2


@dataclass(frozen=True)
class Allowed:
    """A bound of staleness (0: none is allowed), and what a search found under it."""

    bound: Bound = NONE
    baseline: str = ""
    steps: int = 0
    splits: Splits = field(default_factory=lambda: Splits({}, {}, {}, {}))
    named: Mapping[str, Point] = field(default_factory=dict)  # systems that go on, by name
    own: Mapping[str, int] = field(default_factory=dict)  # the experiment's own that may be stale: updates by setting
    families: Sequence[Family] = ()  # all that could be tried
    quick: bool = False

    @property
    def most(self) -> float:
        """The updates that are allowed."""
        return self.bound.most

    @property
    def entries(self) -> list[Any]:
        """The systems that go on, as an experiment spells them."""
        return [{"name": name, "use": [point.parts]} for name, point in self.named.items()]

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"splits": self.splits.summary(), "splits_tried": self.splits.table()}

    @property
    def settings(self) -> dict[str, Any]:
        """What the advice says of itself."""
        return {"max_staleness": f"{self.bound.kind}:{self.most:g}"} if self.most else {}

    @property
    def longer(self) -> dict[str, int]:
        """Settings of a run that shows staleness."""
        return {"workflow.steps": self.steps} if self.most else {}

    def refusals(self, refused: Mapping[str, str]) -> dict[str, str]:
        """Why policies and their variants were not tried, or found to be too stale."""
        known = {family.policy for family in self.families}
        others = {name: why for name, why in refused.items() if name not in known}
        if self.most:
            others = {name: _PART if why == STALE else why for name, why in others.items()}
        untried = {f.name: "--quick does not try it" for f in self.families if self.quick and f.name not in QUICK}
        return {**others, **untried, **self.splits.refused}

    def over(self, result: Result) -> dict[str, str]:
        """The systems that broke the bound, by what they measured or their settings, and why they are not allowed."""
        if not self.most:
            return {}
        why = {}
        for name, row in staleness(result.steps).iterrows():
            updates = (
                float(self.own.get(str(name), 0)) if self.bound.kind == "eta" else self.bound.measured(row.to_dict())
            )
            if updates > self.most:
                why[str(name)] = self.bound.beyond(updates)
        return why

    def ranking(self, result: Result) -> pd.DataFrame:
        """`rlsim.results.advise.ranking.ranking` of the systems that kept the bound, and of the baseline."""
        out = [name for name in self.over(result) if name != self.baseline]
        ranked = ranking(replace(result, steps=result.steps[~result.steps["system"].isin(out)]) if out else result)
        chosen = {name: point.chosen for name, point in self.named.items() if point.family.split}
        ranked["tuned"] = [chosen.get(*own) for own in zip(ranked["system"], ranked["tuned"], strict=True)]
        return ranked

    @property
    def notes(self) -> list[str]:
        """How long the runs were, and what a quick advice leaves out."""
        if not self.most:
            return []
        which, went_on = ", ".join(QUICK), ", ".join(self.named) or "none"
        left_out = (
            f"quick: of the systems that train on what older weights have generated only {which} were tried, all with "
            "the split and TP that are best for the first of them that fits; the TP was chosen with half of the GPUs, "
            f"on one seed, and only {went_on} ran with all seeds"
        )
        long = f"with staleness allowed, runs take at least {self.steps} steps, so that steady ones are among them"
        return [long, *([left_out] if self.quick else [])]

    def conclusions(self, tables: Mapping[str, pd.DataFrame]) -> tuple[str, ...]:
        """The bound, and the best split of the fastest system that is allowed some staleness."""
        if not self.most:
            return ()
        ranked, splits = tables["ranking"], tables["splits"]
        stale = [name for name in ranked[ranked["why"].eq("")]["system"] if name in self.named]
        own = splits[splits["system"].isin(stale[:1])] if len(splits) else splits
        return (
            f"staleness: {self.bound}",
            *(f"split: of {row['system']} on one seed: {row['line']}" for row in own.to_dict("records")),
        )


def allowed_steps(most: float, experiment: Experiment, *, quick: bool) -> int:
    """Steps of every run that is to show staleness: the experiment's, or more where these are too few."""
    return max(experiment.workflow.steps, steps_for(most, experiment, QUICK_PERIODS if quick else PERIODS))


def allowing(
    runner: Runner, simulator: Simulator, baseline: str, bound: Bound, skip: Collection[str], *, quick: bool
) -> Allowed:
    """Searches for the best split of every system that keeps a bound of staleness.

    Those that the experiment names itself with the same parameters are not tried again.
    """
    if not (most := bound.most):
        return Allowed()
    experiment, shown, folder = load_experiment(runner.source, runner.settings)
    checked_cases(experiment, folder, shown)  # before the search, not after it
    own = parse_systems(experiment.systems, shown)
    steps = allowed_steps(most, experiment, quick=quick)
    every = families(most, experiment, skip)
    tried = [family for name in QUICK for family in every if family.name == name] if quick else every
    splits = Search(runner, simulator, bound, steps)(tried, QUICK_CONTENDERS if quick else 0)
    known, taken = {spec.key for spec in own}, {spec.name for spec in own}
    named = {free_name(name, taken): point for name, point in splits.best.items() if point.spec(name).key not in known}
    stale = {spec.name: ahead for spec in own if (ahead := simulator.overlap(spec.make()))}
    return Allowed(bound, baseline, steps, splits, named, stale, every, quick)
