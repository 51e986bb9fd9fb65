"""How fast a run becomes a timeline: slices a second on one core, and the memory that it takes.

    python benchmarks/timeline.py            # 64 GPUs, 12 steps of 4,096 responses under PAT
    python benchmarks/timeline.py --quick    # 2 steps of 128

A third as many steps show how memory grows with them. CPU times of this process, the least of the repeats.
The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scale import peak_mb, shown

import rlsim

PAT: dict[str, Any] = {
    "name": "timeline",
    "cluster": "8x8xh100",
    "model": "llama-3.1-8b",
    "calibration": "h100-vllm",
    "trace": {"path": "deepscaler-llama-3.1-8b", "cap": "24K"},
    "workflow": {"algorithm": "grpo", "prompts": 512, "responses": 8, "steps": 12},
    "systems": ["pat"],
    "seeds": 1,
}


def in_fresh_process(*arguments: str) -> str:
    """What this script prints with these arguments. On Linux a child's peak includes its parent's: keep that small."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description="How fast a run becomes a timeline.")
    parser.add_argument("--quick", action="store_true", help="few steps, for CI")
    parser.add_argument("--repeats", type=int, default=5, help="the least time of so many (5)")
    parser.add_argument("--simulate", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--peak-memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prompts = 16 if arguments.quick else 512
    if arguments.simulate:
        out, count = arguments.simulate
        size = {"workflow.steps": int(count), "workflow.prompts": prompts, "certainty": 0}
        rlsim.run(PAT, seeds=1, overrides=size, out=out)
        return
    if arguments.peak_memory:
        rlsim.write_timeline(*arguments.peak_memory)
        print(peak_mb())
        return
    steps = 2 if arguments.quick else 12
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = max(steps // 3, 1)
        for results, count in (("all", steps), ("few", few)):
            in_fresh_process("--simulate", str(folder / results), str(count), *(["--quick"] if arguments.quick else []))
        out = str(folder / "peak.json")
        whole_mb, few_mb = (float(in_fresh_process("--peak-memory", str(folder / n), out)) for n in ("all", "few"))
        took = {}
        for suffix in (".json", ".json.gz"):
            times = []
            for _ in range(arguments.repeats):
                start = time.process_time()
                timeline = rlsim.write_timeline(folder / "all", folder / f"timeline{suffix}")
                times.append(time.process_time() - start)
            took[suffix] = min(times)
        size_mb, gz_mb = ((folder / f"timeline{suffix}").stat().st_size / 1e6 for suffix in took)
    slices, seconds = timeline.slices, took[".json"]
    result = {
        "slices": slices,
        "events": slices + timeline.samples + 2 * timeline.arrows,
        "timeline_s": seconds,
        "slices_per_s": slices / seconds,
        "events_per_s": (slices + timeline.samples + 2 * timeline.arrows) / seconds,
        "gz_slices_per_s": slices / took[".json.gz"],
        "size_mb": size_mb,
        "gz_size_mb": gz_mb,
        "peak_mb": whole_mb,
        "peak_mb_third_of_steps": few_mb,
    }
    shown(result)


if __name__ == "__main__":
    main()
