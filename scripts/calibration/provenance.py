"""Where the numbers come from: sources, and the notes on what is derived or assumed that every calibration shares."""

from __future__ import annotations

from collections.abc import Iterable

from rlsim.calibrate.build import COLD, INTER, PAIR
from rlsim.cost.calibration import Provenance, Source

DATE = "2026-11-24"
SCRIPT = "scripts/fit_calibrations.py"

SKEW = "skew of unequal contexts was not measured and is taken as none"
GROUPED = (
    "decode attention is fitted to rows with one query head per KV head: with grouped queries this engine's rows imply "
    "1.2 to 1.7 times the peak bandwidth however large the KV cache, so they cannot have read what they state"
)
BORROWED = (
    "products in fp8_block are SGLang's of the same GPU (both run DeepGEMM; the residual names the release), at the "
    "rate of vLLM's long ones: vLLM's table was timed without CUDA graphs, so with the host's time"
)
SLOW_LATENTS = (
    "latent attention on an FP8 KV cache is FlashAttention 3's, which SGLang chooses by itself on Hopper: as measured, "
    "several times slower than on a bf16 cache where contexts are long"
)
LENT = (
    "experts in mxfp4 on one GPU are vLLM's of the same GPU: SGLang runs OpenAI's triton_kernels for gpt-oss there, as "
    "vLLM does, and its own table has only Triton's kernel on weights turned into bf16, which it runs with experts on "
    "several GPUs"
)
LENT_MXFP8 = (
    "experts in mxfp4 are SGLang's of the same GPU, FlashInfer's kernel on activations turned into MXFP8: vLLM runs it "
    "with VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1, as its recipe for gpt-oss and public benchmarks have it; its default, "
    "which its table times, keeps activations in bf16 and takes up to twice as long"
)
COMMON = (COLD, SKEW, INTER, PAIR)


def vidur_source(names: Iterable[str], *more: str, version: str = "") -> Source:
    """Microsoft Vidur's layer tables of these GPUs and models, and further files."""
    return Source(
        project="Microsoft Vidur",
        commit="7d47513",
        licence="MIT",
        files=(*(f"data/profiling/compute/{name}/mlp.csv" for name in names), *more),
        engine_version=version,
    )


def pat_source() -> Source:
    """The figures that PAT's paper prints."""
    return Source(
        project="PAT (published figures)",
        commit="as printed",
        licence="facts quoted from the paper",
        files=("four per-token latencies", "switch cost TP2 to TP8"),
    )


def provenance(sources: Iterable[Source], notes: Iterable[str]) -> Provenance:
    """Today's fit from these sources."""
    return Provenance(date=DATE, script=SCRIPT, sources=tuple(sources), notes=tuple(notes))
