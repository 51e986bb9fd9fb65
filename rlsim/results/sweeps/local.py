"""Points on the cores of this machine: pools of one process each, so that it is known whose work died with one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rlsim.base.processes import end, pool_of
from rlsim.errors import RlsimError
from rlsim.results.sweeps.task import MOST_ATTEMPTS, POINTS_OF_A_WORKER, Answer, Answers, Failed, Task


def run_locally(tasks: Sequence[Task], workers: int) -> Answers:
    """Run tasks in so many processes; answers come as they are ready.

    A task whose process dies is run again, and after `MOST_ATTEMPTS` the answer is that it failed. When the iterator
    is closed, the processes are ended. A worker of a `multiprocessing.Pool` may start none: there the tasks run in this
    process, one after the other. Raises `RlsimError` if processes cannot be started.
    """
    if multiprocessing.current_process().daemon:
        for task in tasks:
            started_at = time.monotonic()
            yield Answer(task, task.run(), time.monotonic() - started_at)
        return
    waiting, deaths = deque(tasks), Counter[str]()
    running: dict[Future[Any], tuple[Task, ProcessPoolExecutor, float]] = {}
    idle = [_pool() for _ in range(min(workers, len(tasks)))]
    pools = {*idle}

    def send() -> None:
        while waiting and idle:
            task, pool = waiting.popleft(), idle.pop()
            running[pool.submit(task.run)] = task, pool, time.monotonic()

    try:
        _check_start(idle)
        send()
        while running:
            answers = []
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, pool, sent_at = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    pools.remove(pool)
                    pools.add(pool := _pool())
                    deaths[task.point.name] += 1
                    if deaths[task.point.name] < MOST_ATTEMPTS:
                        waiting.append(task)
                        idle.append(pool)
                        continue
                    result = Failed(f"its worker process died (out of memory?), {deaths[task.point.name]} times")
                idle.append(pool)
                answers.append(Answer(task, result, time.monotonic() - sent_at))
            send()  # before the answers are stored: work does not wait for the disk
            yield from answers
    finally:
        for own in pools:
            end(own)


def _pool() -> ProcessPoolExecutor:
    return pool_of(1, max_tasks_per_child=POINTS_OF_A_WORKER)


def _check_start(pools: Sequence[ProcessPoolExecutor]) -> None:
    """Raises `RlsimError` if their processes do not start."""
    heeded = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if heeded else None  # they inherit that
    try:
        started = [pool.submit(os.getpid) for pool in pools]
    finally:
        if heeded:
            signal.signal(signal.SIGINT, before)
    try:
        for one in started:
            one.result()
    except BrokenProcessPool:
        raise RlsimError(
            "a worker process could not start; a script that calls rlsim.sweep does so under "
            "`if __name__ == '__main__':`"
        ) from None
