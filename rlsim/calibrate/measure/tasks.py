"""One point on all workers at once, and one time out of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlsim.calibrate.measure.bench import Bench, Call, Timing
from rlsim.calibrate.measure.journal import Point
from rlsim.calibrate.measure.kernels import (
    collective,
    copy,
    decode_attention,
    gemm,
    layer_elementwise,
    prefill_attention,
)
from rlsim.calibrate.measure.steps import STEPS
from rlsim.calibrate.measure.workers import Worker
from rlsim.errors import RlsimError

#: Benchmarks of one device: each gives the calls to time.
KERNELS: Mapping[str, Callable[..., list[Call]]] = {
    "copy": copy,
    "gemm": gemm,
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "memory_bound": layer_elementwise,
}


def warm_up(worker: Worker) -> None:
    """What torch does once only, seconds long, before the first point rather than in it."""
    ones = torch.ones(16, 16, device=worker.device)
    torch.nn.functional.linear(ones, ones)


def run_point(worker: Worker, bench: Bench, point: Point) -> Timing | str:
    """One point on this worker: its time, or why there is none."""
    operator, bench = point.operator, replace(bench, device=worker.device)
    values: list[Any] = [bench.model if name == "model" else value for name, value in point.row().items()]
    try:
        with torch.inference_mode():  # as an engine does
            if operator in STEPS:
                return STEPS[operator](worker, bench, *values)
            if bench.device != "cpu":
                worker.state.pop("steps", None)  # the decoder's weights and cache: kernels need the memory
            if operator == "collective":
                return collective(worker, bench, *values)
            return bench.time(KERNELS[operator](bench, *values))
    except (RuntimeError, MemoryError, RlsimError) as error:  # out of memory, or what this build of torch lacks
        if bench.device != "cpu":
            torch.cuda.empty_cache()
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def joined(found: Sequence[Timing | str]) -> Timing | str:
    """The workers' times as one: their mean, with the spread of the repeats or the difference between the workers,
    whichever is larger. A text if any of them could not."""
    timings = [one for one in found if isinstance(one, Timing)]
    if len(timings) < len(found):
        return next(one for one in found if isinstance(one, str))
    seconds = np.array([one.seconds for one in timings])
    mean = float(seconds.mean())
    apart = float(seconds.max() - seconds.min()) / 2.0 / mean if mean > 0.0 else 0.0
    spread = max(apart, float(np.mean([one.spread for one in timings])))
    return Timing(mean, spread, min(one.repeats for one in timings))
