"""Host time per step: what whole engines take beyond their kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from calibration.tables import serving_runs
from rlsim.calibrate.fit.common import rounded
from rlsim.cost.calibration import Calibration, Engine, HostFit
from rlsim.cost.roofline import RooflineStep
from rlsim.cost.step import Chunk
from rlsim.hardware import load_cluster
from rlsim.models import load_model

NO_HOST = HostFit(step_s=0.0, sequence_s=0.0, source="none")
MODELS = {"Qwen/Qwen3-32B": "qwen3-32b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b"}
#: Releases that were measured, in the order in which they are reported.
SERVED: dict[Engine, str] = {"trtllm": "1.0.0rc3", "vllm": "0.12.0", "sglang": "0.5.1.post1"}


@dataclass
class EngineRow:
    """One measured serving run and what the kernels say about it."""

    label: str
    model: str
    measured_s: float
    decode_s: float  # kernels of a decode step at mid context
    prompt_s: float  # kernels that the prompts of later requests add to it
    batch: int
    fit: bool

    def predicted_s(self, host: HostFit, share: float = 1.0) -> float:
        """TPOT in closed form; `share` of the prompts' time falls between a request's first and last token."""
        return self.decode_s + share * self.prompt_s + host.step_s + host.sequence_s * self.batch


@dataclass
class Serving:
    """One engine's serving runs, what is fitted to half of them, and the runs left out."""

    version: str
    rows: list[EngineRow]
    left_out: list[str]
    host: HostFit
    share: float


def engine_rows(data: Path, calibration: Calibration) -> tuple[list[EngineRow], list[str]]:
    """The serving runs of the calibration's engine: every second one for the fit; and the labels of those left out.

    TPOT = decode step at mid context + concurrency / response length x what one prompt adds. vLLM and TensorRT-LLM
    run a prompt in the same iteration as the decodes, SGLang in one of its own. Runs whose sequences cannot all hold
    their KV queue, so they are left out.
    """
    cluster = load_cluster("8xh100")
    bare = calibration.model_copy(update={"host": NO_HOST})
    rows: list[EngineRow] = []
    left_out = []
    for run in serving_runs(data, calibration.engine):
        model, tp, batch = load_model(MODELS[run.model]), run.tp, run.concurrency
        prompt, response = run.prompt, run.response
        label = f"TP{tp} {prompt}+{response} x{batch}"
        room = tp * (0.9 * cluster.gpu.memory_bytes - 2e9) - model.weight_bytes
        if batch * (prompt + response) * model.kv_bytes_per_token > room:
            left_out.append(label)
            continue
        step = RooflineStep(model, tp, cluster, bare)
        context = batch * (prompt + response / 2)
        decode = step.decode(batch).step_s(context)
        chunk = [Chunk(prompt, 0)]
        alone = calibration.engine == "sglang"
        added = step.prefill_s(chunk) if alone else step.mixed_s(batch, context, chunk) - decode
        rows.append(
            EngineRow(
                label=label,
                model=model.name,
                measured_s=run.tpot_s,
                decode_s=decode,
                prompt_s=batch / response * added,
                batch=batch,
                fit=len(rows) % 2 == 0,
            )
        )
    return rows, left_out


def fit_host(rows: list[EngineRow], source: str) -> tuple[HostFit, float]:
    """Host time per step and per sequence, and the share of the prompts' time; least squares of relative errors,
    none below zero.

    The share is a property of the benchmark run, not of the engine: in steady arrivals a request sees all prompts of
    later ones (1), in waves of requests that start and end together only about half. It is fitted beside the host
    time so that the host time does not have to make up for it, and is not part of the calibration.
    """
    chosen = [row for row in rows if row.fit]
    design = np.array([[row.prompt_s, 1.0, row.batch] for row in chosen])
    measured = np.array([row.measured_s for row in chosen])
    target = 1.0 - np.array([row.decode_s for row in chosen]) / measured
    (share, step, sequence), _ = nnls(design / measured[:, None], target)
    return HostFit(step_s=rounded(float(step)), sequence_s=rounded(float(sequence)), source=source), float(share)


def fit_serving(data: Path, calibration: Calibration) -> Serving:
    """The serving runs of an H100 calibration's engine and the host time that they leave over its kernels."""
    rows, left_out = engine_rows(data, calibration)
    version = SERVED[calibration.engine]
    runs = serving_runs(data, calibration.engine)
    models = ", ".join(sorted({f"{MODELS[run.model]} at TP{run.tp}" for run in runs}))
    about = f"every second of {len(rows)} serving runs on H100 ({models}), {calibration.engine} {version}"
    host, share = fit_host(rows, about)
    return Serving(version, rows, left_out, host, share)


def error_of(rows: list[EngineRow], host: HostFit, share: float = 1.0) -> tuple[float, float]:
    """Mean absolute and mean signed relative error."""
    ratio = np.array([row.predicted_s(host, share) / row.measured_s - 1.0 for row in rows])
    return float(np.mean(np.abs(ratio))), float(np.mean(ratio))
