"""What the measurements say about the machine itself: its best rates, as a reference and as a cluster file."""

from __future__ import annotations

from pathlib import Path

from rlsim.base import catalogue
from rlsim.calibrate.fit.common import as_written
from rlsim.calibrate.measure.host import RAM_SHARE, MachineFacts
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.write import write_record
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster, Gpu, Link, load_gpu
from rlsim.models.model import Model


def describe_cluster(measured: Measurements, facts: MachineFacts) -> Cluster:
    """This machine as a cluster of one node.

    A GPU of the catalogue keeps its data sheet's figures; of any other, and of a CPU, they are the best that was
    measured. So is the link. Raises `CalibrationError` if there is neither a matrix product nor a copy to tell.
    """
    known = facts.gpu in catalogue.names("gpus")
    gpu = load_gpu(facts.gpu) if known else _measured_gpu(measured, facts)
    copies = measured.table("copy")
    host = copies[copies.kind == "host_to_device"] if len(copies) else copies
    host_rate = float((host.bytes / host.seconds).max()) if len(host) else gpu.memory_bytes_per_s / 2.0
    cluster = Cluster(
        name=f"{facts.workers}x{facts.gpu}",
        gpu=gpu,
        nodes=1,
        gpus_per_node=facts.workers,
        intra=_link(measured, facts, gpu.memory_bytes_per_s / 2.0),
        host=Link(name="pcie" if facts.device == "cuda" else "memory", bytes_per_s=host_rate, latency_s=1e-6),
    )
    written = as_written(cluster)
    return written.model_copy(update={"gpu": gpu}) if known else written


def write_cluster(cluster: Cluster, path: Path) -> None:
    """The cluster as YAML; a GPU of the catalogue by its name."""
    data = cluster.model_dump(mode="json", exclude_none=True)
    if cluster.gpu.name in catalogue.names("gpus"):
        data["gpu"] = cluster.gpu.name
    write_record(data, path, "This machine, as `rlsim calibrate` found it. Units: bytes, bytes/s, FLOP/s, seconds.")


def write_model(model: Model, path: Path) -> None:
    """The model's shape as YAML, with the bytes of the numbers that it was measured in."""
    data = model.model_dump(mode="json", exclude_defaults=True)
    write_record({**data, "dtype_bytes": model.dtype_bytes}, path, "The model as `rlsim calibrate` measured it.")


def _measured_gpu(measured: Measurements, facts: MachineFacts) -> Gpu:
    gemm, copies = measured.table("gemm"), measured.table("copy")
    copies = copies[copies.kind == "device"] if len(copies) else copies
    if gemm.empty or copies.empty:
        raise CalibrationError(
            "no peak rates: neither a matrix product nor a copy was measured; give a larger --budget"
        )
    element = 4.0 if facts.dtype == "float32" else 2.0
    flops = float((2.0 * gemm.m * gemm.n * gemm.k / gemm.seconds).max())
    # every kernel's rate is relative to this one, so it must be the best of any: products of few rows stream too
    streamed = element * (gemm.n * gemm.k + gemm.m * (gemm.n + gemm.k)) / gemm.seconds
    rate = max(float((2.0 * copies.bytes / copies.seconds).max()), float(streamed.max()))
    memory = f"{RAM_SHARE:.0%} of the machine's memory over the workers" if facts.device == "cpu" else "the driver's"
    device = "one thread a worker, all workers busy" if facts.device == "cpu" else "all GPUs busy"
    return Gpu(
        name=facts.gpu,
        title=facts.name,
        memory_bytes=facts.worker_memory_bytes,
        memory_bytes_per_s=rate,
        bf16_flop_per_s=flops,
        l2_bytes=facts.cache_bytes,
        sm_count=facts.sm_count,
        source=f"measured on {facts.date} in {facts.dtype}, {device}: best matrix product, best rate of a copy or a "
        f"product of few rows (caches included); memory: {memory}",
    )


def _link(measured: Measurements, facts: MachineFacts, memory_rate: float) -> Link:
    """The best one-way rate and shortest message measured; the memory's where there is one worker only."""
    name = "nccl" if facts.device == "cuda" else "gloo"
    table = measured.table("collective")
    if table.empty:
        return Link(name=f"{name}-not-measured", bytes_per_s=memory_rate, latency_s=1e-6)
    one_way = table[table.op.isin(["all_gather", "reduce_scatter", "send_recv"])]
    rows = one_way if len(one_way) else table
    share = (1.0 - 1.0 / rows.gpus).where(rows.op != "send_recv", 1.0)
    rate = float((share * rows.bytes / rows.seconds).max())
    return Link(name=name, bytes_per_s=rate, latency_s=float(table.seconds.min()))
