"""Communication between the workers, by operation and size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from rlsim.calibrate.measure.bench import Bench, Call
from rlsim.calibrate.measure.clock import Timing, measure
from rlsim.calibrate.measure.workers import Worker


def collective(worker: Worker, bench: Bench, op: str, gpus: int, size: int) -> Timing:
    """`op` in every group of `gpus` consecutive workers at once, on a tensor of `size` bytes; all must call this.

    The tensor is what every rank holds after an all-gather or before a reduce-scatter, all-reduce or all-to-all, and
    what travels in a broadcast or send. A send is half of a message there and back. On the CPU, all-reduce and
    all-gather are the decoder's own (`ranks.Ranks`), the others gloo's.
    """
    ranks = worker.ranks(gpus)
    distributed: Any = dist
    elements = max(size // bench.dtype_bytes // gpus, 1) * gpus
    whole, part = bench.tensor(elements).zero_(), bench.tensor(elements // gpus).zero_()  # sums stay what they are
    received = whole.clone()
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # newer, older name
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    first = worker.rank // gpus * gpus  # of our group

    def there_and_back() -> None:
        sends, other = worker.rank == first, 2 * first + 1 - worker.rank
        for turn in (sends, not sends):
            (dist.send if turn else dist.recv)(whole, other, group=ranks.group)

    on_cpu, group = worker.device == "cpu", ranks.group
    calls: dict[str, Call] = {
        "all_reduce": partial(ranks.all_reduce, whole),
        "all_gather": partial(ranks.all_gather, part) if on_cpu else partial(gather, whole, part, group=group),
        "reduce_scatter": partial(scatter, part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, received, whole, group=group),
        "broadcast": partial(dist.broadcast, whole, first, group=group),
        "send_recv": there_and_back,
    }
    return measure(
        calls[op],
        device=bench.device,
        effort=bench.effort,
        calls=2 if op == "send_recv" else 1,
        slowest=lambda seconds: max(worker.all.agree(seconds)),
    )
