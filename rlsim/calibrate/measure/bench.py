"""What every kernel benchmark needs to know about the device, and operands as cold as in a step of the model."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlsim.cost.memory import rollout_weight_bytes
from rlsim.models.model import Model

# The clock ------------------------------------------------------------------------------------------------------------

#: Half the interquartile range over the median beyond which a point is refused, not recorded as measured.
NOISY = 0.1

FEWEST, MOST = 3, 200  # repeats
BATCH_S = {"cpu": 200e-6, "cuda": 2e-3}  # shorter calls are timed in batches this long: the tick, or the last wait
NOT_A_TIME = 1e9  # the spread of repeats whose median is zero
CORE_SHARE = 0.97  # of its core that a process has while nothing else runs there


@dataclass(frozen=True)
class Timing:
    """The time of one call: median over `repeats` (seconds), and half the interquartile range over that median; or why
    the device has none (`impossible`). `took_s` is what finding out cost."""

    seconds: float
    spread: float
    repeats: int
    took_s: float = 0.0
    impossible: str = ""


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


# The bench ------------------------------------------------------------------------------------------------------------


Call = Callable[[], object]

_COPIES = 1024  # of one operand at most
_CALLS = 32  # at least, in one graph


@dataclass(frozen=True)
class Bench:
    """One device as a benchmark sees it. `dtype` is a torch dtype's name.

    A step of the model at `tp` touches all weights and the KV of all layers between two uses of one operand. So a
    benchmark goes through as many bytes of copies, up to twice the cache: it finds its operands as cold, or as warm, as
    the step does.
    """

    device: str
    dtype: str
    model: Model
    tp: int
    cache_bytes: float
    effort: Effort

    @property
    def dtype_bytes(self) -> int:
        return int(self.model.dtype_bytes)

    @property
    def torch_dtype(self) -> Any:
        import torch

        return getattr(torch, self.dtype)

    def copies(self, operand_bytes: float, *, kv: bool = False) -> int:
        """How many copies of an operand a benchmark goes through in turn; `kv`: every layer has one of this size."""
        between = rollout_weight_bytes(self.model, self.tp)
        between += self.model.num_hidden_layers * operand_bytes if kv else 0.0
        return min(max(math.ceil(min(between, 2.0 * self.cache_bytes) / operand_bytes), 1), _COPIES)

    def tensor(self, *shape: int) -> Any:
        """Numbers of ordinary size, made quickly: a short random vector over and over.

        Not zeros: a GPU draws less power on them and clocks higher than on weights.
        """
        import torch

        count = math.prod(shape)
        pattern = torch.randn(min(count, 65_521), device=self.device, dtype=torch.float32).mul_(0.1)
        repeated = pattern.to(self.torch_dtype).repeat(math.ceil(count / len(pattern)))
        return repeated[:count].view(*shape)

    def time(self, calls: list[Call]) -> Timing:
        """The time of one of `calls`, which do equal work on different operands."""
        run, count = _launcher(calls, self.device)
        return measure(run, device=self.device, effort=self.effort, calls=count)


def _launcher(functions: Sequence[Call], device: str) -> tuple[Call, int]:
    """What goes through `functions` in turn, and the calls it makes at once.

    On the CPU it makes one call; on CUDA it is a captured graph of all of them, many times over if they are short, so
    that the host's launch time does not count.
    """
    if device == "cpu":
        turns = itertools.cycle(functions)
        return lambda: next(turns)(), 1
    pilot = laps(lambda: [function() for function in functions], 2, device)[-1]
    rounds = math.ceil(_CALLS / len(functions)) if pilot.seconds < BATCH_S["cuda"] else 1
    calls = [function for _ in range(rounds) for function in functions]
    return captured(lambda: [function() for function in calls], device).replay, len(calls)


def captured(run: Call, device: str) -> Any:
    """`run` as a CUDA graph."""
    import torch

    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):  # the first launches may allocate or tune, which capture does not allow
        run()
    cuda.current_stream(device).wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        run()
    return graph
