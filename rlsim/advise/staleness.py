"""The ranking under a bound of staleness: what is tried, what keeps it and gains, and the best split of the GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from rlsim.advise.asynchronous import Family, families, steps_for
from rlsim.advise.ranking import STALE, free_name, ranking
from rlsim.advise.runs import Runner
from rlsim.advise.split_search import Search
from rlsim.advise.splits import Point, Splits, beyond
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.experiment.run import checked_cases
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.summary import means
from rlsim.experiment.systems import parse_systems
from rlsim.formats import is_missing, rate, with_interval

#: Columns of `means` that a ranking has only where staleness is allowed.
COLUMNS = ("staleness_mean", "staleness_p95", "rollout_idle", "trainer_idle")
#: Periods of steady steps in every run of a full advice, and of a quick one.
PERIODS, QUICK_PERIODS = 3, 1
#: Why parts of systems are not tried though they may be as stale as that.
_PART = "--max-staleness tries whole systems: name it among the systems"
#: Systems that are tried under staleness by a quick advice, and those that go on with all seeds.
QUICK = ("roll_flash", "areal", "one_step_off", "verl_fully_async")
QUICK_CONTENDERS = 2


@dataclass(frozen=True)
class Allowed:
    """Up to `most` updates of staleness (0: none is allowed), and what a search found under it."""

    most: int = 0
    baseline: str = ""
    steps: int = 0
    splits: Splits = field(default_factory=lambda: Splits({}, {}, {}, {}))
    named: Mapping[str, Point] = field(default_factory=dict)  # systems that go on, by name
    own: Sequence[str] = ()  # the experiment's own that train on what older weights have generated
    families: Sequence[Family] = ()  # all that could be tried
    quick: bool = False

    @property
    def entries(self) -> list[Any]:
        """The systems that go on, as an experiment spells them."""
        return [{"name": name, "use": [point.parts]} for name, point in self.named.items()]

    @property
    def lines(self) -> dict[str, str]:
        """The same as lines of `systems`."""
        return {name: point.line for name, point in self.named.items()}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"splits": self.splits.summary(), "splits_tried": self.splits.table()}

    @property
    def settings(self) -> dict[str, int]:
        """What the advice says of itself."""
        return {"max_staleness": self.most} if self.most else {}

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
        """The systems whose staleness was above the bound in some step, but for the baseline, and why they are out."""
        if not self.most:
            return {}
        stalest = result.steps.groupby("system", sort=False)["staleness_max"].max()
        return {
            str(name): beyond(updates, self.most)
            for name, updates in stalest.items()
            if updates > self.most and name != self.baseline
        }

    def ranking(self, result: Result) -> pd.DataFrame:
        """`rlsim.advise.ranking.ranking` of the systems that kept the bound, with the columns `COLUMNS`."""
        if not self.most:
            return ranking(result)
        kept = replace(result, steps=result.steps[~result.steps["system"].isin(list(self.over(result)))])
        ranked, found = ranking(kept), means(kept.steps, ["system"])
        chosen = {name: point.chosen for name, point in self.named.items() if point.family.split}
        ranked["tuned"] = [chosen.get(*own) for own in zip(ranked["system"], ranked["tuned"], strict=True)]
        return ranked.assign(**{name: ranked["system"].map(found[name]) for name in COLUMNS})

    def notes(self, ranked: pd.DataFrame) -> list[str]:
        """How long the runs were, and that the baseline breaks the bound itself, if it does."""
        if not self.most:
            return []
        notes = [f"with staleness allowed, runs take at least {self.steps} steps, so that steady ones are among them"]
        own = ranked[ranked["system"] == self.baseline]["staleness"].max()
        if own > self.most:
            why = beyond(own, self.most)
            notes.append(f"{self.baseline} is ranked as what the others are compared with, though {why}")
        return notes

    def left_out(self) -> list[str]:
        """What a quick advice leaves out under staleness."""
        if not self.most:
            return []
        which, went_on = ", ".join(QUICK), ", ".join(self.named) or "none"
        text = (
            f"quick: of the systems that train on what older weights have generated only {which} were tried, all with "
            "the split and TP that are best for the first of them that fits; the TP was chosen with half of the GPUs, "
            f"on one seed, and only {went_on} ran with all seeds"
        )
        return [text]

    def conclusions(self, tables: Mapping[str, pd.DataFrame]) -> tuple[str, ...]:
        """What the allowed staleness brings, and the best split, in a sentence each."""
        return _said(tables, self.most) if self.most else ()


def allowed_steps(most: int, experiment: Experiment, *, quick: bool) -> int:
    """Steps of every run that is to show staleness: the experiment's, or more where these are too few."""
    return max(experiment.workflow.steps, steps_for(most, experiment, QUICK_PERIODS if quick else PERIODS))


