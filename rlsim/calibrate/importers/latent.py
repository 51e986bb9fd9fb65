"""Latent attention (MLA) in NVIDIA aiconfigurator's layout: `<gpu>/mla/<backend>/<version>/`.

vLLM's tables time the whole module (projections, norms, rotary embedding and attention), SGLang's the attention kernel
alone. Both are of DeepSeek-V3's shape, in milliseconds, by the heads of one GPU.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from rlsim.calibrate.importers.reading import launches, read_table, subfolders, version_key
from rlsim.precision import KvPrecision

BF16 = ("bfloat16",)
CACHES: dict[KvPrecision, str] = {"bf16": "bfloat16", "fp8": "fp8"}
#: Tables by backend: of decode, of prompts, and whether they time the whole module.
TABLES = {
    "vllm": ("mla_generation_module_perf", "mla_context_module_perf", True),
    "sglang": ("generation_mla_perf", "context_mla_perf", False),
}


def paths(folder: Path, backend: str) -> tuple[Path, Path] | None:
    """The newest tables of decode and of prompts of a backend on the GPU of `folder`; None if there are none."""
    if backend not in TABLES:
        return None
    *names, _ = TABLES[backend]
    root = folder / "mla" / backend
    for version in sorted(subfolders(root), key=version_key, reverse=True):
        decode, prompts = (root / version / f"{name}.parquet" for name in names)
        if decode.is_file() and prompts.is_file():
            return decode, prompts
    return None


def in_blocks(path: Path) -> bool:
    """Whether a table is of TensorRT-LLM's kernels, which are made for 16, 32 or 64 heads (Blackwell)."""
    return set(read_table(path, ["kernel_source"]).kernel_source) <= {"trtllm_mla", "FLASHINFER_MLA"}


def rows(path: Path, kv: KvPrecision = "bf16") -> pd.DataFrame:
    """Rows of one table, in bf16 on a KV cache of `kv`: batch, heads, new (tokens of each sequence), prior (those
    cached before), seconds."""
    chosen = {"kv_cache_dtype": (CACHES[kv],), "mla_dtype": BF16}
    if "gemm_type" in read_table(path, []):
        chosen["gemm_type"] = BF16
    table = launches(path, ["num_heads", "batch_size", "isl", "step"], chosen)
    table = table.rename(columns={"batch_size": "batch", "num_heads": "heads", "isl": "new", "step": "prior"})
    keys = ["batch", "heads", "new", "prior"]
    return table.groupby(keys, as_index=False)[["seconds"]].median()
