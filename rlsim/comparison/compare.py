"""The run table: every run beside the one it is compared with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.comparison.runs import Run, runs_in
from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.steadiness import unsteady
from rlsim.experiment.summary import CONFIDENCE, means, paired_ratio, ratio_note, ratios
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
    columns = {key: f"experiment.{key}" if key in OWN_COLUMNS else key for key in [*axes, *beside]}
    rows, reasons, notes, late = [], defaultdict[str, list[str]](list), list[str](), list[str]()
    for i, run in enumerate(runs):
        against = choose.of(run)
        why = why_unpaired(run, against) if against else ""
        if against and why:
            reasons[why].append(f"{run.name} against {against.name}")
        row: dict[str, Any] = {name: getattr(run, name) for name in ("directory", "point", "case", "system", "tuned")}
        row |= {columns[key]: run.axes.get(key, value_at(run.config, key)) for key in axes}
        row |= {columns[key]: between[key][i] for key in beside}
        (whole,) = means(run.steps.assign(run=0), ["run"]).to_dict("records")
        row |= {"seeds": len(run.by_seed)} | {name: whole[name] for name in SHOWN} | _compared(run, against, why)
        if against:
            notes += ratio_note(run.name, run.steps, against.name, against.steps, row["speedup"], row["token_speedup"])
        row["unsteady"] = unsteady(run.steps)
        if row["unsteady"]:
            late.append(f"{run.name}: not steady: {row['unsteady']}")
        rows.append(row)
    told = (
        *_few(late, "are not steady"),
        *_few(notes, "train on other responses than what they are compared with"),
        *(f"not paired ({why}): {_first(pairs)}; their intervals are Welch's, of independent samples"
          for why, pairs in reasons.items()),
        *([f"no baseline with the same settings: {_first(choose.missing)}"] if choose.missing else []),
    )  # fmt: skip
    return Comparison(pd.DataFrame(rows), tuple(columns.values()), _by_directory(runs), told)


def _compared(run: Run, against: Run | None, why: str) -> dict[str, Any]:
    """The columns that compare a run: `why` it is not paired, if so. They are missing where there is no baseline."""
    row: dict[str, Any] = {"baseline": "", "is_baseline": against is run, "paired": against is not None and not why}
    if against is None:
        row |= ratios(run.by_seed, run.by_seed.iloc[:0])
        return row | {f"{name}_difference_s": float("nan") for name in DIFFERENCES}
    other = [f"{key}={value}" for key, value in against.axes.items() if value != run.axes.get(key, value)]
    where = [against.directory] if against.directory != run.directory else []
    row["baseline"] = ":".join([*where, *other, against.system])
    row |= ratios(run.by_seed, against.by_seed, welch_ratio if why else paired_ratio)
    for name, time in DIFFERENCES.items():
        row[f"{name}_difference_s"] = difference_s(run.by_seed, against.by_seed, time, is_paired=not why)
    return row


def difference_s(own: pd.DataFrame, theirs: pd.DataFrame, time: str, *, is_paired: bool) -> float:
    """A time for as many responses as another's step trains on less the other's (s); both are means by seed."""
    if is_paired:
        own, theirs = (one.loc[own.index.intersection(theirs.index)] for one in (own, theirs))
    return float((own[time] / own["trained"]).mean() * theirs["trained"].mean() - theirs[time].mean())


def _by_directory(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Keys in which the directories' experiments differ, cases and axes apart."""
    first = {run.directory: run.config for run in reversed(runs)}
    order = list(dict.fromkeys(run.directory for run in runs))
    apart = {"description", *(name for run in runs for name in run.axes)}
    found = differences([first[directory] for directory in order])
    return {key: dict(zip(order, values, strict=True)) for key, values in found.items() if key not in apart}


def _few(notes: Sequence[str], what: str) -> list[str]:
    """The first of many notes of a kind, and how many more there are."""
    more = [f"{len(notes) - MOST_NOTES} more rows {what}"]
    return [*notes[:MOST_NOTES], *(more if len(notes) > MOST_NOTES else [])]


def _first(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}"


