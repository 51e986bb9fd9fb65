"""Sweeps: 200 points on two workers against one, and killed ten times at random moments.

    python benchmarks/sweep.py            # about five minutes on two cores
    python benchmarks/sweep.py --quick    # 20 points, three kills
    python benchmarks/sweep.py --ray      # also on a Ray that is started here: the same bytes?

`ratio` is wall time of the whole command with one worker over that with two. A machine that has other work gives less,
so `bare_ratio` says what two processes that only count gain over one, just before. `equal_after_kills`: the command is
started, and its process group killed (SIGKILL) at random moments, until it has been killed ten times; then it runs to
its end, and every result file is compared byte for byte with the uninterrupted sweep. The last line of output is JSON.
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
from pathlib import Path
from typing import Any

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


def killed(arguments: list[str], out: Path, kills: int, whole_s: float, seed: int) -> list[float]:
    """Start the command and kill its process group after a random time, so many times; these times (s).

    A sweep that is done before it was killed often enough begins again, with shorter times.
    """
    rng = random.Random(seed)
    most_s = 2 * whole_s / kills
    moments: list[float] = []
    while len(moments) < kills:
        wait_s = rng.uniform(0, most_s)
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(timeout=wait_s)
            shutil.rmtree(out)
            moments, most_s = [], most_s / 2
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            moments.append(wait_s)
    return moments


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the log and the lock."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in ("log.jsonl", ".lock"))
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description="Sweeps: two workers against one, and killed.")
    parser.add_argument("--quick", action="store_true", help="20 points, three kills")
    parser.add_argument("--ray", action="store_true", help="also on a Ray started here")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    arguments = parser.parse_args()
    points, kills = (20, 3) if arguments.quick else (200, 10)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "benchmark.yaml"
        file.write_text(json.dumps(definition(points)), encoding="utf-8")
        result: dict[str, Any] = {"points": points, "bare_ratio": bare_ratio()}
        result["two_workers_s"] = timed(command(file, folder / "two", "--workers", "2"))
        result["one_worker_s"] = timed(command(file, folder / "one", "--workers", "1"))
        result["ratio"] = result["one_worker_s"] / result["two_workers_s"]
        whole = contents(folder / "two")
        result["equal_one_and_two"] = contents(folder / "one") == whole
        torn = command(file, folder / "torn", "--workers", "2")
        moments = killed(torn, folder / "torn", kills, result["two_workers_s"], arguments.seed)
        timed(torn)
        result["killed_after_s"] = [round(moment, 2) for moment in moments]
        result["equal_after_kills"] = contents(folder / "torn") == whole
        log = (folder / "torn" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        result["runs_of_points"] = len(log)
        if arguments.ray:
            result["ray_s"] = timed(command(file, folder / "ray", "--executor", "ray", "--workers", "2"))
            result["equal_ray"] = contents(folder / "ray") == whole
    result = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    for name, value in result.items():
        print(f"{name:>18}  {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
