"""One case: a seed, mutated, through a target, under the conditions that every case has to meet."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from fuzz.checks import NonsenseError
from fuzz.known import known
from fuzz.mutate import Mutation, mutated, plan
from rlsim.errors import RlsimError

LIMIT_S = 20.0  # of processor time
BUSY = 5  # times as long by the clock: the machine may have other work
#: What lies around a case's inputs and must be there afterwards.
PRECIOUS = {"keep.txt": b"mine\n", "inputs/.keep": b"mine too\n", "work/keep.json": b'{"mine": true}\n'}
Outcome = Literal["accepted", "refused"]


@dataclass(frozen=True)
class Seed:
    """Files as a user would have them, by path; `main` is the file or folder that a command is given.

    `options` go with the command. `fixed` are files that stay as they are.
    """

    name: str
    files: Mapping[str, bytes]
    main: str
    options: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def changeable(self) -> list[str]:
        """The files that may be mutated."""
        return [name for name in self.files if name not in self.fixed]


@dataclass(frozen=True)
class Target:
    """What reads the files of a seed: `run(main, seed, rng)` in the folder `work`; raises `RlsimError` to refuse them.

    `share` is how many of the cases of a long run it gets, in comparison with the others.
    """

    name: str
    seeds: Callable[[], Sequence[Seed]]
    run: Callable[[Path, Seed, random.Random], None]
    share: float


@dataclass(frozen=True)
class Case:
    """A target's case: a seed, and the mutations of one of its files."""

    target: Target
    run: int
    index: int
    seed: Seed
    file: str
    mutations: tuple[Mutation, ...]

    @classmethod
    def drawn(cls, target: Target, run: int, index: int) -> Case:
        """Case number `index` of the run with the seed `run`: the same whenever it is drawn."""
        rng = random.Random(f"{run}/{target.name}/{index}")
        seed = rng.choice(target.seeds())
        file = rng.choice(seed.changeable)
        return cls(target, run, index, seed, file, plan(file, rng))

    def inputs(self) -> dict[str, bytes]:
        """The files, mutated."""
        others = [data for seed in self.target.seeds()[:40] for data in seed.files.values()][:40]
        data = mutated(self.file, self.seed.files[self.file], self.mutations, others)
        return {**self.seed.files, self.file: data}


@dataclass(frozen=True)
class Failure:
    """A case that broke a condition: which, where in the code, and the whole story."""

    case: Case
    what: str
    where: str
    story: str

    @property
    def signature(self) -> str:
        """Failures with the same one are taken for the same."""
        return f"{self.what.partition(':')[0]} at {self.where}"

    @property
    def known(self) -> bool:
        """Whether it stands in the list of failures that are not mended yet."""
        return known(self.case.target.name, self.signature, self.what)


class HangError(BaseException):
    """A case took longer than it may; no `Exception`, so that nothing on the way takes it for its own."""


def run_case(case: Case, scratch: Path, limit_s: float = LIMIT_S) -> Outcome | Failure:
    """Run a case in the folder `scratch`, which is made anew."""
    shutil.rmtree(scratch, ignore_errors=True)
    for name, data in {**{f"inputs/{n}": d for n, d in case.inputs().items()}, **PRECIOUS}.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    before = _digests(scratch)
    rng = random.Random(f"{case.run}/{case.index}/run")
    try:
        with _at_home(scratch / "work"), _limited(limit_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.target.run(scratch / "inputs" / case.seed.main, case.seed, rng)
        outcome: Outcome = "accepted"
    except RlsimError as error:
        outcome = "refused"
        if not str(error).strip():
            return _failure(case, error, "an error without a message")
    except NonsenseError as error:
        return replace(
            _failure(case, error, f"nonsense accepted: {error}"), where=re.sub(r"[-\d.e+]+", "#", str(error))
        )
    except HangError as error:
        return _failure(case, error, f"longer than {limit_s:g} s")
    except (Exception, SystemExit) as error:
        return _failure(case, error, f"{type(error).__name__}: {error}")
    lost = [name for name, digest in before.items() if _digest(scratch / name) != digest]
    if lost:
        return Failure(case, f"changed or deleted: {', '.join(lost)}", "guard", "")
    return outcome


def minimised(failure: Failure, scratch: Path) -> Failure:
    """The same failure with as few of its mutations as it needs."""
    for one in failure.case.mutations:
        left = tuple(other for other in failure.case.mutations if other is not one)
        fewer = replace(failure.case, mutations=left)
        found = run_case(fewer, scratch) if fewer.mutations else None
        if isinstance(found, Failure) and found.signature == failure.signature:
            failure = found
    return failure


def save(failure: Failure, folder: Path) -> Path:
    """Write the mutated inputs and what happened to a folder of its own in `folder`; returns it."""
    case = failure.case
    name = "".join(c if c.isalnum() else "-" for c in failure.signature)[:80]
    target = folder / f"{case.target.name}-{name}"
    for path, data in case.inputs().items():
        (target / "inputs" / path).parent.mkdir(parents=True, exist_ok=True)
        (target / "inputs" / path).write_bytes(data)
    again = f"python -m tests.fuzz --target {case.target.name} --seed {case.run} --case {case.index}"
    kinds = ", ".join(one.kind for one in case.mutations)
    (target / "case.txt").write_text(
        f"{failure.what}\nat {failure.where}\n\nagain: {again}\nseed: {case.seed.name}, options {case.seed.options}\n"
        f"mutated: {case.file} ({kinds})\n\n{failure.story}",
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    return target


def _failure(case: Case, error: BaseException, what: str) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/rlsim/" in frame.filename and "/tests/" not in frame.filename]
    last = (own or list(frames))[-1]
    where = f"{last.filename.rpartition('/rlsim/')[2]}:{last.lineno} {last.name}" if own else f"{last.name}"
    story = "".join(traceback.format_exception(error, limit=-12))[-6000:]
    return Failure(case, what[:300], where, story)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else "gone"


def _digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _digest(path) for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _at_home(folder: Path) -> Iterator[None]:
    """Within `folder`; what a command adds to `sys.path` goes again."""
    back, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(back)
        sys.path[:] = path


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raises `HangError` in what runs longer."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise HangError

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, limit_s), (signal.SIGALRM, signal.ITIMER_REAL, BUSY * limit_s))
    before = [signal.signal(number, late) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
