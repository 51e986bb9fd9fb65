"""The run table: every system of every case, of runs and points of sweeps, beside the one it is compared with."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.formats import few, listed
from rlsim.base.refusals import refuse
from rlsim.base.schema import validate
from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.case import cases_of
from rlsim.experiment.result import open_results
from rlsim.experiment.schema import Experiment
from rlsim.experiment.steadiness import TESTED, unsteady
from rlsim.experiment.summary import CONFIDENCE, MEASURED, PUT_OFF, means, paired_ratio, ratio_note, ratios
from rlsim.results.sweeps.store import DEFINITION, read_sweep
from rlsim.results.sweeps.tables import differences, value_at
from rlsim.units import token_count

#: Columns of `steps` that are read.
_COLUMNS = ("case", "system", "seed", "step", "launched", *TESTED, *MEASURED, *PUT_OFF)
#: Keys that say nothing about what a run does, or that other columns show.
NOT_SETTINGS = ("name", "description", "framework", "cases", "sources", "systems", "baseline", "seeds", "certainty")


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
        return means(self.steps, ["seed"])

    @cached_property
    def unsteady(self) -> str:
        return unsteady(self.steps)

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
    refuse("points of a sweep", folder=folder, found=found)
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


#: Columns of the table beside those of settings; a setting of the same name is called `experiment.…`.
OWN_COLUMNS = ("directory", "point", "case", "system", "tuned", "seeds", "baseline", "is_baseline", "paired")
#: Notes of a kind on rows, at most.
MOST_NOTES = 3
#: Means that the table has of every run.
SHOWN = (
    "responses_per_s", "tokens_per_s", "response_tokens_per_s", "generated_tokens_per_s", "trained", "step_time_s",
    "gen_time_s", "gen_p90_time_s", "bubble_fraction", "tail_fraction", "rollout_idle", "trainer_idle",
    "staleness_mean", "staleness_p95", "staleness_max", "stale_token_share",
)  # fmt: skip
#: Times of which the table has the difference for equal work.
DIFFERENCES = ("step", "gen", "gen_p90")


@dataclass(frozen=True)
class Comparison:
    """Runs and their differences."""

    table: pd.DataFrame  # see `compare`
    settings: tuple[str, ...]  # columns of the table in which configurations differ
    differences: Mapping[str, Mapping[str, Any]]  # key path -> directory -> value
    notes: tuple[str, ...]  # where ratios differ, what was not paired, and why

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; missing numbers are null."""
        rows = self.table.astype(object).where(self.table.notna(), None).to_dict("records")
        return {"runs": rows, "differences": {k: dict(v) for k, v in self.differences.items()}, "notes": [*self.notes]}


def compare(directories: Sequence[str | Path], *, baseline: str | None = None) -> Comparison:
    """Compare the systems of runs and sweeps, by the directories they were written to.

    `baseline` says what each is compared with: a system (of the same directory and settings), one of the directories
    (the same system and settings there), `DIRECTORY:SYSTEM`, or `KEY.PATH=VALUE` of an axis (the same system at the
    point that differs in this alone), or of several that go together (`cluster=8xh100,calibration=h100-vllm`).
    Default: with one directory its experiment's own baseline; with several the first of them, and where that lacks a
    system, its own baseline.

    The table has a row for each run, point, case and system: `directory`, `point`, `case`, `system`, `tuned`; a column
    for every key in which the configurations differ; `seeds` (how many), the means of the steady steps (`SHOWN`, see
    `rlsim.experiment.summary.means`); `baseline` (what it is compared with), `is_baseline` (with itself), `paired`;
    `speedup` (ratio of trained responses per second), `token_speedup` (of trained tokens per second), `gen_speedup` and
    `gen_p90_speedup` (of trained responses per second of generation, and of its time to 90% of them), each with its 95%
    interval `…_low` to `…_high`; and `step_difference_s`, `gen_difference_s` and `gen_p90_difference_s`: own time for
    as many responses as the baseline's step trains on less the baseline's time (s), over the seeds that are compared;
    `unsteady` and `baseline_unsteady`: why it, or what it is compared with, cannot be compared yet; else empty.

    Runs that saw the same responses are paired by seed; others are taken as independent samples (Welch), and a note
    says why. Raises `ConfigError` for a directory without results, `CatalogueError` for an unknown baseline.
    """
    refuse("rlsim compare", directories=directories)
    runs = [run for directory in dict.fromkeys(map(Path, directories)) for run in runs_in(directory)]
    choose, settings = Baseline(runs, baseline), _settings(runs)
    rows, apart = list[dict[str, Any]](), defaultdict[str, list[str]](list)
    late, other = list[str](), list[str]()
    for i, run in enumerate(runs):
        against = choose.of(run)
        why = why_unpaired(run, against) if against else ""
        row = {name: getattr(run, name) for name in OWN_COLUMNS[:5]} | {key: own[i] for key, own in settings.items()}
        rows.append(row := row | _figures(run, against, is_paired=not why))
        late += [f"{run.name}: not steady: {row['unsteady']}"] if row["unsteady"] else []
        if against:
            other += ratio_note(run.name, run.steps, against.name, against.steps, row["speedup"], row["token_speedup"])
            apart[why].append(f"{run.name} against {against.name}")
    notes = few(late, MOST_NOTES, "rows are not steady")
    notes += few(other, MOST_NOTES, "rows train on other responses than what they are compared with")
    for why, pairs in apart.items():
        if why:
            notes.append(f"not paired ({why}): {listed(pairs, 1)}; their intervals are Welch's, of independent samples")
    if choose.missing:
        notes.append(f"no baseline with the same settings: {listed(choose.missing, 1)}")
    return Comparison(pd.DataFrame(rows), tuple(settings), _by_directory(runs), tuple(notes))


