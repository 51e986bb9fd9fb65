"""Asks AISimulate for the seconds of single engine steps; run by peers.py with the Python of AISimulate's environment.

    python benchmarks/aisimulate_steps.py '{"decode": [[64, 2000]], "prefill": [[16, 512]], "kinds": [[64, 2000]]}'

Points are [batch, context tokens of each sequence] of Qwen3-8B at TP1 on H200. Prints one JSON object.
"""

import json
import sys

from aisimulate_core.sdk.engine import EngineHandle

points = json.loads(sys.argv[1])
engine = EngineHandle.compile("Qwen/Qwen3-8B", "h200_sxm", "vllm", tp_size=1)


def kinds(batch: int, context: int) -> dict[str, float]:
    """Seconds of one decode step by kind."""
    total: dict[str, float] = {}
    for name, latency_ms, *_ in engine.decode_step_per_op(batch, context, 2):
        kind = "attention" if "attention" in name else "products" if "gemm" in name else "elementwise"
        if "logits" in name:
            kind = "head"
        total[kind] = total.get(kind, 0.0) + latency_ms / 1e3
    return total


found = {
    "decode": [engine.predict_decode_latency(batch, context) / 1e3 for batch, context in points["decode"]],
    "prefill": [engine.predict_prefill_latency(batch, tokens) / 1e3 for batch, tokens in points["prefill"]],
    "kinds": [kinds(batch, context) for batch, context in points["kinds"]],
}
print(json.dumps(found))
