"""What asynchrony costs to simulate: 512 x 16 responses a step on 128 GPUs, half of them for generation, to tables.

    python benchmarks/asynchronous.py             # 10, 20 and 40 steps, each system: two minutes
    python benchmarks/asynchronous.py --quick     # 32 x 8 responses, 2 and 4 steps

The last line of output is a list of {"system", "steps", "cpu_s", "peak_mb"}; each entry is a process of its own on one
core. Memory holds the result tables of all steps; what the engine holds does not grow (tests/test_continuous.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

SPLIT, TP2 = {"split": {"rollout": 0.5}}, {"verl": {"tp": 2}}
SYSTEMS: dict[str, list[Any]] = {
    "synchronous": [SPLIT, TP2],
    "verl_fully_async": [{"verl_fully_async": {"tp": 2, "trigger_parameter_sync_step": 4}}],
    "areal": [{"areal": {"tp": 2, "eta": 2}}],
}
FULL, QUICK = (10, 20, 40), (2, 4)


def run(system: str, steps: int, quick: bool) -> None:
    """Simulate so many steps in this process and print what it took."""
    import rlsim

    start = time.process_time()
    prompts, responses = (32, 8) if quick else (512, 16)
    rlsim.run(
        {
            "name": "asynchronous",
            "cluster": "16x8xh100",
            "model": "qwen2.5-7b",
            "calibration": "h100-vllm",
            "trace": {"path": "deepscaler-llama-3.1-8b", "cap": "16K"},
            "workflow": {
                "prompts": prompts, "responses": responses, "steps": steps, "reference": False, "old_log_probs": False,
                "reward": {"workers": 256},
            },
            "training": {"mini_batches": 4},
            "seeds": 1,
            "systems": [{"name": system, "use": SYSTEMS[system]}],
        }
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    cpu_s = round(time.process_time() - start, 2)
    print(json.dumps({"system": system, "steps": steps, "cpu_s": cpu_s, "peak_mb": round(peak)}))


def main() -> None:
    """Run every point in a process of its own."""
    parser = argparse.ArgumentParser(description="What asynchrony costs to simulate.")
    parser.add_argument("--quick", action="store_true", help="few responses and steps")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        run(given.point[0], int(given.point[1]), given.quick)
        return
    results: list[dict[str, Any]] = []
    for steps in QUICK if given.quick else FULL:
        for system in SYSTEMS:
            point = [sys.executable, __file__, "--point", system, str(steps), *["--quick"] * given.quick]
            results.append(json.loads(subprocess.run(point, check=True, capture_output=True, text=True).stdout))
            took = results[-1]
            over = took["cpu_s"] / next(r["cpu_s"] for r in results if r["steps"] == steps)
            print(
                f"{system:18} {steps:3} steps {took['cpu_s']:6.1f} s ({over:.1f}x) {took['peak_mb']:6,} MB", flush=True
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
