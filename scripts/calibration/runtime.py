"""What changing the parallel layout costs: PAT's host-bound figures, the same for every GPU."""

from __future__ import annotations

from rlsim.cost.calibration import RuntimeFit

GRAPH_BATCHES = {
    "sglang": (1, 2, 4, *range(8, 161, 8)),
    "vllm": (1, 2, 4, *range(8, 257, 8)),
    "trtllm": (1, 2, 4, *range(8, 129, 8)),
}

SOURCE = (
    "PAT's figures on 8xA40 (naive recapture 3.59 s for SGLang's 23 default batch sizes; control = 5.52 s total less "
    "weights, KV and recapture), host-bound work and therefore reused for every GPU; group creation is an assumption, "
    "not measured; graph batch sizes are the engine's defaults"
)


def runtime_of(engine: str, reshard: float | None = None, migrate: float | None = None) -> RuntimeFit:
    """Costs of a layout change; `reshard` and `migrate` are rates in bytes/s where they were measured."""
    return RuntimeFit(
        graph_capture_s=3.59 / 23,
        graph_batch_sizes=GRAPH_BATCHES[engine],
        switch_control_s=5.52 - 1.03 - 2.36 - 0.73,
        group_create_s=1.0,
        reshard_bytes_per_s=reshard,
        migrate_bytes_per_s=migrate,
        source=SOURCE,
    )
