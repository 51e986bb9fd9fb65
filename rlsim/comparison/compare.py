"""The run table: every run beside the one it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rlsim.comparison.runs import Run, runs_in
from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.notes import ratio_note
from rlsim.experiment.steadiness import unsteady
from rlsim.experiment.summary import CONFIDENCE, RATIOS, means, paired_ratio
from rlsim.sweeps.differences import differences
from rlsim.sweeps.tables import value_at
from rlsim.units import token_count

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
DIFFERENCES = {"step": "step_time_s", "gen": "gen_time_s", "gen_p90": "gen_p90_time_s"}


class Speedup(NamedTuple):
    """Own rate / the baseline's, geometric mean over seeds, with its interval (missing with one seed).

    There is none of generation where a workflow generates nothing.
    """

    ratio: float
    low: float
    high: float


NONE = Speedup(float("nan"), float("nan"), float("nan"))


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
    as many responses as the baseline's step trains on less the baseline's time (s), over the seeds that are compared.

    Runs that saw the same responses are paired by seed; others are taken as independent samples (Welch), and a note
    says why. Raises `ConfigError` for a directory without results, `CatalogueError` for an unknown baseline.
    """
    if not directories:
        raise ConfigError("name at least one directory of results")
    runs = [run for directory in dict.fromkeys(map(Path, directories)) for run in runs_in(directory)]
    choose = Baseline(runs, baseline)
    axes = list(dict.fromkeys(key for run in runs for key in run.axes))
    between = differences([run.settings for run in runs])
    beside = [key for key in between if not any(f"{key}.".startswith(f"{axis}.") for axis in axes)]
    rows, reasons, notes, late = [], dict[str, list[str]](), list[str](), list[str]()
    for i, run in enumerate(runs):
        row: dict[str, Any] = {"directory": run.directory, "point": run.point, "case": run.case, "system": run.system}
        row["tuned"] = run.tuned
        row |= {_column(key): run.axes.get(key, value_at(run.config, key)) for key in axes}
        row |= {_column(key): between[key][i] for key in beside}
        row |= _means(run)
        against = choose.of(run)
        row["baseline"] = _called(against, run)
        row |= _compared(run, against, reasons)
        if against:
            notes += ratio_note(run.name, run.steps, against.name, against.steps, row["speedup"], row["token_speedup"])
        row["unsteady"] = unsteady(run.steps)
        if row["unsteady"]:
            late.append(f"{run.name}: not steady: {row['unsteady']}")
        rows.append(row)
    shown = tuple(map(_column, [*axes, *beside]))
    told = (
        *_few(late, "are not steady"),
        *_few(notes, "train on other responses than what they are compared with"),
        *_notes(reasons, choose.missing),
    )
    return Comparison(pd.DataFrame(rows), shown, _by_directory(runs), told)


def _column(key: str) -> str:
    return f"experiment.{key}" if key in OWN_COLUMNS else key


def _called(baseline: Run | None, run: Run) -> str:
    """How the table names what a run is compared with: by what differs."""
    if baseline is None:
        return ""
    other = [f"{key}={value}" for key, value in baseline.axes.items() if value != run.axes.get(key, value)]
    where = [baseline.directory] if baseline.directory != run.directory else []
    return ":".join([*where, *other, baseline.system])


def _means(run: Run) -> dict[str, Any]:
    (whole,) = means(run.steps.assign(run=0), ["run"]).to_dict("records")
    return {"seeds": len(run.by_seed), **{name: whole[name] for name in SHOWN}}


def _compared(run: Run, against: Run | None, reasons: dict[str, list[str]]) -> dict[str, Any]:
    why = why_unpaired(run, against) if against else ""
    if against and why:
        reasons.setdefault(why, []).append(f"{run.name} against {against.name}")
    row: dict[str, Any] = {"is_baseline": against is run, "paired": against is not None and not why}
    for name, rate in RATIOS.items():
        speedup = NONE
        if against:
            speedup = unpaired(run, against, rate) if why else paired(run, against, rate)
        row |= {name: speedup.ratio, f"{name}_low": speedup.low, f"{name}_high": speedup.high}
    for name, time in DIFFERENCES.items():
        row[f"{name}_difference_s"] = _difference_s(run, against, time, is_paired=not why) if against else float("nan")
    return row


