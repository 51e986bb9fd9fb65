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

from rlsim.base.schema import Schema
from rlsim.base.version import __version__
from rlsim.errors import CalibrationError
from rlsim.models.model import Model

#: GPUs of the catalogue by the name that the driver gives them.
GPU_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H800": "h800-sxm",
    "NVIDIA H20": "h20",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A40": "a40",
    "NVIDIA L40S": "l40s",
    "NVIDIA GH200 480GB": "gh200",
}

#: Share of the machine's memory that the workers of a CPU run divide among them, as if each were a GPU's own.
RAM_SHARE = 0.5

_CACHE_BYTES = 32 * 2**20  # where the system does not tell the last cache's size


class MachineFacts(Schema):
    """What a journal begins with. Points of one journal are from one device, set-up, model and set of versions."""

    device: str = Field(description="cpu or cuda")
    name: str = Field(description="processor, as the system names it")
    workers: int = Field(gt=0, description="processes measuring at once, one a device (on the CPU, one a core)")
    memory_bytes: float = Field(gt=0, description="of one GPU; on the CPU, of the whole machine")
    cache_bytes: float = Field(gt=0, description="last-level cache")
    sm_count: int = Field(gt=0, description="streaming multiprocessors; 1 for a CPU's worker")
    dtype: str = Field(description="bfloat16 or float32")
    model: str = Field(description="name, and a hash of the fields that decide its shapes")
    versions: dict[str, str] = Field(description="rlsim, python, torch, cuda, driver")
    clocks: dict[str, str] = Field(default={}, description="as the driver or system reports them at the start")
    date: str

    @property
    def gpu(self) -> str:
        """The catalogue's name of the GPU, or a name made of the device's own."""
        known = GPU_NAMES.get(self.name)
        if known is not None:
            return known
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
    return MachineFacts(
        device=device,
        workers=workers,
        dtype=dtype,
        model=f"{model.name} ({shape_hash(model)})",
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


def shape_hash(model: Model) -> str:
    """A short hash of everything that decides the model's shapes; its name, title and source do not."""
    return hashlib.sha256(model.model_dump_json(exclude={"name", "title", "source"}).encode()).hexdigest()[:12]


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
