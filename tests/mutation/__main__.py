"""The long runs: `python -m tests.mutation map`, then `sample`, `named`, `page`; docs/mutation.md."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests import mutation  # noqa: F401  # makes `mutation` importable, as pytest has it

from mutation.coverage_map import ELSEWHERE, map_file  # isort: skip
from mutation.mutants import difference, mutated, places, sample, statement  # isort: skip
from mutation.named import FAULTS  # isort: skip
from mutation.page import rewrite  # isort: skip
from mutation.run import Job, run  # isort: skip
from mutation.which_tests import CoveringTests  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "results" / "mutation"  # git ignores it
PAGE = ROOT / "docs" / "mutation.md"


def main() -> int:
    """Carry out a command; 1 if a named fault went unnoticed."""
    options = _options()
    if options.command in ("sample", "named") and (changed := _changed()):
        sys.exit(f"changed since they were mapped: run `python -m tests.mutation map {' '.join(changed)}`")
    match options.command:
        case "map":
            _map(options.files)
        case "sample":
            jobs = list(_sampled(options))
            _meet(jobs, SCRATCH / f"sample-{options.seed}.jsonl", options)
        case "named":
            records = _meet(list(_named(options.seconds)), SCRATCH / "named.jsonl", options)
            return int(any(record["outcome"] == "survived" for record in records))
        case "page":
            samples = {path.stem.partition("-")[2]: _read(path) for path in sorted(SCRATCH.glob("sample-*.jsonl"))}
            rewrite(PAGE, samples, _read(SCRATCH / "named.jsonl"))
    return 0


def _map(files: Iterable[Path]) -> None:
    """Map the files of tests that are not mapped yet, each in a process of its own."""
    (SCRATCH / "map").mkdir(parents=True, exist_ok=True)
    for path in files or sorted((ROOT / "tests").glob("test_*.py")):
        out = SCRATCH / "map" / f"{path.stem}.json"
        if path.name in ELSEWHERE or (out.exists() and not files):
            continue
        name = str(path.resolve().relative_to(ROOT))
        process = multiprocessing.get_context("spawn").Process(target=map_file, args=(name, str(ROOT), str(out)))
        process.start()
        process.join()


def _changed() -> list[str]:
    """Files of tests that are younger than their map, which may name tests that are not there any more."""
    mapped = [(ROOT / "tests" / f"{path.stem}.py", path) for path in sorted((SCRATCH / "map").glob("*.json"))]
    return [f"tests/{test.name}" for test, path in mapped if test.stat().st_mtime > path.stat().st_mtime]


def _sampled(options: argparse.Namespace) -> Iterator[tuple[Job, dict[str, Any]]]:
    tests = CoveringTests(SCRATCH / "map")
    for mutant in sample(places(ROOT), options.size, options.seed):
        code = (ROOT / mutant.path).read_text()
        job = _job(tests, mutant.key, mutant.path, mutant.start[0], code, mutated(code, mutant), options.seconds)
        yield job, {"line": mutant.start[0], "operator": mutant.operator.partition("/")[2]}


def _named(most_s: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    tests = CoveringTests(SCRATCH / "map")
    for fault in FAULTS:
        new, line = fault.code(ROOT)
        key = f"{fault.topic}: {fault.what}"
        job = _job(tests, key, fault.path, line, (ROOT / fault.path).read_text(), new, most_s)
        yield job, {"line": line, "topic": fault.topic, "what": fault.what}


def _job(tests: CoveringTests, key: str, path: str, line: int, old: str, new: str, most_s: float) -> Job:
    chosen, seconds = tests.of(path, statement(old, line), most_s)
    return Job(key, path, new, chosen, 30.0 + 3.0 * seconds)


def _meet(jobs: list[tuple[Job, dict[str, Any]]], results: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what has no result yet (or, `again`, what survived), and add to the file of results as each ends."""
    known = {record["key"]: record["outcome"] for record in _read(results)}
    about = {job.key: more for job, more in jobs}
    left = [job for job, _ in jobs if known.get(job.key) in ((None, "survived") if options.again else (None,))]
    _say(f"{len(jobs)} faults, {len(left)} to run; results in {results}")
    begun, results_file = time.monotonic(), results.open("a")
    with results_file:
        for number, (job, outcome) in enumerate(run(ROOT, left, options.processes), 1):
            changed = difference((ROOT / job.path).read_text(), job.code)
            record = {"key": job.key, "path": job.path, **about[job.key], "outcome": outcome, "diff": changed}
            results_file.write(json.dumps({**record, "tests": len(job.tests)}) + "\n")
            results_file.flush()
            _say(f"{time.monotonic() - begun:6.0f} s  {number}/{len(left)} {outcome}: {job.key}")
    return _read(results)


def _read(path: Path) -> list[dict[str, Any]]:
    """The results of a file, the last of each fault, with its first outcome as `before`."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        before = found.get(record["key"], record)
        found[record["key"]] = {**record, "before": before.get("before", before["outcome"])}
    return list(found.values())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="which test runs which line; files of tests not mapped yet")
    mapping.add_argument("files", nargs="*", type=Path, help="these, even if they are mapped")
    drawn = commands.add_parser("sample", help="mutants drawn at random; goes on where it was interrupted")
    drawn.add_argument("--size", type=int, default=300, help="places in the code")
    drawn.add_argument("--seed", type=int, default=1)
    for command in (drawn, commands.add_parser("named", help="the faults of mutation.named")):
        command.add_argument("--processes", type=int, default=2)
        command.add_argument("--seconds", type=float, default=20, help="of tests that a mutant meets at most")
        command.add_argument("--again", action="store_true", help="what survived once more")
    commands.add_parser("page", help="the results into docs/mutation.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
