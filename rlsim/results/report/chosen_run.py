"""One run among the results of an experiment, by case, system, seed and steps; and which the charts over time show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.base.formats import listed
from rlsim.errors import CatalogueError, ConfigError, unknown_name
from rlsim.experiment.result import Result, Results, open_results
from rlsim.experiment.verdict import judge
from rlsim.results.sweeps.store import DEFINITION

#: More seeds or steps than these are counted in messages, not listed.
MOST_LISTED = 20


@dataclass(frozen=True)
class ChosenRun:
    """The run that was chosen, and what else there was to choose from."""

    case: str
    system: str
    seed: int
    steps: tuple[int, ...]
    step_ends: Mapping[int, float]  # by step: when all of its calls are done (s)
    others: Mapping[str, Sequence[Any]]  # by `case`, `system`, `seed`, `step`: all that the results have
    manifest: Mapping[str, Any]
    _source: Results | Result = field(repr=False)

    @property
    def setup(self) -> Mapping[str, Any]:
        return self.manifest["setups"][self.case]  # type: ignore[no-any-return]

    def rows(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        run: dict[str, Any] = {"case": [self.case], "system": [self.system], "seed": [self.seed], "step": self.steps}
        return self._source.table(table, columns, run)[list(columns)]


def choose_run(
    results: Result | str | Path,
    *,
    case: str | None = None,
    system: str | None = None,
    seed: int | None = None,
    steps: Sequence[int] | None = None,
) -> ChosenRun:
    """A run of an experiment, in memory or in a directory that `rlsim run` wrote.

    What is not given is the first that the results have: the first case, its first system, the first seed, all steps.
    Raises `CatalogueError` for what the results don't have, with the nearest names, and `ConfigError` for a directory
    that holds no results.
    """
    source: Result | Results
    if isinstance(results, Result):
        source = results
    elif (Path(results) / DEFINITION).is_file():
        raise ConfigError(f"{results} is a sweep, which has no timeline: run one of its points with rlsim run")
    else:
        with open_results(results) as source:
            pass
    runs = source.table("steps", ["case", "system", "seed", "step", "step_time_s"], {})
    others: dict[str, list[Any]] = {}
    chosen: dict[str, Any] = {}
    for column, wanted in (("case", case), ("system", system), ("seed", seed)):
        others[column] = runs[column].drop_duplicates().tolist()
        chosen[column] = others[column][0] if wanted is None else _known(column, wanted, others[column])
        runs = runs[runs[column] == chosen[column]]
    runs = runs.sort_values("step")
    others["step"] = runs["step"].tolist()
    ends = dict(zip(others["step"], runs["step_time_s"].cumsum().tolist(), strict=True))
    wanted_steps = tuple(sorted({_known("step", step, others["step"]) for step in steps or others["step"]}))
    return ChosenRun(
        **chosen, steps=wanted_steps, step_ends=ends, others=others, manifest=source.manifest, _source=source
    )


def _known(kind: str, wanted: Any, known: Sequence[Any]) -> Any:
    """A case, system, seed or step. Raises `CatalogueError` for one that the results don't have, with theirs."""
    if wanted in known:
        return wanted
    if known == [""]:
        raise CatalogueError(f"the results have no {kind}s to choose from")
    if isinstance(wanted, str):
        raise unknown_name(kind, wanted, map(str, known))
    numbers = sorted(known)
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        known_ones = f"{numbers[0]} to {numbers[-1]}"
    else:
        known_ones = listed([*map(str, numbers)], MOST_LISTED)
    raise CatalogueError(f"the results have no {kind} {wanted}, only {known_ones}")


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
    case = cases[0] if case is None else _known("case", case, cases)
    summary = result.summary()
    summary = summary[summary["case"] == case]
    chosen = tuple(dict.fromkeys(_known("system", name, summary["system"].tolist()) for name in systems))
    if not chosen:
        verdict = judge(summary, str(result.manifest["baseline"]))
        ran, best = list(verdict.outcomes), verdict.runner_up
        first = verdict.baseline if verdict.baseline in ran else ran[0]
        chosen = (first,) if best is None or best.system == first else (first, best.system)
    steps = result.steps[(result.steps["case"] == case) & (result.steps["system"] == chosen[0])]
    for what, value in (("seed", seed), ("step", step)):
        if value is not None:
            steps = steps[steps[what] == _known(what, value, steps[what].unique().tolist())]
    ordered = steps.sort_values(["step_time_s", "seed", "step"])
    middle = ordered.iloc[(len(ordered) - 1) // 2]
    which = "the baseline and the best other system" if len(chosen) > 1 else "the only system that ran"
    which = "as asked for" if systems else which
    median = f"the median step of {chosen[0]} by step time"
    fixed = [text for text, value in (("the seed", seed), ("the step", step)) if value is not None]
    why = f"{which}; {median if not fixed else ' and '.join(fixed) + ' as asked for'}"
    return Choice(case, chosen, int(middle["seed"]), int(middle["step"]), why)
