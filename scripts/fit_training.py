"""Fit the one free training efficiency per framework to measured veRL steps, and print predicted against measured.

    PYTHONPATH=. python scripts/fit_training.py [data folder]

The rows with known lengths (2, 3: FSDP, 4: Megatron, all 8 × A100/A800) name neither the interconnect nor the spread
of lengths. Both are therefore unknowns here: the spread is assumed, the bus rate fitted beside the efficiency (two
numbers to the four timings of rows 2 and 3) and reported for NVLink too. The H20 rows state no mean length, so only the
ratios between them can be checked: one number (mean response) per group is chosen to match the first
`update_actor`, everything else is predicted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import brentq, minimize_scalar

from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost, TrainEfficiency
from rlsim.hardware import Cluster, Link, load_cluster, load_gpu
from rlsim.models import load_model

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SPREAD = 0.7  # standard deviation of log response length; assumed, the logs give means only


@dataclass(frozen=True)
class Ring:
    """Ring collectives at a bus rate: latency + moved bytes / rate; across nodes one network port per GPU."""

    cluster: Cluster
    bus_bytes_per_s: float

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds of one collective."""
        if gpus < 2:
            return 0.0
        moved = {"all_reduce": 2 * (gpus - 1) / gpus, "broadcast": 1.0, "send_recv": 1.0}.get(op, (gpus - 1) / gpus)
        rate = self.bus_bytes_per_s
        if nodes > 1 and self.cluster.inter:
            rate = min(rate, 0.8 * self.cluster.inter.bytes_per_s * (gpus // nodes))
        return 2e-5 + moved * message_bytes / rate


def lengths(count: int, prompt: float, response: float, cap: float) -> npt.NDArray[np.float64]:
    """`count` lengths, prompt included: lognormal responses cut at `cap` with mean `response`, always the same."""
    draws = np.exp(SPREAD * np.random.default_rng(0).standard_normal(count))
    scale = brentq(lambda x: float(np.minimum(draws * x, cap).mean()) - response, 1e-3, 1e6)
    return np.round(np.minimum(draws * scale, cap)) + prompt


def predict(
    row: pd.Series,
    response: float,
    cluster: Cluster,
    strategy: TrainStrategy,
    flop: float,
    bus: float,
    mini_batches: int,
) -> tuple[float, float]:
    """Seconds of (old_log_prob, update_actor) of one row."""
    prompt = row.mean_prompt if row.mean_prompt > 0 else 150.0
    count = int(row.responses_per_step) if row.responses_per_step > 0 else 8192
    batch = lengths(count, prompt, response, row.max_response)
    name = {"Qwen3-30B-A3B-Base": "qwen3-30b-a3b"}.get(row.model, "qwen2.5-7b")  # Qwen2 and Qwen2.5 7B: same shape
    efficiency = TrainEfficiency(flop=flop, attention=0.65, overhead_tokens=290)
    cost = TrainCost(load_model(name), cluster, Ring(cluster, bus), strategy, efficiency)
    return cost.forward_s(batch).total_s, cost.train_s(batch, mini_batches).total_s


def show(label: str, row: pd.Series, predicted: tuple[float, float]) -> list[float]:
    """Print one row; returns the relative errors of the two phases."""
    measured = (row.old_logprob_s, row.update_actor_s)
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    print(
        f"  {label:34s} old_log_prob {predicted[0]:6.1f} / {measured[0]:6.1f} s ({errors[0]:+4.0%})"
        f"   update_actor {predicted[1]:6.1f} / {measured[1]:6.1f} s ({errors[1]:+4.0%})"
    )
    return errors


def fit_a100(rows: pd.DataFrame) -> tuple[float, float, float]:
    """(FSDP efficiency, bus rate, Megatron efficiency) from rows 2, 3 and 4."""
    cluster = load_cluster("8xa100")
    fsdp = TrainStrategy(dp=8, zero_stage=3, micro_batch_sequences=16)

    def both(flop: float, bus: float) -> list[tuple[float, float]]:
        return [predict(rows.loc[i], rows.loc[i].mean_response, cluster, fsdp, flop, bus, 4) for i in (2, 3)]

    def loss(flop: float, bus: float) -> float:
        measured = [(rows.loc[i].old_logprob_s, rows.loc[i].update_actor_s) for i in (2, 3)]
        return float((np.log(np.array(both(flop, bus)) / np.array(measured)) ** 2).sum())

    best: dict[float, tuple[float, float]] = {}
    for bus in (240e9, *(np.arange(10, 42, 1) * 1e9)):
        found = minimize_scalar(lambda flop, bus=bus: loss(flop, bus), bounds=(0.2, 0.9), method="bounded")
        best[float(bus)] = (float(found.fun), float(found.x))
    print("FSDP, 8 × A100/A800 (predicted / measured)")
    slow = min(best, key=lambda bus: best[bus][0])
    for bus, why in ((240e9, "NVLink assumed"), (slow, "bus rate fitted too")):
        flop = best[bus][1]
        print(f" efficiency {flop:.3f} at {bus / 1e9:.0f} GB/s ({why})")
        for i, predicted in zip((2, 3), both(flop, bus), strict=True):
            show(f"row {i}: mean response {rows.loc[i].mean_response:.0f}", rows.loc[i], predicted)
    for fit_on, check_on in ((2, 3), (3, 2)):
        row = rows.loc[fit_on]
        flop = brentq(
            lambda x, row=row: predict(row, row.mean_response, cluster, fsdp, x, slow, 4)[1] - row.update_actor_s,
            0.1,
            0.99,
        )
        print(f" efficiency {flop:.3f} from the update of row {fit_on} alone")
        row = rows.loc[check_on]
        show(f"row {check_on}, not fitted", row, predict(row, row.mean_response, cluster, fsdp, flop, slow, 4))

    row = rows.loc[4]
    megatron = TrainStrategy(dp=2, tp=2, pp=2, zero_stage=1, micro_batch_sequences=4, sequence_parallel=True)
    print("Megatron, 8 × A100/A800, TP2 PP2 DP2; fitted on update_actor only")
    flops = []
    for bus in (240e9, slow):
        flop = brentq(
            lambda x, bus=bus: predict(row, row.mean_response, cluster, megatron, x, bus, 4)[1] - row.update_actor_s,
            0.05,
            0.99,
        )
        flops.append(flop)
        print(f" efficiency {flop:.3f} at {bus / 1e9:.0f} GB/s")
        show("row 4", row, predict(row, row.mean_response, cluster, megatron, flop, bus, 4))
    return best[slow][1], slow, flops[-1]


def check_h20(rows: pd.DataFrame, flop: float) -> None:
    """Scaling from 32 to 128 H20 with the FSDP efficiency: the mean length is chosen on row 10, the rest predicted."""
    print(f"FSDP2, H20, Qwen2.5-Math-7B, efficiency {flop:.3f}; mean response chosen to match row 10's update_actor")
    port = Link(name="ib-ndr400", bytes_per_s=50e9, latency_s=2.7e-6)
    for cp, offload in ((1, False), (4, True)):
        found = None
        for i, gpus in ((10, 32), (11, 64), (12, 128)):
            cluster = load_cluster("8xh20").model_copy(update={"nodes": gpus // 8, "inter": port})
            strategy = TrainStrategy(dp=gpus // cp, cp=cp, zero_stage=3, micro_batch_tokens=36864 * cp, offload=offload)
            row = rows.loc[i]
            if found is None:
                found = brentq(
                    lambda x, row=row, cluster=cluster, strategy=strategy: (
                        predict(row, x, cluster, strategy, flop, 360e9, 16)[1] - row.update_actor_s
                    ),
                    50,
                    20000,
                )
                print(f" sequence parallel {cp}, offload {offload}: mean response {found:.0f} tokens")
            show(f"row {i}: {gpus} GPUs", row, predict(row, found, cluster, strategy, flop, 360e9, 16))


#: REAL's published seconds per call (7B actor and critic, 512 sequences of 1024 + 1024 tokens, 8 mini-batches, H100):
#: name, critic, train, GPUs, (TP, PP, DP), micro-batches per mini-batch, seconds.
REAL_CALLS = (
    ("reward inference, node 1", True, False, (2, 1, 4), 16, 6.0),
    ("reference inference, node 2", False, False, (1, 2, 4), 4, 8.0),
    ("critic inference, both nodes", True, False, (1, 2, 8), 8, 4.7),
    ("critic train, node 2", True, True, (4, 2, 1), 2, 28.1),
    ("actor train, node 1", False, True, (2, 4, 1), 2, 26.6),
    ("reward inference, heuristic", True, False, (8, 1, 2), 4, 7.3),
    ("reference inference, heuristic", False, False, (8, 1, 2), 4, 7.6),
    ("critic inference, heuristic", True, False, (8, 1, 2), 4, 6.8),
    ("critic train, heuristic", True, True, (8, 1, 2), 4, 24.3),
    ("actor train, heuristic", False, True, (8, 1, 2), 4, 24.7),
)


def check_real(flop: float) -> None:
    """REAL's per-call seconds (an input, not an output, of its comparison) with the carried-over efficiency."""
    print(f"REAL, H100, Megatron-like calls, efficiency {flop:.2f}: the share of row 4 carried over, nothing fitted")
    cluster = load_cluster("2x8xh100")
    body = load_model("llama-3-7b")
    for name, critic, train, (tp, pp, dp), micro, measured in REAL_CALLS:
        sequences = 512 // dp // (8 if train else 1)
        found = []
        for recompute in ("none", "full") if train else ("none",):
            strategy = TrainStrategy(
                dp=dp,
                tp=tp,
                pp=pp,
                zero_stage=1,
                micro_batch_sequences=max(sequences // micro, 1),
                recompute=recompute,
                sequence_parallel=tp > 1,
            )
            model = body.as_critic() if critic else body
            efficiency = TrainEfficiency(flop=flop, attention=0.62, overhead_tokens=600)
            cost = TrainCost(model, cluster, Ring(cluster, 360e9), strategy, efficiency)
            batch = np.full(512, 2048.0)
            found.append((cost.train_s(batch, 8) if train else cost.forward_s(batch)).total_s)
        shown = " / ".join(f"{x:5.1f} ({x / measured - 1:+4.0%})" for x in found)
        print(f"  {name:32s} measured {measured:5.1f} s, predicted {shown}" + ("  without / with recompute" * train))


def gemm_efficiency(folder: Path, gpu: str) -> float:
    """Median share of peak bf16 FLOP/s of measured GEMMs with at least 4,096 tokens and weights of 3,584 or more."""
    table = next(
        iter(sorted(folder.glob(f"{gpu.removesuffix('-80gb').replace('-', '_')}/gemm/sglang/0.5.10/*.parquet")))
    )
    gemm = pd.read_parquet(table)
    big = gemm[(gemm.gemm_dtype == "bfloat16") & (gemm.m >= 4096) & (gemm.n.between(3584, 60000)) & (gemm.k >= 3584)]
    flops = 2.0 * big.m * big.n * big.k / (big.latency * 1e-3)
    return float(flops.median() / load_gpu(gpu).bf16_flop_per_s)


def main() -> None:
    """Fit and print."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    rows = pd.read_csv(data / "rl_timings" / "verl_steps.csv").set_index("id")
    fsdp, bus, megatron = fit_a100(rows)
    check_h20(rows, fsdp)
    kernels = data / "kernels" / "aiconfigurator"
    a100 = gemm_efficiency(kernels, "a100-sxm-80gb")
    print(
        f"flop_efficiency for calibration files: share of the GEMM kernels' (A100 {a100:.2f}; bus {bus / 1e9:.0f} GB/s)"
    )
    print(f"  fsdp {fsdp / a100:.2f}, megatron {megatron / a100:.2f}; carried over to each GPU's own GEMM kernels:")
    for gpu in ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "l40s"):
        own = gemm_efficiency(kernels, gpu)
        print(f"  {gpu:14s} GEMM {own:.2f}  fsdp {own * fsdp / a100:.2f}  megatron {own * megatron / a100:.2f}")
    check_real(megatron / a100 * gemm_efficiency(kernels, "h100-sxm"))


if __name__ == "__main__":
    main()
