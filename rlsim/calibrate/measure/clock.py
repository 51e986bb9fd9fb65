"""How long one call takes: warm-up, repeats, the median and its spread."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Half the interquartile range over the median beyond which a point is refused, not recorded as measured.
NOISY = 0.1

#: The same for what happens once in a layout change, not thousands of times in a rollout: set-up work varies.
NOISY_ONCE = 0.5

FEWEST = 3  # repeats of a call that alone outlasts the time allowed
BATCH_S = 200e-6  # shorter calls on the CPU are timed in batches this long: the scheduler's tick is not the kernel's


@dataclass(frozen=True)
class Timing:
    """The time of one call: median over `repeats` (seconds), and half the interquartile range over that median."""

    seconds: float
    spread: float
    repeats: int

    def noisy(self, limit: float = NOISY) -> bool:
        """True if the repeats spread too far to call the median measured; also if it is not a positive time."""
        return not (self.spread <= limit and self.seconds > 0.0)


@dataclass(frozen=True)
class Effort:
    """How long one point is measured.

    After `warmup` runs it is repeated until there are `min_repeats` over `min_time_s`, or until `max_time_s` is over
    (three repeats at the least).
    """

    warmup: int = 3
    min_repeats: int = 7
    min_time_s: float = 0.05
    max_time_s: float = 1.0


def measure(
    run: Callable[[], object],
    *,
    device: str,
    effort: Effort = Effort(),
    repeats: int | None = None,
    calls: int = 1,
    now: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time `run()` on `device` ("cpu" or "cuda") with this effort.

    `repeats` fixes the number of repeats instead: what several processes call together must be called equally often by
    all. `run` makes `calls` equal calls; the time is that of one. `now` is the CPU's clock.
    On CUDA, events around each repeat give the device's time, the gaps of a host that lags behind included; capture
    short kernels into a graph (`launcher`) to leave them out.
    """
    timed = _on_cuda if device.startswith("cuda") else _on_cpu(now)
    began, one = now(), 0.0
    for _ in range(max(1, effort.warmup)):
        one = timed(run, 1)
        if repeats is None and now() - began > effort.max_time_s:
            break
    inner = 1
    if not device.startswith("cuda") and repeats is None and 0.0 < one < BATCH_S:
        inner = math.ceil(BATCH_S / one)
    times: list[float] = []
    began = now()
    while True:
        times.append(timed(run, inner) / (inner * calls))
        over = now() - began
        enough = over >= effort.min_time_s and len(times) >= effort.min_repeats
        too_long = over >= effort.max_time_s and len(times) >= FEWEST
        if (enough or too_long) if repeats is None else len(times) >= repeats:
            return timing(times)


def timing(times: Sequence[float]) -> Timing:
    """The `Timing` of repeats that were timed one by one (seconds). Raises `ValueError` if there are none."""
    if not times:
        raise ValueError("no repeats to take a median of")
    low, median, high = (float(q) for q in np.quantile(np.asarray(times, float), (0.25, 0.5, 0.75)))
    return Timing(median, (high - low) / 2.0 / median if median > 0.0 else math.inf, len(times))


def synchronize(device: str) -> None:
    """Wait until everything queued on `device` is done."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def launcher(functions: Sequence[Callable[[], object]], device: str) -> tuple[Callable[[], object], int]:
    """A `run` for `measure` that goes through `functions` in turn, and the calls it makes.

    Equal work on different operands keeps what a step would find in memory out of the caches. On the CPU every run
    is one call; on CUDA one run is a captured graph of all of them (at least eight calls), so that the host's launch
    time does not count.
    """
    if not device.startswith("cuda"):
        turns = itertools.cycle(functions)
        return lambda: next(turns)(), 1
    import torch

    cuda: Any = torch.cuda
    rounds = math.ceil(8 / len(functions))
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):  # a kernel's first launch may allocate or tune, which capture does not allow
        for function in functions:
            function()
    cuda.current_stream(device).wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(rounds):
            for function in functions:
                function()
    return graph.replay, rounds * len(functions)


def _on_cpu(now: Callable[[], float]) -> Callable[[Callable[[], object], int], float]:
    def timed(run: Callable[[], object], inner: int) -> float:
        began = now()
        for _ in range(inner):
            run()
        return now() - began

    return timed


def _on_cuda(run: Callable[[], object], inner: int) -> float:
    import torch

    cuda: Any = torch.cuda
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    for _ in range(inner):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
