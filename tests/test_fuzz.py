"""Damaged input of every kind through the commands that read it.

A case is a seed (files as a user would have them), a few mutations of one of the files, and a target that feeds them to
the code that a command runs. It passes if the target succeeds with sane results or raises `RlsimError`, within the time
limit, and if no file that was there before is changed or gone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from fuzz.mutate import mutated
from fuzz.seeds import Seed
from fuzz.targets import TARGETS

from rlsim.errors import RlsimError

#: Of a long run: how many cases of all targets, in blocks of `BLOCK` a test, and the seed of everything.
CASES, RUN, BLOCK = int(os.environ.get("FUZZ_CASES", "0")), int(os.environ.get("FUZZ_SEED", "0")), 500
#: In the short run, few of those that take long.
SLOW = {"report": 1, "report-sweep": 1, "run": 6, "calibration": 3, "trace-generate": 2, "init": 3, "sweep": 4}
MOST_SEEDS = 3
LIMIT_S = 20.0  # of processor time; five times as long by the clock, as the machine may have other work
#: What lies around a case's inputs and must be there afterwards.
PRECIOUS = {"keep.txt": b"mine\n", "inputs/.keep": b"mine too\n", "work/keep.json": b'{"mine": true}\n'}


class HangError(BaseException):
    """A case took longer than it may; no `Exception`, so that nothing on the way takes it for its own."""


def outcome(name: str, seed: Seed, inputs: Mapping[str, bytes], scratch: Path, rng: random.Random) -> str:
    """ "accepted" or "refused" by the target, or else what went wrong and where."""
    shutil.rmtree(scratch, ignore_errors=True)
    before = {
        scratch / path: data for path, data in {**{f"inputs/{n}": d for n, d in inputs.items()}, **PRECIOUS}.items()
    }
    for path, data in before.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    found = "accepted"
    try:
        with at_home(scratch / "work"), limited(LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TARGETS[name].run(scratch / "inputs" / seed.main, seed, rng)
    except RlsimError as error:
        found = "refused" if str(error).strip() else "an error without a message"
    except (Exception, SystemExit, HangError):
        return traceback.format_exc(limit=-12)[-6000:]
    lost = [str(path) for path, data in before.items() if not path.is_file() or path.read_bytes() != data]
    return f"changed or deleted: {lost}" if lost else found


@contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Within `folder`; what a command adds to `sys.path` goes again."""
    back, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(back)
        sys.path[:] = path


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises `HangError` in what runs longer."""

    def late(*_: object) -> None:
        raise HangError

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, limit_s), (signal.SIGALRM, signal.ITIMER_REAL, 5 * limit_s))
    before = [signal.signal(number, late) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted(name: str, tmp_path: Path) -> None:
    """Else mutations of them would show nothing."""
    seeds = TARGETS[name].seeds()
    for seed in seeds[:: -(-len(seeds) // MOST_SEEDS)]:
        found = outcome(name, seed, seed.files, tmp_path / "case", random.Random("0/0/run"))
        assert found == "accepted", f"{seed.name}: {found}"


def blocks() -> Iterator[tuple[str, range]]:
    shares = sum(target.share for target in TARGETS.values())
    for name, target in TARGETS.items():
        short = SLOW.get(name, max(4, round(3 * target.share)))
        count = max(1, round(CASES * target.share / shares)) if CASES else short
        yield from ((name, range(start, min(start + BLOCK, count))) for start in range(0, count, BLOCK))


@pytest.mark.parametrize(("name", "indices"), [*blocks()], ids=lambda value: str(getattr(value, "start", value)))
def test_mutated_inputs_are_refused_or_give_sane_results(name: str, indices: range, tmp_path: Path) -> None:
    """A case follows from the run's seed, the target and its number alone; inputs of those that fail are kept."""
    seeds, wrong = TARGETS[name].seeds(), {}
    others = [data for seed in seeds[:40] for data in seed.files.values()][:40]
    for index in indices:
        rng = random.Random(f"{RUN}/{name}/{index}")
        seed = rng.choice(seeds)
        file = rng.choice([path for path in seed.files if path not in seed.fixed])
        inputs = {**seed.files, file: mutated(file, seed.files[file], rng, others)}
        found = outcome(name, seed, inputs, tmp_path / str(index), rng)
        if found in ("accepted", "refused"):
            shutil.rmtree(tmp_path / str(index))
        else:
            wrong.setdefault(found[-200:], f"case {index}, {file} of {seed.name!r}: {found}")  # of each kind one
    assert not wrong, "\n\n".join(wrong.values())
