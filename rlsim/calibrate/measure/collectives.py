"""Communication between the workers, by operation and size."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from rlsim.calibrate.measure.bench import Bench, Call
from rlsim.calibrate.measure.clock import Effort, Timing, measure, synchronize
from rlsim.calibrate.measure.workers import Worker

FEWEST_REPEATS, MOST_REPEATS = 15, 200


def collective(worker: Worker, bench: Bench, op: str, gpus: int, size: int) -> Timing:
    """`op` in every group of `gpus` consecutive workers at once, on a tensor of `size` bytes; all must call this.

    The tensor is what every rank holds after an all-gather or before a reduce-scatter, all-reduce or all-to-all, and
    what travels in a broadcast or send. A send is half of a message there and back. On the CPU, all-reduce and
    all-gather are the decoder's own (`ranks.Ranks`), the others gloo's.
    """
    import torch
    import torch.distributed as dist

    group = worker.group(gpus)
    run, calls = _operation(worker, bench, op, gpus, size, group)
    for _ in range(bench.effort.warmup):
        run()
    synchronize(bench.device)
    # every rank must repeat equally often: as often as suits the slowest of their fastest
    once = Effort(warmup=1)
    fastest = min(measure(run, device=bench.device, effort=once, repeats=1).seconds for _ in range(5))
    one = torch.tensor([fastest], device=bench.device)
    dist.all_reduce(one, op=dist.ReduceOp.MAX, group=group)
    effort = bench.effort
    wanted = max(FEWEST_REPEATS, math.ceil(effort.min_time_s / float(one)))
    most = max(effort.min_repeats, math.floor(effort.max_time_s / float(one)))
    return measure(run, device=bench.device, effort=once, repeats=min(wanted, most, MOST_REPEATS), calls=calls)


def _operation(worker: Worker, bench: Bench, op: str, gpus: int, size: int, group: Any) -> tuple[Call, int]:
    """The call to time, and how many operations it makes."""
    import torch.distributed as dist

    distributed: Any = dist  # newer releases rename the tensor forms
    elements = max(size // bench.dtype_bytes // gpus, 1) * gpus
    whole, part = bench.tensor(elements).zero_(), bench.tensor(elements // gpus).zero_()  # sums stay what they are
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    first = worker.rank // gpus * gpus  # of our group
    sends, other = worker.rank == first, 2 * first + 1 - worker.rank

    def there_and_back() -> None:
        for turn in (sends, not sends):
            if turn:
                dist.send(whole, other, group=group)
            else:
                dist.recv(whole, other, group=group)

    if worker.device == "cpu":  # by shared memory, as the decoder's layers do it there
        ranks = worker.ranks(gpus)
        if op in ("all_reduce", "all_gather"):
            return (partial(ranks.all_reduce, whole) if op == "all_reduce" else partial(ranks.all_gather, part)), 1
    received = whole.clone()
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "send_recv": there_and_back,
    }
    return calls[op], 2 if op == "send_recv" else 1
