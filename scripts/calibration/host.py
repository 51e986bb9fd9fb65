"""Host time and front end: what whole engines take beyond their kernels, fitted through the closed loop as measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from rlsim.calibrate.fit.common import Array, rounded
from rlsim.cost.calibration import Calibration, Engine, FrontEndFit, HostFit
from rlsim.cost.step import StepCost
from rlsim.validate.serving import QUANTITIES, SERVED, Protocol, ServingRun, kernels_of, simulate
from rlsim.validate.transfer import WHOLE, SettingFit

#: TensorRT-LLM prepares a step while the one before it runs (`disable_overlap_scheduler` is false in the generator's
#: rule for these runs). vLLM 0.12 does not by default. SGLang does too, and its runs leave no host time to be seen.
OVERLAPPED: dict[Engine, bool] = {"trtllm": True, "vllm": False, "sglang": False}
#: Not fitted. Any delay between 0 and the time of a decode step makes a request miss the iteration that begins when the
#: response before it ends; a local HTTP client takes of the order of a millisecond.
CLIENT_S = 1e-3
HELD_PREFILLS: dict[Engine, int] = {"trtllm": 0, "vllm": 0, "sglang": 1}
#: What is fitted, and where the search begins: names of `HostFit` and `FrontEndFit`, in seconds. A term stands here if
#: it makes errors on settings that no fit has seen smaller. Time per step of vLLM and per sequence of SGLang do not:
#: they fit some kernels' errors at one TP, not at the next.
TERMS: dict[Engine, dict[str, float]] = {
    "trtllm": {
        "step_s": 2.2e-3,
        "sequence_s": 6e-5,
        "prefill_s": 16e-3,
        "token_s": 1.05e-4,
        "prompt_token_s": 3e-6,
        "delay_s": 20e-3,
    },
    "vllm": {"sequence_s": 5e-5},
    "sglang": {},
}
#: Terms left out one by one, to see what each brings on settings that no fit has seen.
ABLATIONS: dict[Engine, dict[str, tuple[str, ...]]] = {
    "trtllm": {
        "the front end's work": ("token_s", "prompt_token_s"),
        "time to launch a prefill": ("prefill_s",),
    },
    "vllm": {
        "the client's delay": ("client_s",),
        "host time per sequence": ("sequence_s",),
    },
    "sglang": {
        "first tokens one prefill later": ("held_prefills",),
        "the client's delay": ("client_s",),
    },
}
SCALE = {"tpot_s": 0.06, "ttft_s": 0.25}  # errors that weigh alike; beyond them, soft
ROUNDS = Protocol(simulated_rounds=8)  # of the 10 or 20 measured ones: enough for a fit
_EVALUATIONS = 5
_NOTHING = 1e-4  # of the start; less is none

_CALIBRATIONS: dict[str, Calibration] = {}  # of a worker process, by engine


def _begin(calibrations: Mapping[str, Calibration]) -> None:
    _CALIBRATIONS.update(calibrations)
    _BARE.clear()


_BARE: dict[str, StepCost] = {}  # by setting


def _bare(run: ServingRun) -> StepCost:
    if run.setting not in _BARE:
        _BARE[run.setting] = kernels_of(_CALIBRATIONS[run.engine], run)
    return _BARE[run.setting]


def _ratios(task: tuple[ServingRun, HostFit, FrontEndFit]) -> list[float]:
    """Simulated over measured: TPOT and TTFT."""
    run, host, front_end = task
    served = simulate(run, _bare(run), host, front_end, ROUNDS)
    return [getattr(served, name) / getattr(run, name) for name in QUANTITIES]


@dataclass
class Serving:
    """One engine's serving runs and the kernels of a calibration, whose difference is fitted."""

    engine: Engine
    runs: Sequence[ServingRun]
    pool: ProcessPoolExecutor

    @classmethod
    def start(cls, engine: Engine, runs: Sequence[ServingRun], calibration: Calibration) -> Serving:
        """With two processes that simulate."""
        pool = ProcessPoolExecutor(2, initializer=_begin, initargs=({engine: calibration},))
        return cls(engine, [run for run in runs if run.engine == engine], pool)

    def fits(self) -> Iterator[SettingFit]:
        """To all runs, then without each setting; then the same without each term."""
        settings = [WHOLE, *dict.fromkeys(run.setting for run in self.runs)]
        for left_out in settings:
            yield self.fit(left_out)
        for term in ABLATIONS[self.engine]:
            for left_out in settings[1:]:
                yield self.fit(left_out, term)

    def fit(self, left_out: str, without: str = WHOLE) -> SettingFit:
        """Least squares of log ratios over `SCALE` with a soft-L1 loss, none below zero."""
        runs = [run for run in self.runs if run.setting != left_out]
        absent = ABLATIONS[self.engine][without] if without else ()
        free = {name: value for name, value in TERMS[self.engine].items() if name not in absent}
        units = np.array(list(free.values()))
        scale = np.tile([SCALE[name] for name in QUANTITIES], len(runs))
        models = ", ".join(dict.fromkeys(f"{run.model} at TP{run.tp}" for run in runs))
        source = f"{len(runs)} serving runs on H100 ({models}), {self.engine} {SERVED[self.engine]}"

        def records(x: Array) -> tuple[HostFit, FrontEndFit]:
            values = {name: rounded(float(v * u)) for name, v, u in zip(free, x, units, strict=True) if v > _NOTHING}
            return self._records(values, absent, source)

        def residuals(x: Array) -> Array:
            tasks = [(run, *records(x)) for run in runs]
            ratios = np.concatenate(list(self.pool.map(_ratios, tasks, chunksize=4)))
            return np.asarray(np.log(ratios) / scale, dtype=np.float64)

        if not free:
            return self._named(left_out, without, *self._records({}, absent, source))
        # Steps of the order of the unknowns: the loop's events change order, so it is not smooth in the small.
        found = least_squares(
            residuals, np.ones(len(free)), bounds=(0.0, np.inf), loss="soft_l1", diff_step=0.08, max_nfev=_EVALUATIONS
        )
        intervals = dict(zip(free, _intervals(found, units), strict=True))
        return self._named(left_out, without, *records(found.x), intervals)

    def _records(self, values: Mapping[str, float], absent: Sequence[str], source: str) -> tuple[HostFit, FrontEndFit]:
        host = {"step_s": 0.0, "sequence_s": 0.0, "overlapped": OVERLAPPED[self.engine], "source": source}
        front_end = {"client_s": CLIENT_S, "held_prefills": HELD_PREFILLS[self.engine], "source": source}
        front_end = {name: value for name, value in front_end.items() if name not in absent}
        for name, value in values.items():
            (host if name in HostFit.model_fields else front_end)[name] = value
        return HostFit.model_validate(host), FrontEndFit.model_validate(front_end)

    def _named(
        self,
        left_out: str,
        without: str,
        host: HostFit,
        front_end: FrontEndFit,
        intervals: dict[str, tuple[float, float]] | None = None,
    ) -> SettingFit:
        return SettingFit(
            engine=self.engine,
            left_out=left_out,
            without=without,
            host=host,
            front_end=front_end,
            intervals=intervals or {},
        )


def _intervals(found: OptimizeResult, units: Array) -> list[tuple[float, float]]:
    """95% intervals from the Jacobian: what the runs cannot tell has a wide one; 0 to 0 for what is at that limit."""
    freedom = max(len(found.fun) - len(units), 1)
    covariance = np.linalg.pinv(found.jac.T @ found.jac) * 2.0 * found.cost / freedom
    half = 1.96 * np.sqrt(np.diag(covariance)) * units
    middle = np.where(found.x > _NOTHING, found.x, 0.0) * units
    half = np.where(middle > 0.0, half, 0.0)
    return [(rounded(max(float(m - h), 0.0)), rounded(float(m + h))) for m, h in zip(middle, half, strict=True)]