def _settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The keys in which the runs differ, axes first, with the value of every run."""
    axes = list(dict.fromkeys(key for run in runs for key in run.axes))
    found = {key: [run.axes.get(key, value_at(run.config, key)) for run in runs] for key in axes}
    between = differences([{key: own for key, own in run.config.items() if key not in NOT_SETTINGS} for run in runs])
    found |= {key: own for key, own in between.items() if not any(f"{key}.".startswith(f"{axis}.") for axis in axes)}
    return {f"experiment.{key}" if key in OWN_COLUMNS else key: values for key, values in found.items()}


def _figures(run: Run, against: Run | None, *, is_paired: bool) -> dict[str, Any]:
    """A run's means, and how they compare with another's; ratios and differences are missing where there is none."""
    (whole,) = means(run.steps.assign(run=0), ["run"]).to_dict("records")
    row: dict[str, Any] = {"seeds": len(run.by_seed)} | {name: whole[name] for name in SHOWN}
    row |= {"baseline": "", "is_baseline": against is run, "paired": against is not None and is_paired}
    theirs = run.by_seed.iloc[:0]
    if against:
        axes = [f"{key}={value}" for key, value in against.axes.items() if value != run.axes.get(key, value)]
        where = [against.directory] * (against.directory != run.directory)
        row["baseline"], theirs = ":".join([*where, *axes, against.system]), against.by_seed
    row |= ratios(run.by_seed, theirs, paired_ratio if is_paired else welch_ratio)
    for name in DIFFERENCES:
        row[f"{name}_difference_s"] = difference_s(run.by_seed, theirs, f"{name}_time_s", is_paired=is_paired)
    return row | {"unsteady": run.unsteady, "baseline_unsteady": against.unsteady if against else ""}


def difference_s(own: pd.DataFrame, theirs: pd.DataFrame, time: str, *, is_paired: bool) -> float:
    """A time for as many responses as another's step trains on less the other's (s); both are means by seed."""
    if is_paired:
        own, theirs = (one.loc[own.index.intersection(theirs.index)] for one in (own, theirs))
    return float((own[time] / own["trained"]).mean() * theirs["trained"].mean() - theirs[time].mean())


def _by_directory(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Keys in which the directories' experiments differ, cases and axes apart."""
    first = {run.directory: run.config for run in reversed(runs)}
    order = list(dict.fromkeys(run.directory for run in runs))
    apart = {"description", "sources", "sources.given", *(name for run in runs for name in run.axes)}
    found = differences([first[directory] for directory in order])
    return {key: dict(zip(order, values, strict=True)) for key, values in found.items() if key not in apart}


def why_unpaired(run: Run, baseline: Run) -> str:
    """Why two runs cannot be paired seed by seed; empty if they can: they saw the same responses."""
    for key, (own, theirs) in differences([run.workload, baseline.workload]).items():
        return "the traces differ" if key == "trace" else f"{key} is {own} against {theirs}"
    if not set(run.by_seed.index) & set(baseline.by_seed.index):
        return "they have no seed in common"
    both = pd.concat([run.plain_tokens, baseline.plain_tokens], axis=1, join="inner", keys=["own", "theirs"]).dropna()
    unlike = both[both["own"] != both["theirs"]]
    if unlike.empty:
        return ""
    seed, step = unlike.index[0]
    own_tokens, their_tokens = (f"{int(value):,}" for value in unlike.iloc[0])
    return f"the responses differ (seed {seed}, step {step}: {own_tokens} tokens against {their_tokens})"


