"""Processes that measure together: one a core or GPU, joined by torch.distributed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlsim.errors import CalibrationError, RlsimError

#: A collective that waits longer than this for another worker fails.
TIMEOUT = timedelta(minutes=5)
CLOSING_S = 5.0  # for a worker to leave on its own


@dataclass
class Worker:
    """What a function that runs on a worker knows of its place. `state` keeps what it likes between calls."""

    rank: int
    size: int
    device: str
    folder: Path  # shared by the workers, gone with them
    state: dict[str, Any] = field(default_factory=dict)
    _groups: dict[int, Any] = field(default_factory=dict)
    _ranks: dict[int, Any] = field(default_factory=dict)

    def group(self, size: int) -> Any:
        """The communication group of the `size` consecutive ranks that this one belongs to; None for one alone.

        All workers must ask together when a size is used first: it creates the groups. Raises `CalibrationError` if
        `size` does not divide the workers.
        """
        if size < 1 or self.size % size:
            raise CalibrationError(f"groups of {size} do not divide {self.size} workers")
        if size == 1:
            return None
        if size not in self._groups:
            self._groups[size] = self.create_groups(size)
        return self._groups[size]

    def ranks(self, size: int) -> Any:
        """The same ranks, as the layers of a model talk to each other (`ranks.Ranks`). All workers ask together."""
        from rlsim.calibrate.measure.ranks import join_ranks

        if size not in self._ranks:
            self._ranks[size] = join_ranks(self, size, self.folder / f"ranks-{size}-{self.rank // size}")
            self.barrier()
        return self._ranks[size]

    def create_groups(self, size: int) -> Any:
        """New groups of `size` consecutive ranks, by all workers together; the one this rank is in."""
        import torch.distributed as dist

        groups = [dist.new_group(list(range(i, i + size)), timeout=TIMEOUT) for i in range(0, self.size, size)]
        return groups[self.rank // size]

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier()


class Workers:
    """`count` processes on `device` ("cpu" or "cuda"), each pinned to its own core or given its own GPU.

    On the CPU each has `threads` threads, and as many cores to itself if there are enough. Use as a context manager;
    after a failure all of them are gone. They are started afresh (spawn), so a script that uses them needs the usual
    `if __name__ == "__main__"`. Raises `CalibrationError` if they cannot start.
    """

    def __init__(self, count: int, device: str = "cpu", threads: int = 1) -> None:
        if count < 1 or threads < 1:
            raise CalibrationError(f"{count} workers of {threads} threads: expected at least one of each")
        if device not in ("cpu", "cuda"):
            raise CalibrationError(f"unknown device {device!r}; expected cpu or cuda")
        self.count, self.device, self.threads = count, device, threads
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        context = get_context("spawn")
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # shared buffers need no disk behind them
        self._scratch = tempfile.TemporaryDirectory(prefix="rlsim-workers-", dir=memory)
        folder = Path(self._scratch.name)
        try:
            for rank in range(self.count):
                ours, theirs = context.Pipe()
                arguments = (rank, self.count, self.device, self.threads, self._cores(rank), folder, theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rlsim worker {rank}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            self._results()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
            return
        for connection in self._connections:
            try:
                connection.send_bytes(b"")
            except OSError:
                continue
        for process in self._processes:
            process.join(CLOSING_S)
        self.kill()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every worker at once; the results by rank.

        Function, arguments and results must be picklable. If a worker fails, or dies, all are ended and
        `CalibrationError` says why.
        """
        if not self._processes:
            raise CalibrationError("the workers are not running; one of them has failed, or they were never started")
        message = bytes(ForkingPickler.dumps((function, args)))
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            return self._results()
        except OSError:
            self.kill()
            raise CalibrationError("a measuring process has died") from None
        except BaseException:  # a half-finished call leaves workers waiting for each other
            self.kill()
            raise

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _results(self) -> list[Any]:
        results: dict[int, Any] = {}
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        while len(results) < self.count:
            waiting = [connection for connection, rank in ranks.items() if rank not in results]
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    failed, value = connection.recv()
                except EOFError:
                    code = self._processes[rank].exitcode
                    raise CalibrationError(f"measuring process {rank} has died (exit code {code})") from None
                if failed:
                    raise CalibrationError(f"measuring process {rank}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(self.count)]

    def _cores(self, rank: int) -> list[int]:
        if self.device != "cpu" or not hasattr(os, "sched_getaffinity"):
            return []
        cores = sorted(os.sched_getaffinity(0))
        return [cores[(rank * self.threads + i) % len(cores)] for i in range(self.threads)]


def _serve(
    rank: int, count: int, device: str, threads: int, cores: list[int], folder: Path, connection: Connection
) -> None:
    """The life of a worker: join the others, then do what the parent asks until it asks for nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    try:
        worker = _join(rank, count, device, threads, cores, folder)
    except Exception as error:
        _send(connection, True, _described(error))
        return
    _send(connection, False, None)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            break
        try:
            function, args = ForkingPickler.loads(message)
            result = function(worker, *args)
        except Exception as error:
            _send(connection, True, _described(error))
        else:
            _send(connection, False, result)
    if count > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def _join(rank: int, count: int, device: str, threads: int, cores: list[int], folder: Path) -> Worker:
    if cores:
        os.sched_setaffinity(0, cores)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo greets on standard output
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise CalibrationError("measuring needs PyTorch: pip install 'rlsim[gpu]'") from None
    if device == "cpu":
        torch.set_num_threads(threads)
        name = "cpu"
    else:
        if torch.cuda.device_count() < count:
            raise CalibrationError(f"{count} GPUs are needed, there are {torch.cuda.device_count()}")
        name = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    if count > 1:
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=TIMEOUT
        )
    return Worker(rank, count, name, folder)


def _send(connection: Connection, failed: bool, value: Any) -> None:
    try:
        message = ForkingPickler.dumps((failed, value))
    except Exception as error:
        message = ForkingPickler.dumps((True, f"a result cannot be sent back: {error}"))
    connection.send_bytes(message)


def _described(error: Exception) -> str:
    text = str(error).strip()
    if isinstance(error, RlsimError):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
