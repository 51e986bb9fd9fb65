"""Training efficiency: what share of a GPU's own large matrix products a training framework reaches."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from rlsim.cost.calibration import TrainingFit

LARGE_GEMMS = "median of bf16 GEMMs of at least 4,096 tokens with weights of 3,584 or more"


@dataclass(frozen=True)
class Share:
    """A framework's share of the large-GEMM rate, the rows it is fitted to, and how far off the others are."""

    value: float
    fitted: str
    others: str


#: The only place where the shares are written. They are the outcome of `scripts/fit_training.py`; a test holds them
#: and the errors quoted here against it.
SHARES = {
    "fsdp": Share(
        value=0.72,
        fitted="veRL rows 2 and 3 (Qwen2-7B, FSDP on 8xA100/A800), with a bus rate of 18 GB/s fitted beside it to the "
        "same four timings (with NVLink's 240 GB/s assumed instead: 0.56, and errors of 12 to 17%)",
        others="from row 3's update alone, row 2 is -3% (update) and +5% (old_log_prob) off; from row 2's alone, row 3 "
        "is +27% and +27% off (same bus rate); H20 rows 10 to 12: updates -28% to +24%, old_log_prob -44% to -77%",
    ),
    "megatron": Share(
        value=0.50,
        fitted="the update of veRL row 4 alone, so low confidence (Qwen2-7B, TP2 PP2 DP2 on 8xA100/A800), at the bus "
        "rate fitted for fsdp (NVLink's: 0.39)",
        others="row 4's old_log_prob is -44% off; REAL's calls on H100 -51% to +181%",
    ),
}


def large_gemm_share(table: pd.DataFrame, peak_flop_per_s: float) -> float:
    """Median share of the peak rate of measured products with at least 4,096 tokens and weights of 3,584 or more.

    `table`: m (tokens), n and k (weights), seconds. Products wider than 60,000 are LM heads and left out.
    """
    big = table[(table.m >= 4096) & table.n.between(3584, 60000) & (table.k >= 3584)]
    return float((2.0 * big.m * big.n * big.k / big.seconds).median() / peak_flop_per_s)


def training_fit(gemm_share: float, table: str) -> TrainingFit:
    """Share of peak by framework on a GPU whose large GEMMs in `table` reach `gemm_share` of it."""
    shares = "; ".join(
        f"{name} reaches {share.value:.2f} of that, fitted to {share.fitted}; not fitted: {share.others}"
        for name, share in SHARES.items()
    )
    return TrainingFit(
        flop_efficiency={name: round(share.value * gemm_share, 3) for name, share in SHARES.items()},
        source=f"large GEMMs reach {gemm_share:.3f} of peak ({LARGE_GEMMS}; {table}); {shares} (docs/calibration.md)",
    )


def carried_over(fit: TrainingFit, source: str, gpu: str) -> TrainingFit:
    """`source`'s shares of peak on another GPU."""
    about = f"shares of peak carried over from {source}, nothing of this is measured on {gpu}"
    return fit.model_copy(update={"source": f"{about}; there: {fit.source}"})