def welch_ratio(own: pd.Series[float], reference: pd.Series[float]) -> tuple[float, float, float]:
    """The ratio of two independent samples of rates by seed: Welch's t on the logarithms.

    Welch, Biometrika 34 (1947) 28, with the degrees of freedom that he and Satterthwaite (Biometrics 2 (1946) 110)
    give.
    """
    if not all((rates > 0).all() for rates in (own, reference)):
        return (float("nan"),) * 3
    from scipy.special import stdtrit

    logs = [np.log(rates) for rates in (own, reference)]
    counts = np.array([len(one) for one in logs])
    shares = np.array([one.var() for one in logs]) / counts
    spread = shares.sum()  # missing with a single value
    freedom = spread**2 / (shares**2 / (counts - 1)).sum() if spread else 1.0
    centre, half = logs[0].mean() - logs[1].mean(), stdtrit(freedom, 0.5 + CONFIDENCE / 2) * spread**0.5
    return float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half))


# ---- which run each is compared with --------------------------------------------------------------------------------


class Baseline:
    """The baseline as a user names it (see `compare`), found for each run.

    Raises `CatalogueError` for one that no run has.
    """

    def __init__(self, runs: Sequence[Run], asked: str | None) -> None:
        self.missing: list[str] = []  # runs without one
        self._by_directory, self._axes = defaultdict[str, list[Run]](list), defaultdict[str, dict[str, Any]](dict)
        for run in runs:
            self._by_directory[run.directory].append(run)
            self._axes[run.directory] |= run.axes
        self._default = asked is None
        self._directory = self._system = ""
        self._settings: Mapping[str, Any] = {}  # of axes
        systems = {run.system for run in runs}
        if asked is None:
            self._directory = next(iter(self._by_directory)) if len(self._by_directory) > 1 else ""
            return
        directory, colon, system = asked.rpartition(":")
        if asked in systems:
            self._system = asked
        elif str(Path(asked)) in self._by_directory:
            self._directory = str(Path(asked))
        elif colon and str(Path(directory)) in self._by_directory and system in systems:
            self._directory, self._system = str(Path(directory)), system
        elif not (settings := _settings_in(asked, runs)):
            values = {f"{key}={value}" for run in runs for key, value in run.axes.items()}
            raise unknown_name("baseline", asked, {*systems, *self._by_directory, *values})
        else:
            self._settings = settings

    def of(self, run: Run) -> Run | None:
        """The run that `run` is compared with: in the baseline's directory, with the named settings and else the same.

        None, and it is noted, if there is none, or not one alone.
        """
        directory = self._directory or run.directory
        configured = {key: value_at(run.config, key) for key in self._axes[directory] if run.directory != directory}
        wanted = {**configured, **run.axes, **self._settings}
        keys = tuple(key for key in wanted if key in self._axes[directory] or key in self._settings)
        alike = self._index(directory, keys)[_hashable(wanted[key] for key in keys)]
        there = [one for one in alike if run.case == one.case or not (run.case and one.case)]
        systems = [self._system or (run.system if self._directory or self._settings else run.baseline)]
        if self._directory and self._default and there:
            systems.append(there[0].baseline)
        for system in systems:
            found = [one for one in there if one.system == system]
            if len(found) == 1:
                return found[0]
        self.missing.append(run.name)
        return None

    @cache  # noqa: B019 (a comparison is short)
    def _index(self, directory: str, keys: tuple[str, ...]) -> defaultdict[Any, list[Run]]:
        found = defaultdict[Any, list[Run]](list)
        for one in self._by_directory[directory]:
            found[_hashable(one.axes.get(key) for key in keys)].append(one)
        return found


def _hashable(values: Iterable[Any]) -> tuple[Hashable, ...]:
    return tuple(value if isinstance(value, Hashable) else str(value) for value in values)


def _settings_in(asked: str, runs: Sequence[Run]) -> Mapping[str, Any]:
    """`KEY=VALUE` of an axis, or several with commas between, as some run has these values; else empty."""
    for texts in ([asked], asked.split(",")):  # a value may have commas of its own
        parts = [text.partition("=") for text in texts]
        found = {key.strip(): value.strip() for key, equals, value in parts if equals}
        for run in runs if len(found) == len(texts) else ():
            if all(key in run.axes and _is(run.axes[key], text) for key, text in found.items()):
                return {key: run.axes[key] for key in found}
    return {}


def _is(value: Any, text: str) -> bool:
    """Whether it is that value, which may be written as `4K` or `4096`."""
    try:
        return str(value) == text or (not isinstance(value, str) and bool(value == token_count(text)))
    except ValueError:
        return False
