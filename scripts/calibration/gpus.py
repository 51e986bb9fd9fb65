"""The GPUs that calibrations are made for, and the tables and releases that each is fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlsim.cost.calibration import Engine


@dataclass(frozen=True)
class Gpu:
    """One measured GPU."""

    name: str
    folder: str  # in the operator tables
    cluster: str  # of the catalogue: a node as measured
    versions: Mapping[Engine, str]  # the release fitted, by engine
    vidur: tuple[str, ...]  # layer tables for the elementwise kernels, of this GPU or the nearest one
    training: str = "0.5.10"  # release of SGLang whose products are taken for training, which `TRAFFIC` is fitted with
    deepgemm: str = "0.5.10"  # release of SGLang whose products in fp8_block are nearest to vLLM's

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


ENGINES: tuple[Engine, ...] = ("sglang", "vllm", "trtllm")

#: Vidur's layer tables, by GPU and model; the only tables there are of the A40.
H100_VIDUR = ("h100/meta-llama/Llama-2-7b-hf", "h100/meta-llama/Llama-2-70b-hf")
A100_VIDUR = ("a100/meta-llama/Meta-Llama-3-8B", "a100/meta-llama/Meta-Llama-3-70B")
A40_VIDUR = ("a40/meta-llama/Llama-2-7b-hf", "a40/meta-llama/Llama-2-70b-hf")

#: vLLM 0.14.0 was measured on Hopper without what its server does there: decode attention that splits the KV of few
#: sequences over all SMs, and all-reduce by the switch (multicast) beyond 256 KiB on eight GPUs. 0.24.0 has both.
HOPPER: dict[Engine, str] = {"sglang": "0.5.14", "vllm": "0.24.0", "trtllm": "1.2.0rc5"}
AMPERE: dict[Engine, str] = {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.0.0"}
#: SGLang 0.5.14 chooses between attention kernels by shape here, which one formula is 58% off at the 90th percentile.
ADA: dict[Engine, str] = {"sglang": "0.5.10", "vllm": "0.24.0", "trtllm": "1.0.0"}
BLACKWELL: dict[Engine, str] = {"sglang": "0.5.14", "vllm": "0.24.0"}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200-sxm", "b200_sxm", "8xb200", BLACKWELL, H100_VIDUR, "0.5.14", "0.5.14"),
        Gpu("h100-sxm", "h100_sxm", "8xh100", HOPPER, H100_VIDUR),
        Gpu("h200-sxm", "h200_sxm", "8xh200", HOPPER, H100_VIDUR),
        Gpu("a100-sxm-80gb", "a100_sxm", "8xa100", AMPERE, A100_VIDUR),
        Gpu("l40s", "l40s", "8xl40s", ADA, A40_VIDUR),
    )
}

#: Older releases that a calibration is kept of, named with it: the serving runs' SGLang is 0.5.1.
OLDER: dict[str, tuple[str, Engine, str]] = {"h100-sxm-sglang-0.5.10": ("h100-sxm", "sglang", "0.5.10")}
