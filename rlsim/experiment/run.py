"""Runs an experiment: every case × system × seed, on the same responses; checks it, and weighs what it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from rlsim.base.processes import ending, pool_of
from rlsim.base.refusals import refuse
from rlsim.errors import CapacityError, RlsimError, check_arguments
from rlsim.experiment.case import Case, cases_of
from rlsim.experiment.frames import Frames, joined
from rlsim.experiment.ledger import EndRecord, LedgerRecord
from rlsim.experiment.load import load_experiment, with_settings
from rlsim.experiment.planning import FoundPlans
from rlsim.experiment.result import Result, check_target, manifest_of
from rlsim.experiment.schema import Experiment
from rlsim.experiment.summary import means
from rlsim.experiment.verdict import RATES, judge

#: Called with (runs done, runs in all, what runs next).
Progress = Callable[[int, int, str], None]


def run(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
    out: str | Path | None = None,
    strict: bool = False,
    what_if: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> Result:
    """Run an experiment: a YAML file, the name of one that ships with rlsim, or a mapping.

    `overrides` sets keys (`{"trace.cap": "8K"}` or `["trace.cap=8K"]`), `seeds` the number of seeds, `out` a
    directory to write the results to. Nothing is written unless everything has run. With `strict`, a run that needed
    costs of shapes outside what its calibration was measured at raises `CalibrationError` and names them; without, the
    manifest counts them. `what_if` also runs each end of what is assumed, which gives the manifest's ledger its worths.
    With more `workers` than one (processes), worlds that are drawn run beside the rest; the results are the same.
    Raises `RlsimError` for whatever does not exist or fit.
    """
    check_arguments(out=out, strict=strict, what_if=what_if, workers=workers, progress=progress)
    experiment, label, folder = load_experiment(source, overrides, seeds)
    if out is not None:
        check_target(out, name=experiment.name)  # before the work, not after it
    result = run_loaded(experiment, label, folder, strict=strict, what_if=what_if, workers=workers, progress=progress)
    if out is not None:
        result.write(out)
    return result


def run_loaded(
    experiment: Experiment,
    label: str,
    folder: Path,
    *,
    strict: bool = False,
    what_if: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> Result:
    """Run an experiment as `load_experiment` gave it; the rest as in `run`.

    In worlds drawn from the calibration's errors, systems keep the plans that it led to as it was fitted.
    """
    cases = checked_cases(experiment, folder, label)
    worlds, seeds = worlds_of(experiment, cases), experiment.seed_list
    experiment = experiment.model_copy(update={"certainty": worlds})  # for the manifest
    on_progress, before = progress or (lambda *_: None), 0  # runs as calibrated

    def calibrated(done: int, runs: int, what: str) -> None:
        nonlocal before
        before = runs
        on_progress(done, runs + worlds * (runs // len(seeds)), what)

    _search(cases, calibrated)
    baseline, found = cases[0].baseline, {case.name: case.simulator.found for case in cases}
    settled = with_settings(experiment, {"baseline": baseline, "certainty": 0}, label)
    in_world = partial(_in_world, settled, folder, label, found)
    drawn = [seeds[world % len(seeds)] for world in range(worlds)]
    with ending(pool_of(workers - 1)) if worlds and workers > 1 else nullcontext() as pool:
        there = (pool.map if pool else map)(in_world, range(1, worlds + 1), drawn)
        collected = _ran(cases, calibrated, strict)
        tables = joined(collected)
        for (_, system), rows in tables["steps"].groupby(["case", "system"], sort=False):
            refuse("steps at cap", system=system, counted=rows["steady"].any())
        result = Result(**tables, manifest=manifest_of(experiment, cases, collected))
        if what_if:
            own = dict(iter(result.summary().groupby("case")))
            ledger = {case.name: weighed(case, own.get(case.name), on_progress).model_dump() for case in cases}
            result = replace(result, manifest={**result.manifest, "ledger": ledger})
        if not worlds:
            return result
        total = before + worlds * (before // len(seeds))

        def waited() -> Iterator[tuple[int, pd.DataFrame]]:
            for world, seed in enumerate(drawn):
                on_progress(before + world * (before // len(seeds)), total, f"world {world + 1} of {worlds}")
                yield seed, next(there)
            on_progress(total, total, "")

        return replace(result, manifest={**result.manifest, **in_worlds(baseline, result.steps, waited())})


def _in_world(
    settled: Experiment, folder: Path, label: str, found: Mapping[str, FoundPlans], world: int, seed: int
) -> pd.DataFrame:
    """The steps of all systems in a world on a seed."""
    there = with_settings(settled, {"draw": world, "seeds": [seed]}, label)
    return pd.concat([frames["steps"] for frames in _ran(checked_cases(there, folder, label, found), lambda *_: None)])


def _search(cases: Sequence[Case], progress: Progress) -> None:
    """Search for the plans that are left to a search, and settle the baseline of what then fits."""
    for case in cases:
        case.search(progress)
    _settle_baseline(cases)


def _ran(cases: Sequence[Case], progress: Progress, strict: bool = False) -> list[Frames]:
    """The tables of all runs of these cases, done; raises `CapacityError` if no system could run."""
    _search(cases, progress)
    runs = [(case, *own) for case in cases for own in case.runs()]
    for done, (case, spec, seed) in enumerate(runs):
        progress(done, len(runs), f"{case.name} {spec.name}".strip())
        case.run(spec, seed)
    progress(len(runs), len(runs), "")
    collected: list[Frames] = []
    for case in cases:
        collected += case.tables()
        if strict:
            case.lookups().refuse_extrapolated(", ".join(c.name for c in case.loaded.calibrations.values()))
    if not collected:
        raise CapacityError("no system could run:\n" + "\n".join(note for case in cases for note in case.notes))
    return collected


def checked_cases(
    experiment: Experiment,
    folder: Path,
    label: str = "experiment",
    plans: Mapping[str, FoundPlans] = MappingProxyType({}),
) -> list[Case]:
    """All cases of an experiment, each with everything checked that can be before a search or simulation.

    Relative paths of the experiment start at `folder`. `plans`: those found before, by case, which are not searched for
    again. Raises `RlsimError` for whatever does not exist or fit.
    """
    cases = [Case(name, case, folder, label, plans.get(name, {})) for name, case in cases_of(experiment, label)]
    _settle_baseline(cases)
    if not any(case.systems for case in cases):
        notes = "\n".join(note for case in cases for note in case.notes)
        raise CapacityError(f"no system could run:\n{notes}{cases[0].remedies()}")
    for case in cases:
        for spec in case.systems:
            case.simulator.window(spec.make())  # raises if a warm-up leaves nothing to measure
    return cases


def worlds_of(experiment: Experiment, cases: Sequence[Case]) -> int:
    """How many worlds are drawn: by default none where no system is compared with a baseline that runs."""
    return experiment.worlds(max((len(case.systems) for case in cases if case.compares), default=0))


def _settle_baseline(cases: Sequence[Case]) -> None:
    """One baseline for all cases: if none is given, the first system that runs in all in which any does, or in one."""
    running = [[spec.name for spec in case.systems] for case in cases]
    anywhere = [name for names in running for name in names]
    everywhere = [name for name in anywhere if all(name in names for names in running if names)]
    chosen = next(iter([*everywhere, *anywhere]), cases[0].names[0])
    for case, names in zip(cases, running, strict=True):
        case.baseline = case.experiment.baseline or chosen
        note = f"no speedups: the baseline {case.baseline} was left out"
        if names and case.baseline not in names and note not in case.notes:
            case.notes.append(note)


# ---- checked as `run` checks it, and counted; nothing is simulated or searched for ----------------------------------


@dataclass(frozen=True)
class CheckedExperiment:
    """An experiment that would run. A run is one system in one case, on one seed as calibrated or in one world."""

    name: str
    systems: tuple[int, ...]  # that can run, by case
    seeds: int
    worlds: int
    notes: tuple[str, ...]
    refused: bool  # by the framework or engine, as notes say

    @property
    def runs(self) -> int:
        return sum(self.systems) * (self.seeds + self.worlds)

    @property
    def counted(self) -> str:
        seeds = _span((self.seeds,), "seed")
        if self.worlds:
            seeds = f"({seeds} + {_span((self.worlds,), 'world')})"
        parts = (_span(self.systems, "system"), seeds, _span((len(self.systems),), "case"))
        return f"{' × '.join(parts)} = {_span((self.runs,), 'run')}"


def check_experiment(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
) -> CheckedExperiment:
    """Check an experiment with its settings; the arguments and errors are those of `run`."""
    experiment, label, folder = load_experiment(source, overrides, seeds)
    return check_loaded(experiment, folder, label)


def check_loaded(experiment: Experiment, folder: Path, label: str) -> CheckedExperiment:
    """Check an experiment as `load_experiment` gave it; raises `RlsimError` for whatever does not exist or fit."""
    cases = checked_cases(experiment, folder, label)
    notes = [f"{case.name}: {note}" if case.name else note for case in cases for note in case.notes]
    later = list(dict.fromkeys(name for case in cases for name in case.searched))
    if later:
        notes.append(
            f"whether the plans of {', '.join(later)} fit is known after the search that `rlsim run` begins with"
        )
    return CheckedExperiment(
        experiment.name,
        tuple(len(case.systems) for case in cases),
        len(experiment.seed_list),
        worlds_of(experiment, cases),
        tuple(notes),
        any(case.refused for case in cases),
    )


def _span(counts: tuple[int, ...], what: str) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,} {what}{'' if high == 1 else 's'}" if low == high else f"{low:,} to {high:,} {what}s"


# ---- worlds that the calibration's errors allow (`rlsim.cost.assumed`) -----------------------------------------------


#: By case and system: how many times as large as calibrated, in each world.
Ratios = dict[str, dict[str, list[float]]]


def in_worlds(baseline: str, calibrated: pd.DataFrame, drawn: Iterable[tuple[int, pd.DataFrame]]) -> dict[str, Ratios]:
    """How many times as large a system's speedup (`worlds`) and its step (`world_steps`) are in worlds that were
    `drawn` as they are `calibrated`.

    Each world has a seed, on which it is compared, and what all systems did in it; that and `calibrated` are rows of
    `steps`. A world in which a system does not fit is missing in that system's list.
    """
    known = {seed: _measured(steps, baseline) for seed, steps in calibrated.groupby("seed")}
    found: dict[str, Ratios] = {"worlds": {}, "world_steps": {}}
    for seed, steps in drawn:
        there = _measured(steps, baseline)
        ratios = there / known[seed].reindex(there.index)
        for name, of in found.items():
            for (case, system), ratio in zip(ratios.index.tolist(), ratios[name].tolist(), strict=True):
                if not math.isnan(ratio):
                    of.setdefault(case, {}).setdefault(system, []).append(ratio)
    return found


def _measured(steps: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Speedups and seconds of a step of one seed, by case and system; no speedup where the baseline did not run."""
    rows = means(steps, ["case", "system"])
    rates, case, system = rows["responses_per_s"], *map(rows.index.get_level_values, ("case", "system"))
    base = rates[system == baseline].droplevel("system").reindex(case).to_numpy()
    return pd.DataFrame({"worlds": rates / base, "world_steps": rows["step_time_s"]})


