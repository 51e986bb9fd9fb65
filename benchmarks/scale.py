"""How time and memory grow with GPUs and responses: one step of LLaMA-3.1-8B on nodes of 8 H100s, from YAML to tables.

And one large model for a whole run: 20 steps of 4,096 responses of Qwen3-235B-A22B on 256 GPUs, at TP8 under vLLM. On
H200 they fit beside its weights, on H100 responses are preempted all the time.

    python benchmarks/scale.py                    # every system on 1,024 GPUs, and a million responses: half an hour
    python benchmarks/scale.py --quick            # 64 GPUs, some thousands of responses
    python benchmarks/scale.py --system pat       # one system
    python benchmarks/scale.py --most 100000      # no more responses than that

The last line of output is a list of {"system", "gpus", "responses", "cpu_s", "peak_mb"}; each entry is a process of its
own on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

SYSTEMS: dict[str, list[Any]] = {
    "verl": ["verl"],
    "pat": ["pat"],
    "tail_batching": ["verl", "tail_batching"],
    "stream": ["verl", "stream"],
    "rlhfuse": ["rlhfuse"],
    "oppo": ["verl", "overcommit"],
}
LARGE = {f"235b-{gpu}": gpu for gpu in ("h200", "h100")}
LARGE_STEPS = 20
QUICK = [(system, 64, responses) for system in SYSTEMS for responses in (2_048, 4_096)]
QUICK += [(name, 256, 128 * LARGE_STEPS) for name in LARGE]
FULL = [(system, 1_024, responses) for system in SYSTEMS for responses in (12_800, 25_600, 102_400)]
FULL += [("verl", 64, 100_000), ("verl", 64, 1_000_000)]
FULL += [(name, 256, 4_096 * LARGE_STEPS) for name in LARGE]
_TP = {"verl": {"tp": 2}, "rlhfuse": {"tp": 2, "remaining": 0.1}, "pat": {"start_tp": 2}, "overcommit": {"delta": 64}}


def run(system: str, gpus: int, responses: int) -> None:
    """Simulate one step in this process and print what it took."""
    import rlsim

    overrides: dict[str, Any] = {"baseline": system}
    if system in LARGE:
        gpu = LARGE[system]
        overrides |= {
            "cluster": f"{gpus // 8}x8x{gpu}", "model": "qwen3-235b-a22b", "calibration": f"{gpu}-vllm",
            "trace": {"path": "deepscaler-llama-3.1-8b", "cap": "16K"},
            "workflow": {"prompts": responses // LARGE_STEPS // 16, "responses": 16, "steps": LARGE_STEPS},
            "engine": {"max_num_seqs": 512},
            "systems": [{"name": system, "use": [{"verl": {"tp": 8}}]}],
        }  # fmt: skip
    else:
        overrides |= {
            "cluster": f"{gpus // 8}x8xh100",
            "workflow": {"prompts": responses // 8, "responses": 8, "steps": 1},
            "systems": [{"name": system, "use": [{part: _TP.get(part, {})} for part in SYSTEMS[system]]}],
        }
    start = time.process_time()
    rlsim.run("pat_vs_static", seeds=1, overrides=overrides)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    found = {"system": system, "gpus": gpus, "responses": responses}
    print(json.dumps({**found, "cpu_s": round(time.process_time() - start, 2), "peak_mb": round(peak)}))


def main() -> None:
    """Run every point in a process of its own."""
    parser = argparse.ArgumentParser(description="How time and memory grow.")
    parser.add_argument("--quick", action="store_true", help="few GPUs, few responses")
    parser.add_argument("--system", choices=[*SYSTEMS, *LARGE], help="this one only")
    parser.add_argument("--most", type=int, help="no more responses than that")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        run(given.point[0], int(given.point[1]), int(given.point[2]))
        return
    results = []
    for system, gpus, responses in QUICK if given.quick else FULL:
        if given.system not in (None, system) or responses > (given.most or responses):
            continue
        point = [sys.executable, __file__, "--point", system, str(gpus), str(responses)]
        results.append(json.loads(subprocess.run(point, check=True, capture_output=True, text=True).stdout))
        took = results[-1]
        print(f"{system:14} {gpus:6,} GPUs {responses:10,} responses {took['cpu_s']:8.1f} s {took['peak_mb']:8,} MB")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
