"""Runs tests against mutants: each in a process of its own, in a copy of the tree."""

from __future__ import annotations

import multiprocessing
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import hypothesis
import pytest

from mutation.coverage_map import PYTEST

Outcome = Literal["killed", "timed out", "survived"]

MEMORY_BYTES = 6 << 30
REWRITTEN = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plug-ins imported beforehand
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # an example that fails need not be small
QUICK = "tests/test_pipeline.py"  # passes within a second, if anything does
LIBRARIES = [
    "pytest",
    "hypothesis.strategies",
    "typer.testing",
    "rich.table",
    "ruamel.yaml",
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "simpy",
    "pydantic",
    "altair",
]


class Job(NamedTuple):
    """A file with a fault in it, the tests that it meets, and the processor seconds that they may take."""

    key: str
    path: str
    code: str
    tests: Sequence[str]
    limit_s: float


def run(root: Path, jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Outcome]]:
    """What came of each job, in the order in which they end."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is there
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(LIBRARIES)
    with _copies(root, processes) as copies, ThreadPoolExecutor(processes) as threads:

        def one(job: Job) -> tuple[Job, Outcome]:
            tree = copies.get()
            try:
                return job, _meet(forks.Process, tree, job)
            finally:
                copies.put(tree)

        if not jobs:
            return
        fault_free = Job("none", jobs[0].path, (root / jobs[0].path).read_text(), [QUICK], 60.0)
        if one(fault_free)[1] != "survived":
            raise RuntimeError("the tests fail without any fault too")
        futures = [threads.submit(one, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _copies(root: Path, count: int) -> Iterator[queue.Queue[Path]]:
    """Copies of all files that git knows or does not ignore, compiled, so that only the mutated one is stale."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        for number in range(count):
            tree = Path(scratch) / str(number)
            for name in filter(lambda name: (root / name).is_file(), listed):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name)
            for compiled in chain((root / "rlsim").rglob("__pycache__"), (root / "tests").rglob("__pycache__")):
                shutil.copytree(compiled, tree / compiled.relative_to(root))
            trees.put(tree)
        yield trees


def _meet(process: Callable[..., multiprocessing.process.BaseProcess], tree: Path, job: Job) -> Outcome:
    """Put the fault in, run the tests, take it out. Where no test runs the line, nothing can notice."""
    if not job.tests:
        return "survived"
    target = tree / job.path
    code, times = target.read_bytes(), target.stat()
    try:
        target.write_text(job.code)
        os.utime(target, (1, 1))  # its compiled file is of another moment, even if the size is the same
        child = process(target=_tests, args=(str(tree), list(job.tests), job.limit_s))
        child.start()
        child.join(20 * job.limit_s)  # of a test that sleeps; the machine may be busy
        late = child.is_alive()
        if child.pid:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what tests have started goes with them
        child.join()
    finally:
        target.write_bytes(code)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    if late or child.exitcode == -signal.SIGXCPU:
        return "timed out"
    return "survived" if child.exitcode == pytest.ExitCode.OK else "killed"


def _tests(tree: str, tests: list[str], limit_s: float) -> None:
    """In the child: these tests of `tree`, until one fails."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = tree
    os.chdir(tree)
    sys.path[:] = [tree, *(entry for entry in sys.path if Path(entry).name != "tests")]
    for name in [name for name in sys.modules if name.partition(".")[0] in {"rlsim", "mutation"}]:
        del sys.modules[name]
    # A busy machine is no fault, and the same examples come every time.
    hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, database=None, phases=PHASES)
    hypothesis.settings.load_profile("mutation")
    os._exit(pytest.main([*PYTEST, *REWRITTEN, *tests]))
