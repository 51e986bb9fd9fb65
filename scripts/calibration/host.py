"""Host time per step: what whole engines take beyond their kernels, fitted through the closed loop as measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from rlsim.calibrate.fit.common import Array, rounded
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, Engine, HostFit
from rlsim.cost.host import HostedStep
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import StepCost
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.validate.serving import CLUSTER, QUANTITIES, SERVED, TARGET, Protocol, ServingRun, read_runs, simulate

#: TensorRT-LLM prepares a step while the one before it runs (`disable_overlap_scheduler` is false in the generator's
#: rule for these runs). vLLM 0.12 does not by default. SGLang does too, but its runs leave time that grows with the
#: sequences of steps whose kernels take 10 ms and more, so it is not the host's: it counts on top.
OVERLAPPED: dict[Engine, bool] = {"trtllm": True, "vllm": False, "sglang": False}

_UNIT_S = np.array([1e-3, 2e-5, 5e-3])  # of the order of step_s, sequence_s and prefill_s
_EVALUATIONS = 12
_NOTHING_S = 1e-8  # less is none


@dataclass
class Serving:
    """One engine's serving runs and the host time that they leave over the kernels of a calibration."""

    engine: Engine
    runs: list[ServingRun]
    kernels: dict[tuple[str, int], StepCost]

    @property
    def version(self) -> str:
        """The release that was measured."""
        return SERVED[self.engine]

    @cached_property
    def host(self) -> HostFit:
        """Fitted to the runs that are for it."""
        models = ", ".join(dict.fromkeys(f"{run.model} at TP{run.tp}" for run in self.runs))
        source = f"every second of {len(self.runs)} serving runs on H100 ({models}), {self.engine} {self.version}"
        return self.fit([run for run in self.runs if run.fitted], source)

    @cached_property
    def swapped(self) -> HostFit:
        """Fitted to the other runs: what `host` would be had the halves changed places."""
        return self.fit([run for run in self.runs if not run.fitted], "the other half")

    def fit(self, runs: Sequence[ServingRun], source: str, *, overlapped: bool | None = None) -> HostFit:
        """Host time that brings TPOT and TTFT of the closed loop nearest to `runs`: least squares of log ratios over
        their targets (6% and 25%), soft beyond them, none below zero."""
        scale = np.tile([TARGET[name] for name in QUANTITIES], len(runs))
        parallel = OVERLAPPED[self.engine] if overlapped is None else overlapped

        def host_of(x: Array) -> HostFit:
            step, sequence, prefill = (rounded(float(value)) if value > _NOTHING_S else 0.0 for value in x * _UNIT_S)
            return HostFit(step_s=step, sequence_s=sequence, prefill_s=prefill, overlapped=parallel, source=source)

        def residuals(x: Array) -> Array:
            ratios = [ratio for run in runs for ratio in self.ratios(run, host_of(x))]
            return np.asarray(np.log(ratios) / scale, dtype=np.float64)

        # Steps of the order of the unknowns: the loop's events change order, so it is not smooth in the small.
        found = least_squares(
            residuals, np.ones(3), bounds=(0.0, np.inf), loss="soft_l1", diff_step=[0.1], max_nfev=_EVALUATIONS
        )
        return host_of(found.x)

    def errors(self, host: HostFit, *, fitted: bool) -> Array:
        """Relative errors of TPOT and TTFT (two columns) of the runs of one half."""
        return np.array([self.ratios(run, host) for run in self.runs if run.fitted == fitted]) - 1.0

    def ratios(self, run: ServingRun, host: HostFit, protocol: Protocol | None = None) -> tuple[float, float]:
        """Simulated over measured: TPOT and TTFT."""
        served = simulate(run, HostedStep(self.kernels[run.model, run.tp], host), protocol)
        return served.tpot_s / run.tpot_s, served.ttft_s / run.ttft_s


def fit_serving(data: Path, calibration: Calibration) -> Serving:
    """The serving runs of an H100 calibration's engine, with its kernels."""
    runs = [run for run in read_runs(data) if run.engine == calibration.engine]
    bare, cluster = calibration.model_copy(update={"host": NO_HOST}), load_cluster(CLUSTER)
    layouts = dict.fromkeys((run.model, run.tp) for run in runs)
    kernels = {(model, tp): step_cost(load_model(model), tp, cluster, bare) for model, tp in layouts}
    return Serving(calibration.engine, runs, kernels)
