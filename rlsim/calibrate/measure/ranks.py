"""Communication between the ranks of one replica in every layer: all-reduce and all-gather.

On CUDA it is NCCL. On the CPU sums and gathers go through memory that the processes share: gloo's own threads compete
with the computing thread for the core, and a step's many small sums would each wait for the scheduler's tick,
milliseconds long.
"""

from __future__ import annotations

import mmap
import os
import pickle
import platform
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CAPACITY_BYTES = 1 << 20  # of one rank's buffer; larger tensors go in pieces
_LINE = 64  # bytes of a cache line: one counter each
_SPINS = 2000  # before a waiting rank offers its core to others
_YIELDS = 100 * _SPINS  # before it sleeps: the rank it waits for has no core, and no time is worth keeping


class Ranks:
    """The ranks of a torch.distributed group, or one alone. All must make the same calls in the same order."""

    def __init__(self, group: Any, size: int, device: str) -> None:
        self.group, self.size, self.device = group, size, device

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum `x` (contiguous) over the ranks, in place; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x` (contiguous, of the same shape), by rank."""
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return found

    def agree(self, own: Any) -> list[Any]:
        """Every rank's picklable `own`, by rank, once all of them have come here: how a layout change begins."""
        data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(data)], device=self.device))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        found = self.all_gather(padded.to(self.device))
        return [pickle.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(found, sizes, strict=True)]

    def together(self) -> None:
        """Returns on all ranks at nearly the same time."""
        self.all_reduce(torch.zeros(1, device=self.device))


class SharedMemoryRanks(Ranks):
    """Processes that map the file `path`: each writes its part, counts up, and waits until all have counted as far.

    There are two buffers a rank, used in turn: a rank writes one again only after all have counted for the other, and
    so have read the first. Counters are plain stores, which only x86 keeps in order behind the data.
    """

    def __init__(self, group: Any, size: int, path: Path, index: int) -> None:
        super().__init__(group, size, "cpu")
        self._index = index
        head = size * _LINE
        with path.open("a+b") as file:
            file.truncate(head + 2 * size * CAPACITY_BYTES)
            self._map = mmap.mmap(file.fileno(), head + 2 * size * CAPACITY_BYTES)
        self._counters = memoryview(self._map)[:head].cast("q")
        self._places = [rank * _LINE // 8 for rank in range(size)]
        with torch.inference_mode(False):  # so that it can be written in and outside of inference mode
            data = torch.frombuffer(self._map, dtype=torch.uint8, offset=head)
            self._buffers = data.view(2, size, CAPACITY_BYTES)
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._count = 0
        self._buffers[:, index] = 0  # no page is missing later

    def all_reduce(self, x: torch.Tensor) -> None:
        step = CAPACITY_BYTES // x.element_size()
        for piece in torch.split(x.view(-1), step):
            first, second, *rest = (buffer[: len(piece)] for buffer in self._post(piece))
            torch.add(first, second, out=piece)
            for other in rest:
                piece += other

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(x) for _ in range(self.size)]
        step = CAPACITY_BYTES // x.element_size()
        for start, piece in zip(range(0, x.numel(), step), torch.split(x.view(-1), step), strict=True):
            for whole, buffer in zip(found, self._post(piece), strict=True):
                whole.view(-1)[start : start + step] = buffer[: len(piece)]
        return found

    def _post(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """The buffers of all ranks once each has written its piece; valid until the next post but one."""
        self._count += 1
        count = self._count
        if piece.dtype not in self._views:
            with torch.inference_mode(False):
                self._views[piece.dtype] = [[buffer.view(piece.dtype) for buffer in half] for half in self._buffers]
        buffers = self._views[piece.dtype][count & 1]
        buffers[self._index][: len(piece)] = piece
        counters = self._counters
        counters[self._places[self._index]] = count
        for place in self._places:
            spins = 0
            while counters[place] < count:
                spins += 1
                if spins > _YIELDS:
                    time.sleep(1e-3)
                elif spins > _SPINS:
                    os.sched_yield()
        return buffers


def join_ranks(worker: Any, size: int, file: Path, timeout: timedelta) -> Ranks:
    """The `size` consecutive workers that `worker` is one of; all workers must join together."""
    if size == 1:
        return Ranks(None, 1, worker.device)
    members = (list(range(first, first + size)) for first in range(0, worker.size, size))
    group = [dist.new_group(ranks, timeout=timeout) for ranks in members][worker.rank // size]
    if worker.device != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return Ranks(group, size, worker.device)
    return SharedMemoryRanks(group, size, file, worker.rank % size)
