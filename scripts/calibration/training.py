"""Training efficiency: what share of a GPU's peak the linear layers of a training framework reach."""

from __future__ import annotations

import pandas as pd

from rlsim.cost.calibration import Reference, TrainingFit

LARGE_GEMMS = "median of bf16 GEMMs of at least 4,096 tokens with weights of 3,584 or more"
FRAMEWORKS = ("fsdp", "megatron")

#: The only place where these numbers are written: the outcome of `scripts/fit_training.py`; a test holds them and the
#: errors quoted here against it. Bytes for each FLOP of a linear layer, and seconds per token of veRL's padded batch.
TRAFFIC = 2.35e-3
DRIVER_S = 0.185e-6
FITTED = (
    "veRL rows 2 and 3 (Qwen2-7B, FSDP on 8xA100/A800, at a bus rate of 18 GB/s fitted beside it) and NeMo-RL v0.3 "
    "rows 49 to 52 (LLaMA-3.1-8B, Megatron and DTensor on 8 H100), one number for both frameworks"
)
OTHERS = (
    "each of the three left out, -16% to +27%; veRL row 4 (Megatron, micro-batches of 1,000 tokens) -57% and -44%; "
    "REAL's calls on H100 -59% to +125%"
)


def efficiency_of(gemm_share: float, flops_per_byte: float, traffic: float) -> float:
    """Share of the peak that linear layers reach, with `traffic` bytes moved for each of their FLOPs.

    `gemm_share`: what large products alone reach; `flops_per_byte`: the GPU's peak over its memory bandwidth.
    """
    return 1.0 / (1.0 / gemm_share + traffic * flops_per_byte)


def large_gemm_share(table: pd.DataFrame, peak_flop_per_s: float) -> float:
    """Median share of the peak rate of measured products with at least 4,096 tokens and weights of 3,584 or more.

    `table`: m (tokens), n and k (weights), seconds. Products wider than 60,000 are LM heads and left out.
    """
    big = table[(table.m >= 4096) & table.n.between(3584, 60000) & (table.k >= 3584)]
    return float((2.0 * big.m * big.n * big.k / big.seconds).median() / peak_flop_per_s)


def training_fit(gemm_share: float, reference: Reference, table: str) -> TrainingFit:
    """Share of peak by framework on a GPU whose large GEMMs in `table` reach `gemm_share` of it."""
    flops_per_byte = reference.bf16_flop_per_s / reference.memory_bytes_per_s
    efficiency = round(efficiency_of(gemm_share, flops_per_byte, TRAFFIC), 3)
    return TrainingFit(
        flop_efficiency=dict.fromkeys(FRAMEWORKS, efficiency),
        source=f"large GEMMs reach {gemm_share:.3f} of peak ({LARGE_GEMMS}; {table}); beside them {TRAFFIC * 1e3:.2f} "
        f"bytes are moved for every thousand of their FLOPs, fitted to {FITTED}; not fitted: {OTHERS} "
        "(docs/calibration.md)",
    )


def carried_over(fit: TrainingFit, source: Reference, gpu: str, reference: Reference) -> TrainingFit:
    """The shares of a GPU without tables: `source`'s large GEMMs, its own peak and memory bandwidth."""
    more = [item.bf16_flop_per_s / item.memory_bytes_per_s for item in (reference, source)]

    def share(value: float) -> float:
        return round(1.0 / (1.0 / value + TRAFFIC * (more[0] - more[1])), 3)

    about = f"nothing of this is measured on {gpu}: large GEMMs are taken to reach the same share of its peak"
    return fit.model_copy(
        update={
            "flop_efficiency": {name: share(value) for name, value in fit.flop_efficiency.items()},
            "source": f"{about}; there: {fit.source}",
        }
    )
