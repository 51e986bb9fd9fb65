"""Processes that work for this one: started anew, deaf to interrupts, and gone when it is."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from rlsim.errors import RlsimError


class TimeLimitError(BaseException):
    """What was given a limit of time has passed it. Like an interrupt, it is no one's to handle but the giver's."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pool_of(workers: int, **more: Any) -> ProcessPoolExecutor:
    """So many processes."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, **more)


def end(one: ProcessPoolExecutor) -> None:
    """End the processes of a pool, whatever they are at."""
    for process in [*(one._processes or {}).values()]:  # they have nothing to tidy up
        process.kill()
    one.shutdown(wait=False, cancel_futures=True)


@contextmanager
def ending(one: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """A pool that ends with the block; raises `RlsimError` if one of its processes dies."""
    try:
        yield one
    except BrokenProcessPool:
        raise RlsimError(
            "a worker process did not start or was killed (no memory left?): try one worker; a script that asks for "
            "more does so under `if __name__ == '__main__':`"
        ) from None
    finally:
        end(one)


@contextmanager
def at_most(time_s: float) -> Iterator[None]:
    """A block that takes so many seconds at most; raises `TimeLimitError` then. No limit in threads and on Windows."""
    limited = time_s < math.inf and hasattr(signal, "setitimer")
    if not limited or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TimeLimitError(f"it took over {time_s:.3g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(time_s, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _begin() -> None:
    """In a worker: interrupts are for the parent to handle, and it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
