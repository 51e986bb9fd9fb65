"""Sweeps: 200 points on two workers against one; or attacked.

    python benchmarks/sweep.py            # about five minutes on two cores
    python benchmarks/sweep.py --quick    # 20 points
    python benchmarks/sweep.py --attacks  # a small sweep: 100 kills, 15 full disks, 30 damaged files; 15 minutes

`ratio` is wall time of the whole command with one worker over that with two. A machine that has other work gives less,
so `bare_ratio` says what two processes that only count gain over one, just before. The last line of output is JSON.

An attack is one of these, on a sweep of ten small points; after each the same command is run again:

- kill: SIGKILL for all of its processes at a random moment of its life;
- full disk: it has a file system of its own of too few bytes (Linux, as root), or no file may grow beyond a random size
  (elsewhere), and then is given room;
- damage: in a finished sweep a bit of a random file is flipped, or the file is cut short, removed, or has the same file
  of another point copied over it.

`lost`: a point that was done is not any more after a kill or a full disk. `misread`: reading gave other rows than those
of the undisturbed sweep, without an error; `unequal`: when the command had run again, a byte of a result file differed
from the undisturbed sweep's. `untold`: the command on a full disk did not end in one line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from scale import shown

import rlsim
from rlsim.errors import ConfigError, RlsimError
from rlsim.results.sweeps.store import LOG, read_sweep

CAPS, PROMPTS = range(512, 2_560, 102), range(6, 16)
COUNT = "sum(i * i for i in range(20_000_000))"


def definition(points: int) -> dict[str, Any]:
    """A sweep of so many points, each a fraction of a second of work."""
    caps = list(CAPS)[: max(points // len(PROMPTS), 1)]
    changes = {"workflow.steps": 2, "seeds": 2, "systems": [{"verl": {"tp": [1, 2, 4, 8, "best"]}}, "pat"]}
    axes = [{"grid": {"trace.cap": caps, "workflow.prompts": list(PROMPTS)}}]
    return {"name": "benchmark", "experiment": "pat_vs_static", "set": changes, "axes": axes}


def command(file: Path, out: Path, *options: str) -> list[str]:
    """The sweep as a user runs it."""
    return [sys.executable, "-m", "rlsim", "sweep", str(file), "--out", str(out), "--quiet", *options]


def timed(arguments: list[str]) -> float:
    """Wall seconds of a command."""
    start = time.perf_counter()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def bare_ratio() -> float:
    """What a second process gains where nothing is shared: twice the time of one over the time of two at once."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", COUNT], check=True)
    one_s = time.perf_counter() - start
    start = time.perf_counter()
    both = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(2)]
    for process in both:
        process.wait()
    return 2 * one_s / (time.perf_counter() - start)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the log and the lock."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != LOG)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


