"""Training efficiency: what share of the peak the linear layers of a training framework reach, what real runs say of
it, and REAL's per-call seconds (an input, not an output, of its comparison) predicted with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.stacks import ROWS, Fit, Ring, Timing, fit_stacks
from calibration.tables import GPUS, NOTES, all_gemms
from evidence.validate.rows import markdown
from rlsim.cost.calibration import Reference, TrainingFit
from rlsim.cost.strategy import TRAFFIC, Recompute, TrainEfficiency, TrainStrategy, efficiency_of
from rlsim.cost.train import TrainCost
from rlsim.models.hardware import load_cluster, load_gpu
from rlsim.models.model import load_model

FRAMEWORKS = ("fsdp", "megatron")
#: Seconds per token of veRL's padded batch: the outcome of the part `training`, as is `TRAFFIC`; a test holds it.
DRIVER_S = 0.185e-6
BUS = 360e9  # bus rate of NCCL over H100's NVLink in REAL's runs, bytes/s
SEQUENCES, TOKENS, MINI_BATCHES = 512, 2048, 8


def large_gemm_share(table: pd.DataFrame, peak_flop_per_s: float) -> float:
    """Median share of the peak rate of measured products with at least 4,096 tokens and weights of 3,584 or more.

    `table`: m (tokens), n and k (weights), seconds. Products wider than 60,000 are LM heads and left out.
    """
    big = table[(table.m >= 4096) & table.n.between(3584, 60000) & (table.k >= 3584)]
    return float((2.0 * big.m * big.n * big.k / big.seconds).median() / peak_flop_per_s)


def training_fit(gemm_share: float, reference: Reference, table: str) -> TrainingFit:
    """Share of peak by framework on a GPU whose large GEMMs in `table` reach `gemm_share` of it."""
    said = {"share": gemm_share, "large": NOTES["large gemms"], "table": table, "traffic": TRAFFIC * 1e3}
    efficiency = round(efficiency_of(gemm_share, reference.flops_per_byte), 3)
    return TrainingFit(flop_efficiency=dict.fromkeys(FRAMEWORKS, efficiency), source=NOTES["training"].format_map(said))


def gemm_shares(data: Path) -> dict[str, float]:
    """What share of its peak each GPU of the measured runs reaches in large GEMMs; H20: taken to be H100's."""
    found = {name: gemm_share(data, name, GPUS[name].training_gemm) for name in ("a100-sxm-80gb", "h100-sxm")}
    return {**found, "h20": found["h100-sxm"]}


def gemm_share(data: Path, gpu: str, table: str) -> float:
    """What share of its peak a GPU's large GEMMs reach in a table."""
    return large_gemm_share(all_gemms(data, table), load_gpu(gpu).bf16_flop_per_s)


@dataclass(frozen=True)
class Call:
    """One published call of a 7B actor or critic: see `real` of stacks.yaml."""

    name: str
    layout: tuple[int, int, int]
    micro_batches: int
    measured_s: float
    critic: bool = False
    train: bool = False

    def predict(self, efficiency: float, recompute: Recompute) -> Timing:
        """Seconds at a share of peak."""
        tp, pp, dp = self.layout
        sequences = max(SEQUENCES // dp // (MINI_BATCHES if self.train else 1) // self.micro_batches, 1)
        strategy = TrainStrategy(
            dp=dp, tp=tp, pp=pp, zero_stage=1, micro_batch_sequences=sequences, recompute=recompute,
            sequence_parallel=tp > 1,
        )  # fmt: skip
        cluster, body = load_cluster("2x8xh100"), load_model("llama-3-7b")
        shares = TrainEfficiency(flop=efficiency, attention=0.62, overhead_tokens=600)
        cost = TrainCost(body.as_critic() if self.critic else body, cluster, Ring(cluster, BUS), strategy, shares)
        batch = np.full(SEQUENCES, float(TOKENS))
        found = cost.train_s(batch, MINI_BATCHES) if self.train else cost.forward_s(batch)
        return Timing(found.total_s, self.measured_s)


def check_real(efficiency: float) -> list[tuple[Call, list[Timing]]]:
    """Every call: one prediction for inference, without and with recomputation for training."""
    calls = [Call(**row) for row in ROWS["real"]]
    recomputes: dict[bool, tuple[Recompute, ...]] = {False: ("none",), True: ("none", "full")}
    return [(call, [call.predict(efficiency, how) for how in recomputes[call.train]]) for call in calls]


def stacks_table(found: Fit) -> str:
    """Predicted and measured seconds of the runs, by case."""
    rows = [
        (case.title, f"{case.traffic * 1e3:.2f}", f"{case.driver_s * 1e6:.3f}", row.label, *timings)
        for case in found.cases
        for row, *timings in case.rows
    ]
    return _table(["case", "bytes / 1000 FLOPs", "driver, us", "row", "log-probs, s", "update, s"], rows)


def real_table(efficiency: float) -> str:
    """Predicted and measured seconds of the calls that REAL publishes."""
    rows = [
        (call.name, "TP{} PP{} DP{}".format(*call.layout), *timings, *[""] * (2 - len(timings)))
        for call, timings in check_real(efficiency)
    ]
    return _table(["call", "layout", "s", "with recomputation, s"], rows)


def _table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return markdown(headings, [[*map(str, row)] for row in rows])


def main(options: argparse.Namespace) -> None:
    """The numbers of training stacks, to measured runs of veRL and NeMo-RL, predicted against measured.

    The outcome is `rlsim.cost.strategy.TRAFFIC`, `DRIVER_S` and words of notes.yaml.
    """
    shares, gpu = gemm_shares(options.data), load_gpu("h100-sxm")
    found = fit_stacks(options.data, shares)
    print(f"{found.traffic * 1e3:.2f} bytes for a thousand FLOPs, {found.driver_s * 1e6:.3f} us a padded token\n")
    print(f"predicted / measured\n\n{stacks_table(found)}\n")
    efficiency = efficiency_of(shares[gpu.name], gpu.bf16_flop_per_s / gpu.memory_bytes_per_s, found.traffic)
    print(f"REAL, H100, Megatron-like calls, efficiency {efficiency:.2f}\n\n{real_table(efficiency)}")
