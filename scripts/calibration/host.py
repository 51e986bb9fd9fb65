"""Host time and front end: what whole engines take beyond their kernels, fitted through the closed loop as measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from calibration.catalogue import DATE, OLDER, SCRIPT, SERVED_ON, Catalogue
from evidence.validate.parts import Options
from evidence.validate.serving import (
    CALIBRATIONS,
    QUANTITIES,
    SERVED,
    TABLE,
    Protocol,
    ServingRun,
    kernels_of,
    read_runs,
    simulate,
)
from evidence.validate.transfer import FITS, WHOLE, SettingFit, TransferFits, shipped_fits
from rlsim.base.reading import plain, read_yaml
from rlsim.calibrate.fit.common import Array, rounded
from rlsim.calibrate.write import write_record
from rlsim.cost.calibration import Calibration, Engine, FrontEndFit, HostFit
from rlsim.cost.step import StepCost

#: By engine: see the file.
ENGINES: dict[str, dict[str, Any]] = plain(read_yaml(Path(__file__).with_name("serving.yaml")))
#: Not fitted. Any delay between 0 and the time of a decode step makes a request miss the iteration that begins when the
#: response before it ends; a local HTTP client takes of the order of a millisecond.
CLIENT_S = 1e-3
SCALE = {"tpot_s": 0.06, "ttft_s": 0.25}  # errors that weigh alike; beyond them, soft
ROUNDS = Protocol(simulated_rounds=8)  # of the 10 or 20 measured ones: enough for a fit
_EVALUATIONS = 5
_NOTHING = 1e-4  # of the start; less is none

_CALIBRATIONS: dict[str, Calibration] = {}  # of a worker process, by engine
_BARE: dict[str, StepCost] = {}  # of its kernels, by setting


def _begin(calibrations: Mapping[str, Calibration]) -> None:
    _CALIBRATIONS.update(calibrations)
    _BARE.clear()


def _ratios(task: tuple[ServingRun, HostFit, FrontEndFit]) -> list[float]:
    run, host, front_end = task
    if run.setting not in _BARE:
        _BARE[run.setting] = kernels_of(_CALIBRATIONS[run.engine], run)
    served = simulate(run, _BARE[run.setting], host, front_end, ROUNDS)
    return [getattr(served, name) / run.seconds(name) for name in QUANTITIES]


@dataclass
class Serving:
    """One engine's serving runs and the kernels of a calibration, whose difference is fitted."""

    engine: Engine
    runs: Sequence[ServingRun]
    pool: ProcessPoolExecutor

    def fits(self) -> Iterator[SettingFit]:
        """To all runs, then without each setting; then the same without each term."""
        settings = [WHOLE, *dict.fromkeys(run.setting for run in self.runs)]
        for left_out in settings:
            yield self.fit(left_out)
        for term in ENGINES[self.engine]["ablations"]:
            for left_out in settings[1:]:
                yield self.fit(left_out, term)

    def fit(self, left_out: str, without: str = WHOLE) -> SettingFit:
        """Least squares of log ratios over `SCALE` with a soft-L1 loss, none below zero."""
        about, runs = ENGINES[self.engine], [run for run in self.runs if run.setting != left_out]
        absent = about["ablations"][without] if without else ()
        free = {name: value for name, value in about["terms"].items() if name not in absent}
        units = np.array(list(free.values()))
        scale = np.tile([SCALE[name] for name in QUANTITIES], len(runs))
        models = ", ".join(dict.fromkeys(f"{run.model} at TP{run.tp}" for run in runs))
        source = f"{len(runs)} serving runs on H100 ({models}), {self.engine} {SERVED[self.engine]}"
        given = {"client_s": CLIENT_S, "held_prefills": about["held_prefills"]}
        given = {name: value for name, value in given.items() if name not in absent}

        def records(x: Array) -> tuple[HostFit, FrontEndFit]:
            found = {name: rounded(float(v * u)) for name, v, u in zip(free, x, units, strict=True) if v > _NOTHING}
            engine = {name: about[name] for name in ("overlapped", "behind_server")}
            host = {"step_s": 0.0, "sequence_s": 0.0, **engine, **found, "source": source}
            front_end = {**given, **found, "source": source}
            return (
                HostFit(**{name: value for name, value in host.items() if name in HostFit.model_fields}),
                FrontEndFit(**{name: value for name, value in front_end.items() if name in FrontEndFit.model_fields}),
            )

        def residuals(x: Array) -> Array:
            tasks = [(run, *records(x)) for run in runs]
            ratios = np.concatenate(list(self.pool.map(_ratios, tasks, chunksize=4)))
            return np.asarray(np.log(ratios) / scale, dtype=np.float64)

        fitted, intervals = np.ones(0), dict[str, tuple[float, float]]()
        if free:
            # Steps of the order of the unknowns: the loop's events change order, so it is not smooth in the small.
            found = least_squares(
                residuals, np.ones(len(free)), bounds=(0.0, np.inf), loss="soft_l1", diff_step=0.08,
                max_nfev=_EVALUATIONS,
            )  # fmt: skip
            fitted, intervals = found.x, dict(zip(free, _intervals(found, units), strict=True))
        host, front_end = records(fitted)
        return SettingFit(
            engine=self.engine, left_out=left_out, without=without, host=host, front_end=front_end, intervals=intervals
        )


def _intervals(found: OptimizeResult, units: Array) -> list[tuple[float, float]]:
    """95% intervals from the Jacobian: what the runs cannot tell has a wide one; 0 to 0 for what is at that limit."""
    freedom = max(len(found.fun) - len(units), 1)
    covariance = np.linalg.pinv(found.jac.T @ found.jac) * 2.0 * found.cost / freedom
    half = 1.96 * np.sqrt(np.diag(covariance)) * units
    middle = np.where(found.x > _NOTHING, found.x, 0.0) * units
    half = np.where(middle > 0.0, half, 0.0)
    return [(rounded(max(float(m - h), 0.0)), rounded(float(m + h))) for m, h in zip(middle, half, strict=True)]


def main(options: argparse.Namespace) -> None:
    """Host time and front ends, to measured serving runs: `evidence/validate/transfer_fits.yaml`.

    One fit to all runs of an engine, which the calibrations take, one without each TP, and one without each TP and
    term, which `rlsim validate transfer` judges. Kernels are fitted anew from the tables. Minutes on two cores; with
    `--only ENGINE` the fits of the other engines are kept.
    """
    catalogue, runs, script = Catalogue(options.data), read_runs(Options().evidence), f"{SCRIPT} serving"
    known = shipped_fits().fits if FITS.exists() else ()
    kept = {engine: [fit for fit in known if fit.engine == engine] for engine in SERVED}
    for engine in [options.only] if options.only else ("vllm", "sglang", "trtllm"):  # the longest last
        own = OLDER.get(CALIBRATIONS[engine], (SERVED_ON, engine, ""))
        pool = ProcessPoolExecutor(2, initializer=_begin, initargs=({engine: catalogue.kernels(*own)},))
        serving, kept[engine] = Serving(engine, [run for run in runs if run.engine == engine], pool), []
        for fit in serving.fits():
            print(engine, fit.left_out or "all", fit.without, fit.intervals, flush=True)
            kept[engine].append(fit)
        source = f"evidence/{TABLE} (whole engines on H100, measured by users of NVIDIA aiconfigurator)"
        fits = tuple(fit for fits in kept.values() for fit in fits)
        record = TransferFits(date=DATE, script=script, source=source, fits=fits)
        comment = f"Fitted by {script}; change that, not this. Seconds."
        write_record(record.model_dump(exclude_defaults=True), FITS, comment)
