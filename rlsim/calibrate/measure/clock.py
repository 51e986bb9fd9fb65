"""How long one call takes: warm-up, repeats, the median and its spread."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: Half the interquartile range over the median beyond which a point is refused, not recorded as measured.
NOISY = 0.1

#: The same for what happens once in a layout change, not thousands of times in a rollout: set-up work varies.
NOISY_ONCE = 0.5

FEWEST, MOST = 3, 200  # repeats
BATCH_S = {"cpu": 200e-6, "cuda": 2e-3}  # shorter calls are timed in batches this long: the tick, or the last wait
NOT_A_TIME = 1e9  # the spread of repeats whose median is zero
CORE_SHARE = 0.97  # of its core that a process has while nothing else runs there


@dataclass(frozen=True)
class Timing:
    """The time of one call: median over `repeats` (seconds), and half the interquartile range over that median."""

    seconds: float
    spread: float
    repeats: int


@dataclass(frozen=True)
class Effort:
    """How long one point is measured: after `warmup` runs until there are `min_repeats` over `min_time_s`, or until
    `max_time_s` is over (three repeats at the least)."""

    warmup: int = 3
    min_repeats: int = 7
    min_time_s: float = 0.05
    max_time_s: float = 1.0


class Lap(NamedTuple):
    """One repeat of what is timed."""

    seconds: float
    core_share: float  # of the time that this process really ran; the rest of the core went to others

    @property
    def disturbed(self) -> bool:
        """Whether something else ran on our core meanwhile."""
        return self.core_share < CORE_SHARE


def measure(
    run: Callable[[], object],
    *,
    device: str,
    effort: Effort = Effort(),
    calls: int = 1,
    undo: Callable[[], object] | None = None,
    slowest: Callable[[float], float] = lambda seconds: seconds,
    now: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time `run()` on `device` with this effort; it makes `calls` equal calls, and the time is that of one.

    With `undo`, which takes a run back, every run is timed by itself. What several processes call together must be
    called equally often by all: `slowest` gives the largest of their times of one run, and lets them begin together.
    """
    one = max(slowest(laps(run, max(effort.warmup, 1), device, undo, now=now)[-1].seconds), 1e-9)
    inner = 1 if undo else max(1, math.ceil(BATCH_S[device.partition(":")[0]] / one))
    wanted = max(effort.min_repeats, math.ceil(effort.min_time_s / (inner * one)))
    repeats = max(FEWEST, min(wanted, math.floor(effort.max_time_s / (inner * one)), MOST))
    return timing([lap.seconds / (inner * calls) for lap in laps(run, repeats, device, undo, inner, now)])


def laps(
    run: Callable[[], object],
    repeats: int,
    device: str,
    undo: Callable[[], object] | None = None,
    inner: int = 1,
    now: Callable[[], float] = time.perf_counter,
) -> list[Lap]:
    """`repeats` times `inner` runs, until the device is done with them. The garbage collector waits meanwhile."""
    busy, found = time.process_time, []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            worked, began = busy(), now()
            for _ in range(inner):
                run()
            synchronize(device)
            seconds, worked = now() - began, busy() - worked
            found.append(Lap(seconds, min(worked / max(seconds, 1e-9), 1.0) if device == "cpu" else 1.0))
            if undo:
                undo()
                synchronize(device)
    finally:
        if collecting:
            gc.enable()
    return found


def timing(times: Sequence[float]) -> Timing:
    """The `Timing` of repeats that were timed one by one (seconds)."""
    low, median, high = (float(q) for q in np.quantile(np.asarray(times, float), (0.25, 0.5, 0.75)))
    return Timing(median, (high - low) / 2.0 / median if median > 0.0 else NOT_A_TIME, len(times))


def synchronize(device: str) -> None:
    """Wait until everything queued on `device` is done."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)
