"""The work of one point: what is sent to a worker, and what comes back; and that of many on the cores of this machine,
in pools of one process each, so that it is known whose work died with one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlsim.base.processes import end, pool_of
from rlsim.base.refusals import refuse
from rlsim.errors import PolicyError, RlsimError
from rlsim.experiment.columns import to_arrow, to_bytes
from rlsim.experiment.run import run_loaded
from rlsim.results.sweeps.points import Point, inputs_of
from rlsim.results.sweeps.tables import COLUMNS, of_point

#: A point whose worker dies is given up after so many.
MOST_ATTEMPTS = 3
#: A worker process is replaced after so many points, so that memory it does not give back stays bounded.
POINTS_OF_A_WORKER = 100


@dataclass(frozen=True)
class Failed:
    """Why a point has no results."""

    error: str
    details: str = ""  # where in the code, for a mistake in it


@dataclass(frozen=True)
class Task:
    """A point as a worker gets it."""

    point: Point
    tables: tuple[str, ...]
    shown: str  # the experiment in messages
    folder: Path  # where its relative paths begin

    def run(self) -> Mapping[str, bytes] | Failed:
        """Simulate the point: its tables as Parquet files, by name. Never raises: what goes wrong is the answer."""
        try:
            return self._files()
        except RlsimError as error:
            return Failed(str(error), _own_traceback(error.__cause__) if isinstance(error, PolicyError) else "")
        except MemoryError:
            return Failed("out of memory")
        except Exception as error:  # a mistake of rlsim's own ends one point
            return Failed(f"{type(error).__name__}: {error}", _own_traceback(error))

    def _files(self) -> dict[str, bytes]:
        point = self.point
        experiment = point.experiment(self.shown)
        found = inputs_of(experiment, self.shown, self.folder)
        refuse("inputs of a point", changed=[what for what in point.inputs if found.get(what) != point.inputs[what]])
        result = run_loaded(experiment, self.shown, self.folder)
        model = {key: value for key, value in result.manifest["model"].items() if key != "source"}  # where it lies
        own = {"experiment": dict(point.config), "model": model, "inputs": dict(point.inputs)}
        record = {"point": point.name, **result.manifest, **own}
        files = {}
        for table in self.tables:
            frame = result.summary() if table == "summary" else getattr(result, table)
            files[table] = to_bytes(of_point(to_arrow(frame, COLUMNS[table]), point.axes, record))
        return files


class Answer(NamedTuple):
    """What became of a task (`Failed` if its process died), and how long that took (s)."""

    task: Task
    result: Mapping[str, bytes] | Failed
    elapsed_s: float


Answers = Generator[Answer, None, None]


def _own_traceback(error: BaseException | None) -> str:
    """File, line and function of every call, innermost last; files by name, so that it is the same everywhere."""
    calls = traceback.extract_tb(error.__traceback__ if error else None)
    return "\n".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)


def carried_out(
    tasks: Sequence[Task],
    most: int,
    send: Callable[[Task], Any],
    ready: Callable[[Sequence[Any]], Iterable[tuple[Any, Mapping[str, bytes] | Failed | str]]],
) -> Answers:
    """The answers to tasks, of which `most` are under way at a time, as they come.

    `send` starts one and gives what stands for it, `ready` waits for some of these and says what each came to: text is
    how its process died. Such a task is run again, and after `MOST_ATTEMPTS` the answer is that it failed.
    """
    waiting, deaths, answers = deque(tasks), Counter[str](), list[Answer]()
    running: dict[Any, tuple[Task, float]] = {}
    while waiting or running:
        while waiting and len(running) < most:
            task = waiting.popleft()
            running[send(task)] = task, time.monotonic()
        yield from answers  # once others are under way: work does not wait for the disk
        answers = []
        for reference, result in ready([*running]):
            task, sent_at = running.pop(reference)
            if isinstance(result, str):
                deaths[task.point.name] += 1
                if deaths[task.point.name] < MOST_ATTEMPTS:
                    waiting.append(task)
                    continue
                result = Failed(f"{result}, {deaths[task.point.name]} times")
            answers.append(Answer(task, result, time.monotonic() - sent_at))
    yield from answers


def run_locally(tasks: Sequence[Task], workers: int) -> Answers:
    """`carried_out` in so many processes, which end when the iterator is closed.

    A worker of a `multiprocessing.Pool` may start none: there the tasks run in this process, one after the other.
    Raises `RlsimError` if processes cannot be started.
    """
    if multiprocessing.current_process().daemon:
        yield from carried_out(tasks, 1, lambda task: partial(task.run), lambda these: [(one, one()) for one in these])
        return
    new = partial(pool_of, 1, max_tasks_per_child=POINTS_OF_A_WORKER)
    idle = [new() for _ in range(min(workers, len(tasks)))]
    busy: dict[Future[Any], ProcessPoolExecutor] = {}

    def send(task: Task) -> Future[Any]:
        pool = idle.pop()
        busy[future := pool.submit(task.run)] = pool
        return future

    def ready(futures: Sequence[Future[Any]]) -> Iterator[tuple[Future[Any], Mapping[str, bytes] | Failed | str]]:
        for future in wait(futures, return_when=FIRST_COMPLETED).done:
            pool = busy.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                pool, result = new(), "its worker process died (out of memory?)"
            idle.append(pool)
            yield future, result

    try:
        _check_start(idle)
        yield from carried_out(tasks, len(idle), send, ready)
    finally:
        for own in (*idle, *busy.values()):
            end(own)


def _check_start(pools: Sequence[ProcessPoolExecutor]) -> None:
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
