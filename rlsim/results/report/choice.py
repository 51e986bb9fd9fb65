"""Which run the charts over time show: a case, some systems, a seed and a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from rlsim.experiment.result import Result
from rlsim.results.comparison.verdict import Verdict, judge
from rlsim.results.report.chosen_run import not_run


@dataclass(frozen=True)
class Choice:
    """One step of some systems under the same seed, and why that step was chosen."""

    case: str
    systems: tuple[str, ...]
    seed: int
    step: int
    why: str

    def rows(self, table: pd.DataFrame, system: str) -> pd.DataFrame:
        """The rows of a result table that belong to a system's whole run."""
        return table[(table["case"] == self.case) & (table["system"] == system) & (table["seed"] == self.seed)]

    def step_rows(self, table: pd.DataFrame, system: str) -> pd.DataFrame:
        rows = self.rows(table, system)
        return rows[rows["step"] == self.step]

    def round(self, result: Result, system: str) -> str:
        """The end of a title that tells the kind of the step's round, if there are several kinds."""
        kind = str(self.step_rows(result.steps, system)["round"].iloc[0])
        return f" ({kind} round)" if kind else ""

    @property
    def text(self) -> str:
        """Which step is shown, and why."""
        case = f"case {self.case}, " if self.case else ""
        return (
            f"Shown: {case}{' and '.join(self.systems)}, seed {self.seed}, step {self.step} ({self.why}). "
            "Options --case, --system, --seed and --step of rlsim report show another."
        )


def choose(
    result: Result,
    *,
    case: str | None = None,
    systems: Sequence[str] = (),
    seed: int | None = None,
    step: int | None = None,
) -> Choice:
    """What was asked for; else the first case, baseline and best other system, and the baseline's median step.

    The median is taken over the step times of the seeds and steps that are left to choose from (the lower one of two).
    Raises `CatalogueError` for a case, system, seed or step that was not run.
    """
    cases = [name for name, names in result.manifest["systems"].items() if names]
    if case is None:
        case = cases[0]
    elif case not in cases:
        raise not_run("case", case, cases)
    summary = result.summary()
    summary = summary[summary["case"] == case]
    names = summary["system"].tolist()
    for name in systems:
        if name not in names:
            raise not_run("system", name, names)
    chosen = tuple(dict.fromkeys(systems)) or _baseline_and_best(judge(summary, str(result.manifest["baseline"])))
    steps = result.steps[(result.steps["case"] == case) & (result.steps["system"] == chosen[0])]
    for what, value in (("seed", seed), ("step", step)):
        if value is not None:
            if value not in (known := steps[what].unique().tolist()):
                raise not_run(what, value, known)
            steps = steps[steps[what] == value]
    ordered = steps.sort_values(["step_time_s", "seed", "step"])
    middle = ordered.iloc[(len(ordered) - 1) // 2]
    which = "the baseline and the best other system" if not systems and len(chosen) > 1 else "as asked for"
    median = f"the median step of {chosen[0]} by step time"
    fixed = [text for text, value in (("the seed", seed), ("the step", step)) if value is not None]
    why = f"{which}; {median if not fixed else ' and '.join(fixed) + ' as asked for'}"
    return Choice(case, chosen, int(middle["seed"]), int(middle["step"]), why)


def _baseline_and_best(verdict: Verdict) -> tuple[str, ...]:
    names, best = list(verdict.outcomes), verdict.runner_up
    first = verdict.baseline if verdict.baseline in names else names[0]
    return (first,) if best is None or best.system == first else (first, best.system)
