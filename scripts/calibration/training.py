"""Training efficiency: what share of a GPU's peak the linear layers of a training framework reach."""

from __future__ import annotations

import pandas as pd

from rlsim.cost.calibration import Reference, TrainingFit
from rlsim.cost.train_efficiency import TRAFFIC, efficiency_of

LARGE_GEMMS = "median of bf16 GEMMs of at least 4,096 tokens with weights of 3,584 or more"
FRAMEWORKS = ("fsdp", "megatron")

#: The outcome of `scripts/fit_training.py`, as is `TRAFFIC`; a test holds both and the errors quoted here against it.
#: Seconds per token of veRL's padded batch.
DRIVER_S = 0.185e-6
FITTED = (
    "veRL rows 2 and 3 (Qwen2-7B, FSDP on 8xA100/A800, at a bus rate of 18 GB/s fitted beside it) and NeMo-RL v0.3 "
    "rows 49 to 52 (LLaMA-3.1-8B, Megatron and DTensor on 8 H100), one number for both frameworks"
)
OTHERS = (
    "each of the three left out, -14% to +26%; veRL row 4 (Megatron, micro-batches of 1,000 tokens) -57% and -44%; "
    "REAL's calls on H100 -59% to +123%"
)


def large_gemm_share(table: pd.DataFrame, peak_flop_per_s: float) -> float:
    """Median share of the peak rate of measured products with at least 4,096 tokens and weights of 3,584 or more.

    `table`: m (tokens), n and k (weights), seconds. Products wider than 60,000 are LM heads and left out.
    """
    big = table[(table.m >= 4096) & table.n.between(3584, 60000) & (table.k >= 3584)]
    return float((2.0 * big.m * big.n * big.k / big.seconds).median() / peak_flop_per_s)


def training_fit(gemm_share: float, reference: Reference, table: str) -> TrainingFit:
    """Share of peak by framework on a GPU whose large GEMMs in `table` reach `gemm_share` of it."""
    efficiency = round(efficiency_of(gemm_share, reference.flops_per_byte), 3)
    return TrainingFit(
        flop_efficiency=dict.fromkeys(FRAMEWORKS, efficiency),
        source=f"large GEMMs reach {gemm_share:.3f} of peak ({LARGE_GEMMS}; {table}); beside them {TRAFFIC * 1e3:.2f} "
        f"bytes are moved for every thousand of their FLOPs, fitted to {FITTED}; not fitted: {OTHERS} "
        "(docs/calibration.md)",
    )
