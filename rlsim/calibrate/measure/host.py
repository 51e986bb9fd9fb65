"""The machine that is measured: what it is, and which versions of what run on it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field

from rlsim.base import catalogue
from rlsim.base.reading import shipped
from rlsim.base.schema import Schema
from rlsim.base.version import __version__
from rlsim.calibrate.fit.common import as_written
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.write import write_record
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster, Gpu, Link, load_gpu
from rlsim.models.model import Model

#: GPUs of the catalogue by the name that the driver gives them.
GPU_NAMES: dict[str, str] = shipped("known_names.yaml")["drivers"]

#: Share of the machine's memory that the workers of a CPU run divide among them, as if each were a GPU's own.
RAM_SHARE = 0.5

_CACHE_BYTES = 32 * 2**20  # where the system does not tell the last cache's size


class MachineFacts(Schema):
    """What a journal begins with. Points of one journal are from one device, set-up, model and set of versions."""

    device: str  # cpu or cuda
    name: str  # processor, as the system names it
    workers: int = Field(gt=0)  # processes measuring at once, one a device (on the CPU, one a core)
    memory_bytes: float = Field(gt=0)  # of one GPU; on the CPU, of the whole machine
    cache_bytes: float = Field(gt=0)  # last-level cache
    sm_count: int = Field(gt=0)  # streaming multiprocessors; 1 for a CPU's worker
    dtype: str  # bfloat16 or float32
    model: str  # name, and a hash of the fields that decide its shapes
    versions: dict[str, str]  # rlsim, python, torch, cuda, driver
    clocks: dict[str, str] = Field(default={})  # as the driver or system reports them at the start
    date: str

    @property
    def gpu(self) -> str:
        """The catalogue's name of the GPU, or a name made of the device's own."""
        if self.name in GPU_NAMES:
            return GPU_NAMES[self.name]
        slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", " ", self.name.lower())).strip("-")
        return slug if self.device == "cuda" else f"cpu-{slug.removeprefix('cpu-')}"

    @property
    def worker_memory_bytes(self) -> float:
        """Memory of one device: a GPU's own; on the CPU, its worker's part of `RAM_SHARE` of the machine's."""
        return self.memory_bytes if self.device == "cuda" else self.memory_bytes * RAM_SHARE / self.workers

    def check_same(self, other: MachineFacts, path: Path) -> None:
        """Raises `CalibrationError` if the points of `other`, the journal at `path`, cannot be mixed with ours."""
        ours, theirs = (
            one.model_dump(include={"device", "name", "workers", "dtype", "model"})
            | {what: one.versions.get(what, "none") for what in ("torch", "cuda", "driver")}
            for one in (self, other)
        )
        differ = [f"{what} {theirs[what]} (now {ours[what]})" for what in ours if ours[what] != theirs[what]]
        if differ:
            raise CalibrationError(
                f"{path} holds measurements of another set-up: {', '.join(differ)}; "
                "give another --out, or --fresh to discard them"
            )


def machine_facts(device: str, model: Model, *, workers: int, dtype: str) -> MachineFacts:
    """The facts of this machine. Needs torch; `device` is "cpu" or "cuda"."""
    import torch

    versions = {"rlsim": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device == "cpu":
        megahertz = _cpu_info("cpu MHz")
        clocks = {"cpu_mhz": megahertz} if megahertz else {}
        found: dict[str, Any] = {"name": cpu_name(), "cache_bytes": cpu_cache_bytes(), "sm_count": 1}
        found["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        properties: Any = torch.cuda.get_device_properties(0)
        clocks = _nvidia_smi()
        versions |= {"cuda": str(torch.version.cuda), "driver": clocks.pop("driver_version", "unknown")}
        found = {"name": properties.name, "memory_bytes": properties.total_memory}
        found["cache_bytes"] = getattr(properties, "L2_cache_size", 0) or _CACHE_BYTES
        found["sm_count"] = properties.multi_processor_count
    shape = model.model_dump_json(exclude={"name", "title", "source"})
    return MachineFacts(
        device=device,
        workers=workers,
        dtype=dtype,
        model=f"{model.name} ({hashlib.sha256(shape.encode()).hexdigest()[:12]})",
        versions=versions,
        clocks=clocks,
        date=date.today().isoformat(),
        **found,
    )


def devices(device: str) -> int:
    """How many devices there are: GPUs, or the cores this process may use.

    Raises `CalibrationError` without torch, for an unknown device, or if there is no such device.
    """
    if device not in ("cpu", "cuda"):
        raise CalibrationError(f"--device {device}: expected cpu or cuda")
    try:
        import torch
    except ImportError:
        raise CalibrationError("measuring needs PyTorch: pip install 'rlsim[gpu]'") from None
    if device == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not torch.cuda.is_available():
        raise CalibrationError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; measure the CPU with --device cpu"
        )
    return torch.cuda.device_count()


def _cpu_info(what: str) -> str:
    """What Linux says of the first core; nothing where it does not."""
    try:
        found = re.search(rf"^{what}\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def cpu_name() -> str:
    """The processor's name."""
    return _cpu_info("model name") or platform.processor() or platform.machine() or "CPU"


def cpu_cache_bytes() -> float:
    """The last-level cache of the CPU, a usual size where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text(encoding="utf-8").strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]])
    return float(max(sizes, default=_CACHE_BYTES))


def _nvidia_smi() -> dict[str, str]:
    """Driver version and clocks of the first GPU; nothing where the tool is missing."""
    wanted = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
    query = ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(wanted, (part.strip() for part in answer.strip().split(",")), strict=False))


# What the measurements say of it --------------------------------------------------------------------------------------


def describe_cluster(measured: Measurements, facts: MachineFacts) -> Cluster:
    """This machine as a cluster of one node.

    A GPU of the catalogue keeps its data sheet's figures; of any other, and of a CPU, they are the best that was
    measured. So is the link. Raises `CalibrationError` if there is neither a matrix product nor a copy to tell.
    """
    known = facts.gpu in catalogue.names("gpus")
    gpu = load_gpu(facts.gpu) if known else _measured_gpu(measured, facts)
    copies = measured.table("copy")
    host = copies[copies.kind == "host_to_device"]
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
    copies = copies[copies.kind == "device"]
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