def allowing(
    runner: Runner, simulator: Simulator, baseline: str, most: int, skip: Collection[str], *, quick: bool
) -> Allowed:
    """Searches for the best split of every system that may train on responses up to `most` updates old.

    Those that the experiment names itself with the same parameters are not tried again.
    """
    if not most:
        return Allowed()
    experiment, shown, folder = load_experiment(runner.source, runner.settings)
    checked_cases(experiment, folder, shown)  # before the search, not after it
    own = parse_systems(experiment.systems, shown)
    steps = allowed_steps(most, experiment, quick=quick)
    every = families(most, experiment, skip)
    tried = [family for name in QUICK for family in every if family.name == name] if quick else every
    splits = Search(runner, simulator, most, steps)(tried, QUICK_CONTENDERS if quick else 0)
    known, taken = {spec.key for spec in own}, {spec.name for spec in own}
    named = {free_name(name, taken): point for name, point in splits.best.items() if point.spec(name).key not in known}
    stale = [spec.name for spec in own if simulator.overlap(spec.make())]
    return Allowed(most, baseline, steps, splits, named, stale, every, quick)


def _said(tables: Mapping[str, pd.DataFrame], most: int) -> tuple[str, ...]:
    """What the allowed staleness brings, and the best split, in a sentence each."""
    ranked = tables["ranking"]
    stale = ranked[ranked["comparable"] & (ranked["staleness"] > 0)]
    fresh = ranked[ranked["comparable"] & (ranked["staleness"] == 0)]
    bound = (
        f"staleness: up to {most} update{'s' * (most > 1)} allowed, by the most that a run measured (staleness_max);"
    )
    if stale.empty or fresh.empty:
        return (f"{bound} {'nothing that was tried gains by it' if stale.empty else 'no system is on policy'}",)
    first, other = (row.iloc[0].to_dict() for row in (stale, fresh))
    if first["rank"] == 1:
        text = f"{first['system']} (mean {first['staleness_mean']:.2f}, 95% within {first['staleness_p95']:.2g}) has "
        text += f"{with_interval(other | _renamed(other), 'ratio')} times the responses per second of {other['system']}"
        text += ", the fastest on policy"
    else:
        text = f"nothing gains by it: {other['system']} on policy is faster than {first['system']}, the fastest of them"
    splits = tables["splits"]
    own = splits[splits["system"] == first["system"]].to_dict("records") if len(splits) else []
    return (f"{bound} {text}", *(_split(row) for row in own))


def _renamed(row: Mapping[object, object]) -> dict[object, object]:
    return {"ratio": row["behind_best"], "ratio_low": row["behind_low"], "ratio_high": row["behind_high"]}


def _split(row: Mapping[Any, Any]) -> str:
    beside = [
        f"{row[key]:g} {rate(row[f'with_{key}'])}{', but staler' * (row[f'stale_{key}'] > row['staleness_max'])}"
        for key in ("fewer", "more")
        if not is_missing(row[f"with_{key}"])
    ]
    others = f" (with {', '.join(beside)})" if beside else ""
    return (
        f"split: {row['rollout_gpus']} GPUs generate under {row['system']}, at TP {row['tp']}: "
        f"{rate(row['responses_per_s'])} responses/s{others} on one seed; {row['tried']} of {row['feasible']} splits "
        f"were tried; as a line of `systems`: {row['line']}"
    )
