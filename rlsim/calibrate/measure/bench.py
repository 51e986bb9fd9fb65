"""What every kernel benchmark needs to know about the device, and operands as cold as in a step of the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlsim.calibrate.measure.clock import BATCH_S, Effort, Timing, laps, measure
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.models.model import Model

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
