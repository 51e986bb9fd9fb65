"""The long run: `python -m tests.fuzz --cases 100000 --seed 1`; docs/fuzzing.md."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests import fuzz  # noqa: F401  # makes `fuzz` importable, as pytest has it

from fuzz.case import Case, Failure, run_case  # isort: skip
from fuzz.targets import TARGETS  # isort: skip
from fuzz.worker import fast, work  # isort: skip

BLOCK = 2000  # cases of one process


def main() -> int:
    """Run the cases, print what came of them; 1 if any failed that is not known."""
    options = _options()
    if options.case is not None:
        return _again(options)
    chosen = options.target or list(TARGETS)
    shares = sum(TARGETS[name].share for name in chosen)
    counts: dict[str, Counter[str]] = {name: Counter() for name in chosen}
    seen: Counter[str] = Counter()
    begun = time.monotonic()
    totals = {name: max(1, round(options.cases * TARGETS[name].share / shares)) for name in chosen}
    blocks = [(start / total, name, start) for name, total in totals.items() for start in range(0, total, BLOCK)]
    try:
        for _, name, start in sorted(blocks):  # all targets at the same rate, so that a run that is cut covers all
            _block(name, options, start, min(BLOCK, totals[name] - start), counts[name], seen)
            _say(f"{time.monotonic() - begun:7.0f} s  {name}: {dict(counts[name])}")
    except KeyboardInterrupt:
        _say("interrupted")
    _table(counts, seen)
    return 1 if any(found["failed"] for found in counts.values()) else 0


def _block(
    name: str, options: argparse.Namespace, start: int, count: int, counts: Counter[str], seen: Counter[str]
) -> None:
    """Cases in a process of their own; one that dies is followed by another, behind the case that it died of."""
    spawned = multiprocessing.get_context("spawn")
    while count > 0:
        here, there = spawned.Pipe(duplex=False)
        worker = spawned.Process(target=work, args=(name, options.seed, start, count, str(options.save), there))
        worker.start()
        there.close()
        done = 0
        while (told := _told(here)) is not None:
            outcome, signature, path = told
            done += 1
            counts[outcome] += 1
            if signature:
                seen[f"{outcome} {name}: {signature}"] += 1
                if seen[f"{outcome} {name}: {signature}"] == 1:
                    _say(f"{outcome} {name}: {signature}\n  saved in {path}")
        worker.join()
        start, count = start + done, count - done
        if count > 0:
            counts["failed"] += 1
            seen[f"failed {name}: the process ended with {worker.exitcode}"] += 1
            _say(f"failed {name}: case {start} ended the process ({worker.exitcode})")
            start, count = start + 1, count - 1


def _told(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _again(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=fast()) as folder:
        found = run_case(Case.drawn(TARGETS[options.target[0]], options.seed, options.case), Path(folder) / "case")
    _say(f"{found.what}\nat {found.where}\n{found.story}" if isinstance(found, Failure) else found)
    return 1 if isinstance(found, Failure) else 0


def _table(counts: dict[str, Counter[str]], seen: Counter[str]) -> None:
    columns = ("accepted", "refused", "known", "failed")
    _say("\n" + "target".ljust(20) + "".join(name.rjust(10) for name in ("cases", *columns)))
    for name, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        _say(name.ljust(20) + "".join(f"{n:10,}" for n in (found.total(), *(found[c] for c in columns))))
    for signature, times in seen.most_common():
        _say(f"{times:8,} × {signature}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="cases over all targets")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; repeatable")
    parser.add_argument("--case", type=int, help="repeat this case of --target")
    parser.add_argument("--save", type=Path, default=Path("fuzz-failures"), help="folder for failing inputs")
    options = parser.parse_args()
    if options.case is not None and len(options.target or ()) != 1:
        parser.error("--case goes with one --target")
    return options


if __name__ == "__main__":
    sys.exit(main())
