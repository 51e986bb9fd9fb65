"""The GPUs of `gpus.yaml` that calibrations are made for, and where their tables lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlsim.base.reading import plain, read_yaml
from rlsim.cost.calibration import Engine

ENGINES: tuple[Engine, ...] = ("sglang", "vllm", "trtllm")


@dataclass(frozen=True)
class Gpu:
    """One measured GPU: a row of `gpus.yaml`, which says what is what."""

    name: str
    folder: str
    cluster: str
    versions: Mapping[Engine, str]
    vidur: tuple[str, ...]
    training: str = "0.5.10"
    deepgemm: str = "0.5.10"

    @property
    def elementwise_donor(self) -> str:
        """Vidur's name of the GPU that the elementwise kernels were measured on."""
        return self.vidur[0].split("/")[0]

    def gemm(self, engine: Engine, release: str = "") -> str:
        """Path of the GEMM table of an engine, by default of the release fitted."""
        return f"{self.folder}/gemm/{engine}/{release or self.versions[engine]}/gemm_perf.parquet"

    @property
    def training_gemm(self) -> str:
        """Path of the GEMM table that the share of the peak in training is from."""
        return self.gemm("sglang", self.training)


_ROWS = plain(read_yaml(Path(__file__).with_suffix(".yaml")))
GPUS = {row["name"]: Gpu(**row) for row in _ROWS["gpus"]}
OLDER: dict[str, tuple[str, Engine, str]] = {name: tuple(row) for name, row in _ROWS["older"].items()}
KEPT: list[str] = _ROWS["kept"]
