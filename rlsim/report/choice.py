"""Which run the charts over time show: a case, some systems, a seed and a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from rlsim.experiment.backlog import comparable
from rlsim.experiment.result import Result
from rlsim.report.chosen_run import not_run


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

    def titled(self, title: str, result: Result, system: str) -> str:
        """A title, with the kind of the step's round if there are several kinds."""
        kind = str(self.step_rows(result.steps, system)["round"].iloc[0])
        return f"{title} ({kind} round)" if kind else title

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
    chosen = tuple(dict.fromkeys(systems)) or _baseline_and_best(summary, str(result.manifest["baseline"]))
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


def ranked(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows of a summary, fastest first; after them those of systems whose throughput is not comparable yet.

    Fastest by speedup, and by responses per second where there is none.
    """
    rows = summary.assign(comparable=comparable(summary["held_back"]))
    keys = ["comparable", *(key for key in ("speedup", "responses_per_s") if key in rows)]
    return rows.sort_values(keys, ascending=False, kind="stable")


def fastest(summary: pd.DataFrame) -> str:
    """Of one case's summary, the first that is `ranked`: comparable, unless none is."""
    return str(ranked(summary)["system"].iloc[0])


def best_other(summary: pd.DataFrame, baseline: str) -> str | None:
    """Of one case's summary, the fastest system that is not the baseline, nor as fast under every seed.

    A tuned system runs as one of the others: under another name it is the same run. None if there is no other.
    """
    others = summary[summary["system"] != baseline]
    same = (others["speedup"] == 1) & (others["speedup_low"].isna() | (others["speedup_low"] == 1))
    others = others[~same] if not same.all() else others
    return None if others.empty else fastest(others)


def _baseline_and_best(summary: pd.DataFrame, baseline: str) -> tuple[str, ...]:
    first = baseline if baseline in set(summary["system"]) else str(summary["system"].iloc[0])
    other = best_other(summary, first)
    return (first,) if other is None else (first, other)