class Attacked:
    """A sweep that is attacked: its command, its directory, the undisturbed sweep, and what was found so far."""

    TABLES = ("steps", "calls", "summary")

    def __init__(self, folder: Path, rng: random.Random) -> None:
        experiment = {
            "name": "tiny", "cluster": "8xh100", "model": "llama-3.1-8b", "calibration": "h100-vllm",
            "trace": {"path": "rollpacker-math", "cap": 512}, "systems": [{"verl": {"tp": 8}}], "seeds": 1,
            "workflow": {"prompts": 2, "responses": 2, "steps": 1},
        }  # fmt: skip
        axes = [{"grid": {"trace.cap": [100, 200, 300, 400, 500], "workflow.prompts": [1, 2]}}]
        self.file = folder / "attacked.yaml"
        self.file.write_text(json.dumps({"name": "attacked", "experiment": experiment, "axes": axes}), encoding="utf-8")
        self.rng, self.found = rng, Counter[str]()
        self.whole, self.out = folder / "whole", folder / "attacked"
        self.whole_s = timed(command(self.file, self.whole, "--workers", "2"))
        self.bytes, self.frames = contents(self.whole), self.read(self.whole)

    def read(self, directory: Path) -> dict[str, pd.DataFrame]:
        """Everything that rlsim reads of a sweep; raises `ConfigError` for a damaged one."""
        sweep = read_sweep(directory)
        for point in sweep.points[sweep.points["status"] == "done"]["point"]:
            sweep.record(point)
        return {table: sweep.table(table) for table in self.TABLES}

    def check_read(self) -> None:
        """What is read now is a part of the undisturbed sweep, or there is an error."""
        try:
            found = self.read(self.out)
        except ConfigError:
            self.found["told_to_readers"] += 1
            return
        for table, rows in found.items():
            expected = self.frames[table][self.frames[table]["point"].isin(rows["point"])]
            if len(rows) and not rows.equals(expected.reset_index(drop=True)):
                self.found["misread"] += 1

    def go_on(self) -> None:
        """The same sweep again; then all bytes are those of the undisturbed sweep."""
        try:
            rlsim.sweep(self.file, out=self.out, workers=1)
            error = ""
        except RlsimError as problem:
            error = str(problem)
        if error or contents(self.out) != self.bytes:
            self.found["unequal"] += 1
            print(f"not as undisturbed: {error}", file=sys.stderr)

    def done(self) -> set[str]:
        """The points that are done."""
        return {path.name for path in self.out.glob("done/*.json")}

    def tell(self) -> None:
        """What was found so far, on standard error."""
        print(dict(self.found), file=sys.stderr)

    def kill(self) -> None:
        """Kill it once; it goes on from there at the next kill, or to its end now and then."""
        before = self.done()
        process = subprocess.Popen(
            command(self.file, self.out, "--workers", "2"), stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(timeout=self.rng.uniform(0, 1.1 * self.whole_s))
            done = True
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done = False
            self.found["kills"] += 1
        self.found["lost"] += not before <= self.done()
        if (self.out / "sweep.json").exists():
            self.check_read()
        if done or self.rng.random() < 0.1:
            self.go_on()
            shutil.rmtree(self.out)

    def fill_disk(self) -> None:
        """Run it on a disk that is too small, then on one that is not."""
        self.found["full_disks"] += 1
        self.out.mkdir()
        sizes = sorted(map(len, self.bytes.values()))
        mounted = _mount(self.out, f"size={self.rng.randrange(8, sum(-(-size // 4096) * 4 for size in sizes))}k")
        limit = f"ulimit -f {self.rng.randrange(0, sizes[-1] // 1024)} 2>/dev/null; " if not mounted else ""
        try:
            arguments = command(self.file, self.out, "--workers", "2")
            ran = subprocess.run(["bash", "-c", f'{limit}exec "$@"', "-", *arguments], capture_output=True, text=True)
            message = [line for line in ran.stderr.splitlines() if line.startswith("rlsim: ")]
            self.found["untold"] += (ran.returncode, len(message), "Traceback" in ran.stderr) != (2, 1, False)
            before = self.done()
            if (self.out / "sweep.json").exists():
                self.check_read()
            if mounted:
                _mount(self.out, "remount,size=64m")
            self.found["lost"] += not before <= self.done()
            self.go_on()
        finally:
            if mounted:
                subprocess.run(["umount", str(self.out)], check=True)
            shutil.rmtree(self.out)

    def damage(self) -> None:
        """Damage one file of the finished sweep, read it, and let it repair itself."""
        shutil.copytree(self.whole, self.out)
        path = self.out / self.rng.choice(sorted(self.bytes))
        others = [other for other in sorted(path.parent.parent.glob(f"*/{path.name}")) if other != path]
        ways = ["flipped", "flipped", "flipped", "cut", "removed"] + ["copied", "copied"] * (path.suffix == ".parquet")
        way = self.rng.choice(ways)
        data = bytearray(path.read_bytes())
        if way == "flipped":
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
        elif way == "cut":
            path.write_bytes(data[: self.rng.randrange(len(data))])
        elif way == "copied" and others:
            shutil.copyfile(self.rng.choice(others), path)
        else:
            way = "removed"
            path.unlink()
        self.found["damages"] += 1
        self.found[way] += 1
        self.check_read()
        self.go_on()
        shutil.rmtree(self.out)


def _mount(folder: Path, options: str) -> bool:
    """Whether the folder is a small file system in memory now."""
    call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return sys.platform == "linux" and os.geteuid() == 0 and subprocess.run(call, capture_output=True).returncode == 0


def attacks(kills: int, full_disks: int, damages: int, seed: int) -> dict[str, Any]:
    """What was found after so many attacks."""
    with tempfile.TemporaryDirectory() as scratch:
        attacked = Attacked(Path(scratch), random.Random(seed))
        while attacked.found["kills"] < kills:
            attacked.kill()
            attacked.tell()
        if attacked.out.exists():
            attacked.go_on()
            shutil.rmtree(attacked.out)
        for attack, times in ((attacked.fill_disk, full_disks), (attacked.damage, damages)):
            for _ in range(times):
                attack()
                attacked.tell()
        return {**dict.fromkeys(("lost", "misread", "unequal", "untold"), 0), **attacked.found}


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description="Sweeps: two workers against one, or attacked.")
    parser.add_argument("--quick", action="store_true", help="20 points")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks")
    parser.add_argument("--attacks", action="store_true", help="instead: kills, full disks and damaged files")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--full-disks", type=int, default=15)
    parser.add_argument("--damages", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.attacks:
        shown(attacks(arguments.kills, arguments.full_disks, arguments.damages, arguments.seed))
        return
    points = 20 if arguments.quick else 200
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "benchmark.yaml"
        file.write_text(json.dumps(definition(points)), encoding="utf-8")
        result: dict[str, Any] = {"points": points, "bare_ratio": bare_ratio()}
        result["two_workers_s"] = timed(command(file, folder / "two", "--workers", "2"))
        result["one_worker_s"] = timed(command(file, folder / "one", "--workers", "1"))
        result["ratio"] = result["one_worker_s"] / result["two_workers_s"]
        result["equal_one_and_two"] = contents(folder / "one") == contents(folder / "two")
    shown(result)


if __name__ == "__main__":
    main()
