"""The engine's benchmark runs and says what it should; how fast is no test's business."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "rollout.py"


def test_quick_benchmark_ends_with_its_results_as_json() -> None:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--repeats", "1"], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result.keys() >= {
        "engine_s",
        "bare_s",
        "ratio_to_bare_simpy",
        "speedup_over_token_by_token",
        "time_ratio_2x_responses",
        "time_ratio_8x_tokens",
        "peak_mb",
    }
    assert all(value > 0 and math.isfinite(value) for value in result.values())
    # Jumping: a timeout for each response at most, and a few for the prefills of a replica, whatever the tokens.
    assert result["responses"] == 4 * 4_096
    assert result["tokens"] > 1_000 * result["responses"]
    assert 0.5 * result["responses"] < result["timeouts"] < 1.5 * result["responses"]
