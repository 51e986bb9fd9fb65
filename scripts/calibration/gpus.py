"""The GPUs that calibrations are made for, and the tables and releases that each is fitted to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One measured GPU."""

    name: str
    folder: str  # in the operator tables
    cluster: str  # of the catalogue: a node as measured
    vllm: str  # release of vLLM
    trtllm: str  # release of TensorRT-LLM
    vidur: tuple[str, ...]  # layer tables for the elementwise kernels, of this GPU or the nearest one

    @property
    def versions(self) -> dict[str, str]:
        """The release fitted, by engine."""
        return {"sglang": "0.5.10", "vllm": self.vllm, "trtllm": self.trtllm}

    @property
    def elementwise_donor(self) -> str:
        """Vidur's name of the GPU that the elementwise kernels were measured on."""
        return self.vidur[0].split("/")[0]

    def gemm(self, engine: str) -> str:
        """Path of the GEMM table."""
        return f"{self.folder}/gemm/{engine}/{self.versions[engine]}/gemm_perf.parquet"


@dataclass(frozen=True)
class Derived:
    """A GPU without tables: everything relative is another one's, the data-sheet figures are its own."""

    source: str
    cluster: str
    note: str


#: Vidur's layer tables, by GPU and model; the only tables there are of the A40.
H100_VIDUR = ("h100/meta-llama/Llama-2-7b-hf", "h100/meta-llama/Llama-2-70b-hf")
A100_VIDUR = ("a100/meta-llama/Meta-Llama-3-8B", "a100/meta-llama/Meta-Llama-3-70B")
A40_VIDUR = ("a40/meta-llama/Llama-2-7b-hf", "a40/meta-llama/Llama-2-70b-hf")

#: vLLM 0.14.0 was measured on Hopper without what its server does there: decode attention that splits the KV of few
#: sequences over all SMs, and all-reduce by the switch (multicast) beyond 256 KiB on eight GPUs. 0.24.0 has both.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-sxm", "h100_sxm", "8xh100", "0.24.0", "1.2.0rc5", H100_VIDUR),
        Gpu("h200-sxm", "h200_sxm", "8xh200", "0.24.0", "1.2.0rc5", H100_VIDUR),
        Gpu("a100-sxm-80gb", "a100_sxm", "8xa100", "0.14.0", "1.0.0", A100_VIDUR),
        Gpu("l40s", "l40s", "8xl40s", "0.14.0", "1.0.0", A40_VIDUR),
    )
}

DERIVED = {
    "h800-sxm": Derived(
        "h100-sxm",
        "2x8xh800",
        "H100 kernels; NVLink part of the collectives stretched by the ratio of the link rates",
    ),
    "h20": Derived(
        "h100-sxm",
        "4x8xh20",
        "H100 efficiencies on H20's own peak rates and SM count; no H20 kernel is measured here",
    ),
    "gh200": Derived(
        "h100-sxm",
        "8xgh200",
        "H100 efficiencies on GH200's own peak rates; no GH200 kernel is measured here",
    ),
}
