"""One node of the GPUs that were measured, as the cost models want to see it."""

from __future__ import annotations

from rlsim.cost.calibration import Reference
from rlsim.models.hardware import Cluster, Gpu, Link

GPUS = 64  # in the node: more than any that is measured


def measured_node(gpu: str, ref: Reference) -> Cluster:
    """A node of GPUs with the figures of `ref`. Memory size and latencies do not enter the time of a step."""
    return Cluster(
        name="measured",
        gpu=Gpu(
            name=gpu,
            title=gpu,
            memory_bytes=1e12,
            memory_bytes_per_s=ref.memory_bytes_per_s,
            bf16_flop_per_s=ref.bf16_flop_per_s,
            l2_bytes=ref.l2_bytes,
            sm_count=ref.sm_count,
            source="the calibration's reference",
        ),
        nodes=1,
        gpus_per_node=GPUS,
        intra=Link(name="measured", bytes_per_s=ref.link_bytes_per_s, latency_s=0.0),
        host=Link(name="measured", bytes_per_s=ref.link_bytes_per_s, latency_s=0.0),
    )
