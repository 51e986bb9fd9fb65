"""Runs an experiment: every case × system × seed, paired on the same responses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from rlsim.errors import CapacityError, RlsimError, check_arguments
from rlsim.experiment.case import Case, cases_of
from rlsim.experiment.columns import TABLES
from rlsim.experiment.directory import check_target
from rlsim.experiment.frames import Frames
from rlsim.experiment.job import Execute, Job, Ran
from rlsim.experiment.load import load_experiment, with_settings
from rlsim.experiment.planning import FoundPlans
from rlsim.experiment.provenance import manifest_of
from rlsim.experiment.result import Result
from rlsim.experiment.schema import Experiment
from rlsim.experiment.what_if import weighed
from rlsim.experiment.worlds import Progress, Together, in_worlds


def run(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
    out: str | Path | None = None,
    strict: bool = False,
    what_if: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Run an experiment: a YAML file, the name of one that ships with rlsim, or a mapping.

    `overrides` sets keys (`{"trace.cap": "8K"}` or `["trace.cap=8K"]`), `seeds` the number of seeds, `out` a
    directory to write the results to. Nothing is written unless everything has run. With `strict`, a run that needed
    costs of shapes outside what its calibration was measured at raises `CalibrationError` and names them; without, the
    manifest counts them. `what_if` also runs each end of what is assumed, which gives the manifest's ledger its worths.
    Raises `RlsimError` for whatever does not exist or fit.
    """
    check_arguments(out=out, strict=strict, what_if=what_if, progress=progress)
    experiment, shown, folder = load_experiment(source, overrides, seeds)
    if out is not None:
        check_target(out, name=experiment.name)  # before the work, not after it
    result = run_loaded(experiment, shown, folder, strict=strict, what_if=what_if, progress=progress)
    if out is not None:
        result.write(out)
    return result


def run_loaded(
    experiment: Experiment,
    shown: str,
    folder: Path,
    *,
    strict: bool = False,
    what_if: bool = False,
    progress: Progress | None = None,
    execute: Execute | None = None,
    optional: Collection[str] = (),
    plans: Mapping[str, FoundPlans] = MappingProxyType({}),
) -> Result:
    """Run an experiment as `load_experiment` gave it; the rest as in `run`.

    With `execute` the runs are jobs, each with a simulator of its own: results do not depend on who does them, and
    shapes are counted as looked up once for each job that did. Systems named in `optional` are left out with a note
    where they do not fit. `plans` are those found before, by case, which are not searched for again: in worlds drawn
    from the calibration's errors, systems keep the plans that it led to as it was fitted.
    """
    cases = checked_cases(experiment, folder, shown, optional, plans)
    worlds = worlds_of(experiment, cases)
    experiment = experiment.model_copy(update={"certainty": worlds})  # for the manifest
    together = Together(progress or (lambda *_: None), len(experiment.seed_list), worlds)
    collected = _ran(cases, together.calibrated, execute, strict)
    tables = {table: pd.concat([f[table] for f in collected], ignore_index=True) for table in TABLES}
    result = Result(**tables, manifest=manifest_of(experiment, cases, collected))
    if what_if:
        runs, summary = partial(_ran, told=progress or (lambda *_: None), execute=execute), result.summary()
        rated = "responses_per_s"
        rates = {
            str(case): {
                str(name): float(rate) for rate, name in sorted(zip(own[rated], own["system"], strict=True))[::-1]
            }
            for case, own in summary.groupby("case")
        }
        ledger = {case.name: weighed(case, rates.get(case.name, {}), runs).model_dump() for case in cases}
        result = replace(result, manifest={**result.manifest, "ledger": ledger})
    if not worlds:
        return result
    found = {case.name: case.simulator.plans.found for case in cases}
    settled = with_settings(experiment, {"baseline": cases[0].baseline, "certainty": 0}, shown)

    def in_world(number: int, seed: int) -> pd.DataFrame:
        world = with_settings(settled, {"draw": number, "seeds": [seed]}, shown)
        there = checked_cases(world, folder, shown, optional, found)
        return pd.concat([frames["steps"] for frames in _ran(there, together.world(number), execute)])

    drawn = in_worlds(worlds, experiment.seed_list, cases[0].baseline, result.steps, in_world)
    return replace(result, manifest={**result.manifest, "worlds": drawn})


def _ran(cases: Sequence[Case], told: Progress, execute: Execute | None, strict: bool = False) -> list[Frames]:
    """The tables of all runs of these cases, done; raises `CapacityError` if no system could run."""
    if execute is None:
        _simulate(cases, told)
    else:
        _execute(cases, told, execute)
    _settle_baseline(cases)
    collected: list[Frames] = []
    for case in cases:
        collected += case.tables()
        if strict:
            case.lookups().refuse_extrapolated(", ".join(c.name for c in case.loaded.calibrations.values()))
    if not collected:
        raise CapacityError("no system could run:\n" + "\n".join(note for case in cases for note in case.notes))
    return collected


def _simulate(cases: Sequence[Case], told: Progress) -> None:
    """All runs one after the other; those of a case share what they look up."""
    for case in cases:
        if case.searched:
            told(0, len(case.pending()), f"{case.name} plan of {', '.join(case.searched)}".strip())
        case.search()
    runs = [(case, spec, seed) for case in cases for spec, seed in case.pending()]
    for done, (case, spec, seed) in enumerate(runs):
        told(done, len(runs), f"{case.name} {spec.name}".strip())
        case.simulate(spec, seed)
    told(len(runs), len(runs), "")


def _execute(cases: Sequence[Case], told: Progress, execute: Execute) -> None:
    """All runs as jobs; what they come to is taken in the order of the jobs, whoever is done first."""
    owner, done = dict[Job, Case](), dict[Job, Ran | RlsimError]()
    for case in cases:
        owner |= dict.fromkeys(case.jobs(len(owner)), case)
    # Plans are searched for first and layouts that change while they run come next, as these take longest.
    order = sorted(owner, key=lambda job: (not owner[job].waits(job), not owner[job].decides(job.system)))
    for job, answer in execute(order, lambda job: told(len(done), len(owner), job.name)):
        if isinstance(answer, RlsimError) and not (owner[job].waits(job) and owner[job].left_out(job.system, answer)):
            raise answer
        done[job] = answer
        told(len(done), len(owner), job.name)
    for case in cases:
        case.take({job: done[job] for job in owner if owner[job] is case})


def checked_cases(
    experiment: Experiment,
    folder: Path,
    shown: str = "experiment",
    optional: Collection[str] = (),
    plans: Mapping[str, FoundPlans] = MappingProxyType({}),
) -> list[Case]:
    """All cases of an experiment, each with everything checked that can be before a search or simulation.

    Relative paths of the experiment start at `folder`; systems named in `optional` are left out where they do not fit.
    `plans`: those found before, by case. Raises `RlsimError` for whatever does not exist or fit.
    """
    cases = [
        Case(name, case, folder, shown, optional, plans.get(name, {})) for name, case in cases_of(experiment, shown)
    ]
    _settle_baseline(cases)
    if not any(case.systems for case in cases):
        told = "\n".join(note for case in cases for note in case.notes)
        raise CapacityError(f"no system could run:\n{told}{cases[0].remedies()}")
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