# ---- what each assumption is worth: a run at each end of its range, on the same responses ---------------------------


#: Systems that run at the ends beside the baseline: the best, in order.
OTHERS = 2


def weighed(case: Case, summary: pd.DataFrame | None, progress: Progress) -> LedgerRecord:
    """The ledger of a case that ran, with the worth of every assumption; `summary`: the case's rows, if it has any.

    The baseline and the best others are tried, by the unit of the verdict: those that can be compared, of those that
    are as fast one. All runs are of the case's first seed and of few steps; tuned and searched systems keep what they
    came out as.
    """
    ledger = case.ledger
    if summary is None or not summary["system"].eq(case.baseline).any() or not ledger.assumed:
        return ledger
    verdict = judge(summary, case.baseline)
    own, rate = verdict[case.baseline].per_s, RATES[verdict.unit]
    others = {row.per_s: row.system for row in verdict.rows if not row.why and row.per_s != own}
    trial = case.reduced([case.baseline, *[*others.values()][:OTHERS]])
    ends = {"as taken": EndRecord(settings={}, shown="as taken")}
    ends |= {f"{row.name} {end.shown}": end for row in ledger.assumed for end in row.ends}
    for done, (name, end) in enumerate(ends.items()):
        progress(done, len(ends), f"{case.name} {name}".strip())
        try:
            made = case.again(with_settings(trial, end.settings, name), name)
            if not made.compares:
                raise CapacityError(made.notes[-1])
            steps = pd.concat([frames["steps"] for frames in _ran([made], lambda *_: None)])
        except RlsimError as error:
            ends[name] = end.model_copy(update={"problem": str(error)})
            continue
        mean = means(steps, ["system"])
        rates, seconds = mean[rate], float(mean["step_time_s"][case.baseline])
        speedups = {str(system): float(rates[system] / rates[case.baseline]) for system in rates.index}
        ends[name] = end.model_copy(update={"step_s": seconds, "speedups": speedups})
    progress(len(ends), len(ends), "")
    rows = [
        row.model_copy(update={"ends": [ends[f"{row.name} {end.shown}"] for end in row.ends]}) for row in ledger.assumed
    ]
    known = {"base": ends["as taken"], "baseline": case.baseline, "unit": verdict.unit}
    return ledger.model_copy(update={"assumed": rows, **known})
