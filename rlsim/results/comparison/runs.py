"""What is compared: every system of every case, of every run and every point of a sweep."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.base.schema import validate
from rlsim.errors import ConfigError
from rlsim.experiment.case import cases_of
from rlsim.experiment.result import open_results
from rlsim.experiment.schema import Experiment
from rlsim.experiment.steadiness import TESTED
from rlsim.experiment.summary import MEASURED, PUT_OFF, means
from rlsim.results.sweeps.read import read_sweep
from rlsim.results.sweeps.store import DEFINITION

#: Columns of `steps` that are read.
_COLUMNS = ("case", "system", "seed", "step", "launched", *TESTED, *MEASURED, *PUT_OFF)
#: Keys that say nothing about what a run does, or that other columns show.
NOT_SETTINGS = ("name", "description", "framework", "cases", "systems", "baseline", "seeds", "certainty")


@dataclass(frozen=True, eq=False)
class Run:
    """One system under one set of settings, with its steps of all seeds."""

    directory: str
    point: str  # of a sweep; empty for a run
    axes: Mapping[str, Any]  # of a sweep: key path -> value
    case: str
    system: str
    baseline: str  # of its experiment
    config: Mapping[str, Any]  # the experiment with the case's settings
    trace_hash: str
    tuned: str  # what a tuned system came out as
    steps: pd.DataFrame

    @property
    def name(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.axes.items())
        return " ".join(part for part in (self.directory, settings, self.case, self.system) if part)

    @cached_property
    def by_seed(self) -> pd.DataFrame:
        """Means of the steady steps by seed, as `rlsim.experiment.summary.means` gives them."""
        return means(self.steps, ["seed"])

    @property
    def workload(self) -> dict[str, Any]:
        """The settings that decide which responses a seed draws: runs of the same workload see the same responses."""
        trace, workflow = self.config["trace"], self.config["workflow"]
        drawn = {"trace": self.trace_hash} | {f"trace.{key}": value for key, value in trace.items() if key != "path"}
        algorithm = {"remax": "remax"}.get(workflow["algorithm"], "")  # its baselines are drawn as well
        keys = ("prompts", "responses", "steps", "warmup", "steps_at_cap")
        return drawn | {f"workflow.{key}": workflow.get(key, False) for key in keys} | {"workflow.algorithm": algorithm}

    @cached_property
    def plain_tokens(self) -> pd.Series:
        """Response tokens by seed and step, where this and all steps before launched their batch alone; else missing.

        A step that launches more or less, or puts responses off, leaves the next ones other prompts.
        """
        workflow = self.config["workflow"]
        batch = workflow["prompts"] * workflow["responses"]
        steps = self.steps.set_index(["seed", "step"]).sort_index()
        plain = (steps["launched"] == batch) & (steps["trained"] == batch) & (steps["wasted_tokens"] == 0)
        plain &= (steps[[*PUT_OFF]] == 0).all(axis=1)
        return steps["response_tokens"].where(plain.groupby("seed").cummin())


def runs_in(directory: str | Path) -> list[Run]:
    """Every run of a directory that `rlsim run` or `rlsim sweep` wrote; raises `ConfigError` if there is none."""
    folder = Path(directory)
    if not (folder / DEFINITION).is_file():
        with open_results(folder) as result:
            return list(_runs(str(folder), "", {}, result.manifest, result.table("steps", _COLUMNS)))
    sweep, found = read_sweep(folder), list[Run]()
    steps = dict(tuple(sweep.table("steps", ["point", *_COLUMNS]).groupby("point", sort=False)))
    for row in sweep.points.to_dict("records"):
        if row["status"] == "done":
            axes = {axis.key: None if pd.isna(row[axis.name]) else row[axis.name] for axis in sweep.axes}
            found += _runs(str(folder), row["point"], axes, sweep.record(row["point"]), steps[row["point"]])
    if not found:
        raise ConfigError(f"{folder}: no point of the sweep is done")
    return list(_with_all_seeds(found))


def _with_all_seeds(runs: Iterable[Run]) -> Iterator[Run]:
    """Points of a sweep over `seeds` that differ in nothing else, and have none in common, as one run."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        others = {key: value for key, value in run.axes.items() if key != "seeds"}
        together.setdefault(json.dumps([others, run.case, run.system], default=str), []).append(run)
    for parts in together.values():
        seeds = [seed for part in parts for seed in part.by_seed.index]
        if len(parts) == 1 or len(set(seeds)) < len(seeds):
            yield from parts
        else:
            yield replace(
                parts[0],
                point="",
                axes={key: value for key, value in parts[0].axes.items() if key != "seeds"},
                config={**parts[0].config, "seeds": seeds},
                tuned=" or ".join(dict.fromkeys(part.tuned for part in parts if part.tuned)),
                steps=pd.concat([part.steps for part in parts], ignore_index=True),
            )


def _runs(
    directory: str, point: str, axes: Mapping[str, Any], manifest: Mapping[str, Any], steps: pd.DataFrame
) -> Iterator[Run]:
    experiment = {**manifest["experiment"], "seeds": manifest["seeds"]}
    mine = dict(tuple(steps.groupby(["case", "system"], sort=False)))
    for case, config in _by_case(experiment, directory):
        path, first = config["trace"].get("path"), experiment["trace"].get("path")
        traced = manifest["hashes"]["trace"] if path == first else json.dumps(path)  # only the first one's is known
        for system in manifest["systems"].get(case, ()):
            tuned, own = manifest["tuned"].get(case, {}).get(system, ""), mine[case, system]
            yield Run(directory, point, axes, case, system, manifest["baseline"], config, traced, tuned, own)


def _by_case(experiment: Mapping[str, Any], directory: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration of every case, its settings resolved: it may write `4K`, or set a whole block."""
    if not experiment.get("cases"):
        yield "", experiment
        return
    try:
        for name, case in cases_of(validate(copy.deepcopy(dict(experiment)), Experiment, directory), directory):
            yield name, {**case.model_dump(mode="json"), "cases": experiment["cases"]}
    except ConfigError as error:
        raise ConfigError(f"{error}\nits cases are not those of this version of rlsim: run it again") from None
