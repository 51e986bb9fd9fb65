"""The GPUs that calibrations are made for, and the tables and releases that each is fitted to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One measured GPU."""

    name: str
    folder: str  # in the operator tables
    cluster: str  # of the catalogue: a node as measured
    versions: dict[str, str]  # engine -> release fitted
    nccl: str
    vidur: tuple[str, ...]  # layer tables for the elementwise kernels, of this GPU or the nearest one

    def gemm(self, engine: str) -> str:
        """Path of the GEMM table."""
        return f"{self.folder}/gemm/{engine}/{self.versions[engine]}/gemm_perf.parquet"

    def decode_attention(self, engine: str) -> str:
        """Path of the decode-attention table."""
        return f"{self.folder}/attention/{engine}/{self.versions[engine]}/generation_attention_perf.parquet"

    def prefill_attention(self, engine: str) -> str:
        """Path of the prompt-attention table."""
        return f"{self.folder}/attention/{engine}/{self.versions[engine]}/context_attention_perf.parquet"

    def all_reduce(self, engine: str) -> str:
        """Path of the table of the engine's own all-reduce."""
        return f"{self.folder}/comm/{engine}/{self.versions[engine]}/custom_allreduce_perf.parquet"

    def collectives(self) -> str:
        """Path of NCCL's table."""
        return f"{self.folder}/comm/nccl/{self.nccl}/nccl_perf.parquet"

    def elementwise_donor(self) -> str:
        """Vidur's name of the GPU that the elementwise kernels were measured on."""
        return self.vidur[0].split("/")[0]


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

_RELEASES = {"sglang": "0.5.10", "vllm": "0.14.0"}

GPUS = (
    Gpu(
        name="h100-sxm",
        folder="h100_sxm",
        cluster="8xh100",
        versions={**_RELEASES, "trtllm": "1.2.0rc5"},
        nccl="2.29.2",
        vidur=H100_VIDUR,
    ),
    Gpu(
        name="h200-sxm",
        folder="h200_sxm",
        cluster="8xh200",
        versions={**_RELEASES, "trtllm": "1.2.0rc5"},
        nccl="2.29.2",
        vidur=H100_VIDUR,
    ),
    Gpu(
        name="a100-sxm-80gb",
        folder="a100_sxm",
        cluster="8xa100",
        versions={**_RELEASES, "trtllm": "1.0.0"},
        nccl="2.27.3",
        vidur=A100_VIDUR,
    ),
    Gpu(
        name="l40s",
        folder="l40s",
        cluster="8xl40s",
        versions={**_RELEASES, "trtllm": "1.0.0"},
        nccl="2.27.3",
        vidur=A40_VIDUR,
    ),
)

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
