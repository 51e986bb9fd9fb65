"""Processes that measure together: one a core or GPU, joined by torch.distributed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import active_children
from pathlib import Path
from typing import Any, Self

from rlsim.base.processes import pool_of
from rlsim.errors import CalibrationError, RlsimError

#: A collective that waits longer than this for another worker fails.
TIMEOUT = timedelta(minutes=5)


@dataclass
class Worker:
    """What a function that runs on a worker knows of its place. `state` keeps what it likes between calls."""

    rank: int
    size: int
    device: str
    folder: Path  # shared by the workers, gone with them
    state: dict[str, Any] = field(default_factory=dict)
    _ranks: dict[int, Any] = field(default_factory=dict)

    def ranks(self, size: int) -> Any:
        """The `size` consecutive ranks that this one belongs to, as they talk to each other (`ranks.Ranks`).

        All workers must ask together when a size is used first: it creates the groups. Raises `CalibrationError` if
        `size` does not divide the workers.
        """
        from rlsim.calibrate.measure.ranks import join_ranks

        if size < 1 or self.size % size:
            raise CalibrationError(f"groups of {size} do not divide {self.size} workers")
        if size not in self._ranks:
            self._ranks[size] = join_ranks(self, size, self.folder / f"ranks-{size}-{self.rank // size}", TIMEOUT)
        return self._ranks[size]

    @property
    def all(self) -> Any:
        """All workers, as `ranks`."""
        return self.ranks(self.size)


class Workers:
    """`count` processes on `device` ("cpu" or "cuda"), each pinned to its own core or given its own GPU.

    On the CPU each has one thread. Use as a context manager; after a failure all of them are gone. They are started
    afresh (spawn), so a script that uses them needs the usual `if __name__ == "__main__"`. Raises `CalibrationError` if
    they cannot start.
    """

    def __init__(self, count: int, device: str = "cpu") -> None:
        self.count, self.device = count, device
        self.pids: list[int] = []
        self._pools: list[ProcessPoolExecutor] = []  # one a worker: a call goes to each, not to whichever is free

    def __enter__(self) -> Self:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # shared buffers need no disk behind them
        self._scratch = tempfile.TemporaryDirectory(prefix="rlsim-workers-", dir=memory)
        self._pools = [pool_of(1) for _ in range(self.count)]
        self.pids = self._results([pool.submit(os.getpid) for pool in self._pools])
        folder = Path(self._scratch.name)
        places = [(rank, self.count, self.device, folder) for rank in range(self.count)]
        self._results([pool.submit(_join, *place) for pool, place in zip(self._pools, places, strict=True)])
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every worker at once; the results by rank.

        Function, arguments and results must be picklable. If a worker fails, or dies, all are ended and
        `CalibrationError` says why.
        """
        if not self._pools:
            raise CalibrationError("the workers are not running; one of them has failed, or they were never started")
        return self._results([pool.submit(_run, function, args) for pool in self._pools])

    def kill(self) -> None:
        """End all processes at once."""
        for process in active_children():
            if process.pid in self.pids:
                process.kill()
        for pool in self._pools:
            pool.shutdown()
        self._pools = []
        self._scratch.cleanup()

    def _results(self, futures: list[Future[Any]]) -> list[Any]:
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for rank, future in enumerate(futures):
                error = future.exception() if future in done else None
                if isinstance(error, BrokenProcessPool):
                    raise CalibrationError(f"measuring process {rank} has died")
                if error is not None:
                    text = str(error).strip().partition("\n")[0]
                    kind = "" if isinstance(error, RlsimError) else f"{type(error).__name__}: "
                    raise CalibrationError(f"measuring process {rank}: {kind}{text}")
            return [future.result() for future in futures]
        except BaseException:  # a half-finished call leaves workers waiting for each other
            self.kill()
            raise


# On a worker ----------------------------------------------------------------------------------------------------------

_here: list[Worker] = []  # this process's own place


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(_here[0], *args)


def _join(rank: int, count: int, device: str, folder: Path) -> None:
    if device == "cpu" and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo greets on standard output
    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.set_num_threads(1)
    elif torch.cuda.device_count() < count:
        raise CalibrationError(f"{count} GPUs are needed, there are {torch.cuda.device_count()}")
    else:
        torch.cuda.set_device(rank)
    if count > 1:
        meeting = f"file://{folder}/meeting"
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=count, timeout=TIMEOUT)
    _here[:] = [Worker(rank, count, device if device == "cpu" else f"cuda:{rank}", folder)]
