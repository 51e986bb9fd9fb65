"""Communication between the ranks of one replica in every layer: all-reduce and all-gather.

On CUDA it is NCCL. On the CPU it is memory that the processes share: gloo's own threads compete with the computing
thread for the core, and a step's many small sums would each wait for the scheduler's tick, milliseconds long.
"""

from __future__ import annotations

import mmap
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CAPACITY_BYTES = 1 << 20  # of one rank's buffer; larger tensors go in pieces
_LINE = 64  # bytes of a cache line: one counter each
_SPINS = 2000  # before a waiting rank offers its core to others


class Ranks(ABC):
    """The ranks that share a replica. All of them must make the same calls in the same order."""

    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum `x` (contiguous) over the ranks, in place; the same bits on every rank."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x` (contiguous, of the same shape), by rank."""

    @abstractmethod
    def exchange(
        self, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int], like: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """A flat tensor to each of some other ranks, and from those in `sizes` one of so many numbers each.

        All are on the device and of the type of `like`.
        """


class Alone(Ranks):
    """A replica of one rank, which communicates with nobody."""

    size = 1

    def all_reduce(self, x: torch.Tensor) -> None:
        """Leaves `x` as it is."""

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],  # noqa: ARG002 - there is nobody else
        sizes: Mapping[int, int],  # noqa: ARG002
        like: torch.Tensor,  # noqa: ARG002
    ) -> dict[int, torch.Tensor]:
        return {}


class DistributedRanks(Ranks):
    """The ranks of a torch.distributed group."""

    def __init__(self, group: Any, size: int) -> None:
        self.size, self._group = size, group

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self._group)
        return found

    def exchange(
        self, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int], like: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        first = dist.get_global_rank(self._group, 0)
        found = {peer: torch.empty(size, device=like.device, dtype=like.dtype) for peer, size in sizes.items()}
        operations = [dist.P2POp(dist.isend, tensor, first + peer) for peer, tensor in sends.items()]
        operations += [dist.P2POp(dist.irecv, tensor, first + peer) for peer, tensor in found.items()]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return found


class SharedMemoryRanks(Ranks):
    """Processes that map the file `path`: each writes its part, counts up, and waits until all have counted as far.

    There are two buffers a rank, used in turn: a rank writes one again only after all have counted for the other, and
    so have read the first. Counters are plain stores, which only x86 keeps in order behind the data.
    """

    def __init__(self, path: Path, index: int, size: int) -> None:
        self.size, self._index = size, index
        head = size * _LINE
        total = head + 2 * size * CAPACITY_BYTES
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, total)
            self._map = mmap.mmap(file, total)
        finally:
            os.close(file)
        self._counters = memoryview(self._map)[:head].cast("q")
        self._places = [rank * _LINE // 8 for rank in range(size)]
        self._others = [place for rank, place in enumerate(self._places) if rank != index]
        with torch.inference_mode(False):  # so that it can be written in and outside of inference mode
            data = torch.frombuffer(self._map, dtype=torch.uint8, offset=head)
            self._buffers = data.view(2, size, CAPACITY_BYTES)
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._count = 0
        self._buffers[:, index] = 0  # no page is missing later

    def all_reduce(self, x: torch.Tensor) -> None:
        step = CAPACITY_BYTES // x.element_size()
        for start in range(0, x.numel(), step):
            piece = x.view(-1)[start : start + step]
            first, *rest = (buffer[: len(piece)] for buffer in self._post(piece))
            torch.add(first, rest[0], out=piece)
            for other in rest[1:]:
                piece += other

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(x) for _ in range(self.size)]
        step = CAPACITY_BYTES // x.element_size()
        for start in range(0, x.numel(), step):
            piece = x.view(-1)[start : start + step]
            for whole, buffer in zip(found, self._post(piece), strict=True):
                whole.view(-1)[start : start + step] = buffer[: len(piece)]
        return found

    def exchange(
        self, sends: Mapping[int, torch.Tensor], sizes: Mapping[int, int], like: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Every rank posts what it has for all others, one after another; each copies what is meant for it."""
        own = torch.tensor([len(sends[peer]) if peer in sends else 0 for peer in range(self.size)])
        tables = torch.stack(self.all_gather(own)).tolist()  # by sender and receiver
        stream = torch.cat([sends[peer] for peer in sorted(sends)]) if sends else like.new_empty(0)
        found = {peer: like.new_empty(size) for peer, size in sizes.items()}
        step = CAPACITY_BYTES // like.element_size()
        for start in range(0, max(sum(table) for table in tables), step):
            buffers = self._post(stream[start : start + step])
            for peer, tensor in found.items():
                first = sum(tables[peer][: self._index])
                low, high = max(first, start), min(first + len(tensor), start + step)
                if low < high:
                    tensor[low - first : high - first] = buffers[peer][low - start : high - start]
        return found

    def _post(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """The buffers of all ranks once each has written its piece; valid until the next post but one."""
        self._count += 1
        count = self._count
        views = self._views.get(piece.dtype)
        if views is None:
            with torch.inference_mode(False):
                views = [[buffer.view(piece.dtype) for buffer in half] for half in self._buffers]
            self._views[piece.dtype] = views
        buffers = views[count & 1]
        buffers[self._index][: len(piece)] = piece
        counters = self._counters
        counters[self._places[self._index]] = count
        for place in self._others:
            spins = 0
            while counters[place] < count:
                spins += 1
                if spins > _SPINS:
                    os.sched_yield()
        return buffers


def join_ranks(worker: Any, size: int, file: Path) -> Ranks:
    """The `size` consecutive workers that `worker` is one of; all workers must join together."""
    group = worker.group(size)
    if group is None:
        return Alone()
    if worker.device != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return DistributedRanks(group, size)
    return SharedMemoryRanks(file, worker.rank % size, size)