def _difference_s(run: Run, against: Run, time: str, *, is_paired: bool) -> float:
    own, theirs = run.by_seed, against.by_seed
    if is_paired:
        own, theirs = (one.loc[own.index.intersection(theirs.index)] for one in (own, theirs))
    own_s, per_step = (own[time] / own["trained"]).mean(), theirs["trained"].mean()
    return float(own_s * per_step - theirs[time].mean())


def _by_directory(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Keys in which the directories' experiments differ, cases and axes apart."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.directory, run)
    axes = {name for run in runs for name in run.axes}
    found = differences([run.config for run in first.values()])
    return {
        key: dict(zip(first, values, strict=True))
        for key, values in found.items()
        if key not in axes and key != "description"
    }


def _few(notes: Sequence[str], what: str) -> list[str]:
    """The first of many notes of a kind, and how many more there are."""
    more = [f"{len(notes) - MOST_NOTES} more rows {what}"]
    return [*notes[:MOST_NOTES], *(more if len(notes) > MOST_NOTES else [])]


def _notes(reasons: Mapping[str, Sequence[str]], missing: Sequence[str]) -> list[str]:
    notes = []
    for why, pairs in reasons.items():
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        notes.append(f"not paired ({why}): {pairs[0]}{more}; their intervals are Welch's, of independent samples")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        notes.append(f"no baseline with the same settings: {missing[0]}{more}")
    return notes


def why_unpaired(run: Run, baseline: Run) -> str:
    """Why two runs cannot be paired seed by seed; empty if they can: they saw the same responses."""
    own, theirs = run.workload, baseline.workload
    for key, value in own.items():
        if value != theirs.get(key):
            if key == "trace":
                return "the traces differ"
            return f"{key} is {value} against {theirs.get(key)}"
    if not set(run.by_seed.index) & set(baseline.by_seed.index):
        return "they have no seed in common"
    both = pd.concat([run.plain_tokens, baseline.plain_tokens], axis=1, join="inner", keys=["own", "theirs"]).dropna()
    unlike = both[both["own"] != both["theirs"]]
    if len(unlike):
        seed, step = unlike.index[0]
        own_tokens, their_tokens = (f"{int(value):,}" for value in unlike.iloc[0])
        return f"the responses differ (seed {seed}, step {step}: {own_tokens} tokens against {their_tokens})"
    return ""


def paired(run: Run, baseline: Run, rate: str) -> Speedup:
    """Over the seeds that both have: Student's t on the logarithms of the ratios, as `Result.summary` does."""
    return Speedup(*paired_ratio(run.by_seed[rate], baseline.by_seed[rate]))


def unpaired(run: Run, baseline: Run, rate: str) -> Speedup:
    """Of two independent samples: Welch's t on the logarithms of the seeds' means.

    Welch, Biometrika 34 (1947) 28, with the degrees of freedom that he and Satterthwaite (Biometrics 2 (1946) 110)
    give.
    """
    rates = [one.by_seed[rate].to_numpy() for one in (run, baseline)]
    if not all((values > 0).all() for values in rates):
        return NONE
    own, theirs = map(np.log, rates)
    centre = float(own.mean() - theirs.mean())
    if min(len(own), len(theirs)) < 2:
        return Speedup(float(np.exp(centre)), float("nan"), float("nan"))
    shares = [float(np.var(logs, ddof=1) / len(logs)) for logs in (own, theirs)]
    spread = sum(shares)
    if not spread:
        return Speedup(*(float(np.exp(centre)),) * 3)
    from scipy.special import stdtrit

    freedom = spread**2 / sum(share**2 / (len(logs) - 1) for share, logs in zip(shares, (own, theirs), strict=True))
    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * spread**0.5
    return Speedup(*(float(np.exp(centre + side)) for side in (0, -half, half)))


# ---- which run each is compared with --------------------------------------------------------------------------------


class Baseline:
    """The baseline as a user names it (see `rlsim.comparison.compare.compare`), found for each run.

    Raises `CatalogueError` for one that no run has.
    """

    def __init__(self, runs: Sequence[Run], asked: str | None) -> None:
        self._runs = runs
        self.missing: list[str] = []  # runs without one
        # Names of a run's axes -> directory -> names of axes that both have -> their values -> runs.
        self._by_axes: dict[frozenset[str], dict[str, dict[tuple[str, ...], dict[tuple[Any, ...], list[Run]]]]] = {}
        self._default = asked is None
        self._directory = self._system = ""
        self._settings: dict[str, str] = {}  # of axes, as the user writes them
        directories = list(dict.fromkeys(run.directory for run in runs))
        systems = list(dict.fromkeys(run.system for run in runs))
        if asked is None:
            self._directory = directories[0] if len(directories) > 1 else ""
            return
        directory, colon, system = asked.rpartition(":")
        settings = _settings_in(asked, runs)
        if asked in systems:
            self._system = asked
        elif str(Path(asked)) in directories:
            self._directory = str(Path(asked))
        elif colon and str(Path(directory)) in directories and system in systems:
            self._directory, self._system = str(Path(directory)), system
        elif settings:
            self._settings = settings
        else:
            values = {f"{key}={value}" for run in runs for key, value in run.axes.items()}
            raise unknown_name("baseline", asked, {*systems, *directories, *values})

    def of(self, run: Run) -> Run | None:
        """The run that `run` is compared with; None, and it is noted, if there is none, or not one alone."""
        there = [one for one in self._same_axes(run) if self._matches(run, one)]
        elsewhere = self._directory or self._settings
        wanted = [self._system or (run.system if elsewhere else run.baseline)]
        if self._directory and self._default and there:
            wanted.append(there[0].baseline)
        for system in wanted:
            found = [one for one in there if one.system == system]
            if len(found) == 1:
                return found[0]
        self.missing.append(run.name)
        return None

    def _same_axes(self, run: Run) -> list[Run]:
        """Runs of the baseline's directory with equal values of the axes that both have, but for the named settings."""
        names = frozenset(run.axes)
        if names not in self._by_axes:
            self._by_axes[names] = {}
            for one in self._runs:
                shared = tuple(key for key in one.axes if key in names and key not in self._settings)
                values = tuple(one.axes[key] for key in shared)
                self._by_axes[names].setdefault(one.directory, {}).setdefault(shared, {}).setdefault(values, []).append(
                    one
                )
        there = self._by_axes[names].get(self._directory or run.directory, {})
        return [one for shared, found in there.items() for one in found.get(tuple(run.axes[key] for key in shared), ())]

    def _matches(self, run: Run, other: Run) -> bool:
        """Whether the other is of the same case and has the settings that the baseline was named by."""
        if not all(_is(other.axes.get(key), value) for key, value in self._settings.items()):
            return False
        return run.case == other.case or not (run.case and other.case)


def _settings_in(asked: str, runs: Sequence[Run]) -> dict[str, str]:
    """`KEY=VALUE` of an axis, or several with commas between, if some run has these values; else empty."""
    pairs = [text.partition("=") for text in asked.split(",")]
    for settings in ([asked.partition("=")], pairs):  # a value may have commas of its own
        found = {key.strip(): value.strip() for key, equals, value in settings if equals}
        if len(found) == len(settings) and any(
            all(_is(run.axes.get(key), value) for key, value in found.items()) for run in runs
        ):
            return found
    return {}


def _is(value: Any, text: str) -> bool:
    """Whether a value is the one that a user wrote as `4K` or `4096`."""
    if str(value) == text:
        return True
    try:
        return not isinstance(value, str) and value is not None and bool(value == token_count(text))
    except ValueError:
        return False
