"""Work on the cores of this machine, in processes of our own, so that it is known whose work died with one.

`concurrent.futures` breaks its whole pool when a process is killed, and does not say which work did it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any

from rlsim.errors import RlsimError
from rlsim.experiment.case import Execute, Job, Ran, in_turn
from rlsim.results.sweeps.task import MOST_ATTEMPTS, POINTS_OF_A_WORKER, Answer, Failed, Work


def in_processes(workers: int | None = None) -> Execute:
    """Does the jobs of `rlsim.experiment.run.run_loaded` in so many processes (default: one a core); one is this one.

    The processes end with the last answer, or as soon as answers are not wanted any more.
    """
    workers = workers or cores()

    def execute(jobs: Sequence[Job], begun: Callable[[Job], None]) -> Iterator[tuple[Job, Ran | RlsimError]]:
        with closing(run_locally(jobs, workers, begun)) as answers:
            for job, result, _ in answers:
                failed = isinstance(result, Failed)
                yield job, RlsimError(f"{job.name}: {result.error}") if failed else result

    return in_turn if workers == 1 else execute


def run_locally(
    tasks: Sequence[Work], workers: int, begun: Callable[[Any], None] = lambda _: None
) -> Generator[Answer, None, None]:
    """Run tasks in so many processes; answers come as they are ready, and `begun` is told of each task that is sent.

    A task whose process dies is run again, and after `MOST_ATTEMPTS` the answer is that it failed. When the iterator
    is closed, the processes are ended. A worker of a `multiprocessing.Pool` may start none: there the tasks run in this
    process, one after the other. Raises `RlsimError` if processes cannot be started.
    """
    if multiprocessing.current_process().daemon:
        for own in tasks:
            begun(own)
            started_at = time.monotonic()
            yield Answer(own, own.run(), time.monotonic() - started_at)
        return
    context = multiprocessing.get_context("spawn")
    waiting, deaths, never_started = deque(tasks), Counter[str](), 0
    pool = [_Worker(context) for _ in range(min(workers, len(tasks)))]
    try:
        while pool:
            for connection in wait([worker.connection for worker in pool]):
                worker = next(one for one in pool if one.connection is connection)
                task = worker.task
                answer = worker.receive()
                never_started = never_started + 1 if worker.dead and not worker.ready else 0
                if never_started > MOST_ATTEMPTS * workers:
                    raise RlsimError(f"a worker process cannot start: {worker.failure(never_started).error}")
                if worker.dead and task is not None:
                    deaths[task.point] += 1
                    if deaths[task.point] < MOST_ATTEMPTS:
                        waiting.append(task)
                    else:
                        answer = Answer(task, worker.failure(deaths[task.point]), worker.elapsed_s)
                if waiting and not worker.spent:
                    begun(waiting[0])
                    worker.send(waiting.popleft())  # before the answer is stored: it does not wait for the disk
                else:
                    pool.remove(worker)
                    worker.end()
                    if waiting:
                        pool.append(_Worker(context))
                if answer is not None:
                    yield answer
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """A process and our end of the pipe to it. It says that it is ready, then answers each task that it is sent."""

    def __init__(self, context: SpawnContext) -> None:
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _interrupts_ignored():  # the child inherits that: an interrupt is for the parent to handle
            self._process.start()
        theirs.close()
        self.task: Work | None = None
        self.dead = False
        self.ready = False
        self._answered = 0
        self._sent_at = 0.0

    @property
    def spent(self) -> bool:
        return self.dead or self._answered >= POINTS_OF_A_WORKER

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._sent_at

    def send(self, task: Work) -> None:
        self.task, self._sent_at = task, time.monotonic()
        with suppress(OSError):  # it has died meanwhile: `receive` will find that out
            self.connection.send(task)

    def receive(self) -> Answer | None:
        """Its answer, or None if it has become ready or died; raises `RlsimError` if it never started."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            self.dead = True
            self._process.join()
            if not self.ready and (self._process.exitcode or 0) > 0:
                raise RlsimError(
                    f"a worker process could not start (exit code {self._process.exitcode}); a script that calls "
                    "rlsim.sweep does so under `if __name__ == '__main__':`"
                ) from None
            return None
        task, self.task = self.task, None
        if task is None:
            self.ready = True
            return None
        self._answered += 1
        return Answer(task, result, self.elapsed_s)

    def failure(self, deaths: int) -> Failed:
        code = self._process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -9 else ""
        return Failed(f"its worker process {how}{hint}, {deaths} times")

    def end(self) -> None:
        """End the process; it has nothing to tidy up."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection) -> None:
    """A worker's life: take tasks and answer them. It ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.send(None)
    with suppress(EOFError, OSError):
        while True:
            connection.send(connection.recv().run())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
