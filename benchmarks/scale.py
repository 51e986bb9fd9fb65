"""How time and memory grow with GPUs, responses and steps, from YAML to tables; scale.yaml says of what.

    python benchmarks/scale.py                         # a million responses, a large model, asynchrony: half an hour
    python benchmarks/scale.py --quick                 # few GPUs, some thousands of responses
    python benchmarks/scale.py --only pat --only areal # these systems
    python benchmarks/scale.py --most 100000           # no more responses in a step than that

The last line of output is a list of {"system", "gpus", "responses", "steps", "cpu_s", "peak_mb"}: the responses of all
steps, and what one seed takes in a process of its own on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsim.base.reading import plain, read_yaml

WORKLOADS: dict[str, Mapping[str, Any]] = plain(read_yaml(Path(__file__).with_suffix(".yaml")))


def points(size: str) -> Iterator[tuple[str, str, int, int, int]]:
    """Workload, system, GPUs, prompts and steps of all points, or of the quick ones."""
    for name, workload in WORKLOADS.items():
        for system in workload["systems"]:
            for point in workload[size]:
                yield name, system, *point


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def shown(result: Mapping[str, Any]) -> None:
    """Print figures, and all of them as JSON in the last line."""
    result = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
    for name, value in result.items():
        print(f"{name:>30}  {value}")
    print(json.dumps(result))


def run(name: str, system: str, gpus: int, prompts: int, steps: int) -> None:
    """Simulate a point in this process and print what it took."""
    import rlsim

    workload = WORKLOADS[name]
    changes = dict(workload.get("changes", {}))
    size = {"prompts": prompts, "responses": workload["responses"], "steps": steps}
    changes |= {
        "cluster": f"{gpus // 8}x{workload['nodes']}",
        "baseline": system,
        "systems": [{"name": system, "use": workload["systems"][system]}],
        **{f"workflow.{key}": value for key, value in (changes.pop("workflow", {}) | size).items()},
    }
    start = time.process_time()
    found = rlsim.run(workload["experiment"], seeds=1, overrides=changes)
    point = {"system": system, "gpus": gpus, "responses": len(found.responses), "steps": steps}
    print(json.dumps({**point, "cpu_s": round(time.process_time() - start, 2), "peak_mb": round(peak_mb())}))


def main() -> None:
    """Run every point in a process of its own."""
    parser = argparse.ArgumentParser(description="How time and memory grow.")
    parser.add_argument("--quick", action="store_true", help="few GPUs, few responses")
    parser.add_argument("--only", action="append", metavar="SYSTEM", help="this one")
    parser.add_argument("--most", type=int, help="no more responses in a step than that")
    parser.add_argument("--point", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        name, system, *size = given.point
        run(name, system, *map(int, size))
        return
    results = []
    for point in points("quick" if given.quick else "points"):
        name, system, _, prompts, _ = point
        responses = prompts * WORKLOADS[name]["responses"]
        if system not in (given.only or [system]) or responses > (given.most or responses):
            continue
        command = [sys.executable, __file__, "--point", *map(str, point)]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(
            "{system:16} {gpus:6,} GPUs {responses:9,} responses {cpu_s:8.1f} s {peak_mb:8,} MB".format(**results[-1])
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