def why_unpaired(run: Run, baseline: Run) -> str:
    """Why two runs cannot be paired seed by seed; empty if they can: they saw the same responses."""
    theirs = baseline.workload
    for key, value in run.workload.items():
        if value != theirs.get(key):
            return "the traces differ" if key == "trace" else f"{key} is {value} against {theirs.get(key)}"
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
    rates = own.to_numpy(), reference.to_numpy()
    if not all((values > 0).all() for values in rates):
        return (float("nan"),) * 3
    logs = [np.log(values) for values in rates]
    centre, half = float(logs[0].mean() - logs[1].mean()), float("nan")
    if min(map(len, logs)) > 1:
        from scipy.special import stdtrit

        shares = [float(np.var(one, ddof=1) / len(one)) for one in logs]
        below = sum(share**2 / (len(one) - 1) for share, one in zip(shares, logs, strict=True))
        spread = sum(shares)
        half = float(stdtrit(spread**2 / below, 0.5 + CONFIDENCE / 2)) * spread**0.5 if spread else 0.0
    low, middle, high = (float(np.exp(centre + side)) for side in (-half, 0, half))
    return middle, low, high


# ---- which run each is compared with --------------------------------------------------------------------------------


class Baseline:
    """The baseline as a user names it (see `compare`), found for each run.

    Raises `CatalogueError` for one that no run has.
    """

    def __init__(self, runs: Sequence[Run], asked: str | None) -> None:
        self.missing: list[str] = []  # runs without one
        self._by_directory = defaultdict[str, list[Run]](list)
        for run in runs:
            self._by_directory[run.directory].append(run)
        self._default = asked is None
        self._directory = self._system = ""
        self._settings: dict[str, str] = {}  # of axes, as the user writes them
        systems = dict.fromkeys(run.system for run in runs)
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
        elif settings := _settings_in(asked, runs):
            self._settings = settings
        else:
            values = {f"{key}={value}" for run in runs for key, value in run.axes.items()}
            raise unknown_name("baseline", asked, {*systems, *self._by_directory, *values})

    def of(self, run: Run) -> Run | None:
        """The run that `run` is compared with; None, and it is noted, if there is none, or not one alone."""
        there = list(self._like(run))
        wanted = [self._system or (run.system if self._directory or self._settings else run.baseline)]
        if self._directory and self._default and there:
            wanted.append(there[0].baseline)
        for system in wanted:
            found = [one for one in there if one.system == system]
            if len(found) == 1:
                return found[0]
        self.missing.append(run.name)
        return None

    def _like(self, run: Run) -> Iterator[Run]:
        """Runs of the baseline's directory, of the same case, with the named settings and else the same axes."""
        directory = self._directory or run.directory
        for keys in {tuple(one.axes): None for one in self._by_directory[directory]}:
            shared = tuple(key for key in keys if key in run.axes and key not in self._settings)
            for one in self._index(directory, keys, shared).get(tuple(run.axes[key] for key in shared), ()):
                if run.case == one.case or not (run.case and one.case):
                    yield one

    @cache  # noqa: B019 (a comparison is short)
    def _index(self, directory: str, keys: tuple[str, ...], shared: tuple[str, ...]) -> Mapping[Any, list[Run]]:
        """The directory's runs with these axes that have the named settings, by their values of the shared ones."""
        found = defaultdict[Any, list[Run]](list)
        for one in self._by_directory[directory]:
            if tuple(one.axes) == keys and _has(one, self._settings):
                found[tuple(one.axes[key] for key in shared)].append(one)
        return found


def _settings_in(asked: str, runs: Sequence[Run]) -> dict[str, str]:
    """`KEY=VALUE` of an axis, or several with commas between, if some run has these values; else empty."""
    for texts in ([asked], asked.split(",")):  # a value may have commas of its own
        found = {key.strip(): value.strip() for key, equals, value in (text.partition("=") for text in texts) if equals}
        if len(found) == len(texts) and any(_has(run, found) for run in runs):
            return found
    return {}


def _has(run: Run, settings: Mapping[str, str]) -> bool:
    """Whether a run's axes have these values, written as `4K` or `4096`."""
    return all(_is(run.axes.get(key), text) for key, text in settings.items())


def _is(value: Any, text: str) -> bool:
    if str(value) == text:
        return True
    try:
        return not isinstance(value, str) and value is not None and bool(value == token_count(text))
    except ValueError:
        return False
