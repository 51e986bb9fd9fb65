"""How long a whole system takes: RollPacker with everything on, 40 steps of Qwen2.5-32B on 64 GPUs.

    python benchmarks/rollpacker.py            last line: {"steps", "responses", "run_s", "peak_mb"}
    python benchmarks/rollpacker.py --quick    5 steps

One seed of the shipped experiment, from YAML to tables, in one process on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import rlsim


def main() -> None:
    """Run it and print what it took."""
    parser = argparse.ArgumentParser(description="How long a whole system takes.")
    parser.add_argument("--quick", action="store_true", help="5 steps instead of 40")
    steps = 5 if parser.parse_args().quick else 40
    systems = [{"rollpacker": {"start_tp": 2}}]
    start = time.process_time()
    changes = {"workflow.steps": steps, "systems": systems, "baseline": "rollpacker"}
    result = rlsim.run("rollpacker_32b", seeds=1, overrides=changes)
    run_s = time.process_time() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    found = {"steps": steps, "responses": len(result.responses), "run_s": round(run_s, 2), "peak_mb": round(peak_mb, 1)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
