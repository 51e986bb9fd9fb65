"""REAL's per-call seconds (an input, not an output, of its comparison), predicted with a carried-over efficiency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.stacks import Ring, Timing
from rlsim.cost.strategy import Recompute, TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.train_efficiency import TrainEfficiency
from rlsim.hardware import load_cluster
from rlsim.models import load_model

BUS = 360e9  # bus rate of NCCL over H100's NVLink, bytes/s
SEQUENCES, TOKENS, MINI_BATCHES = 512, 2048, 8


@dataclass(frozen=True)
class Call:
    """One published call of a 7B actor or critic over 512 sequences of 1024 + 1024 tokens on H100."""

    name: str
    critic: bool
    train: bool
    layout: tuple[int, int, int]  # TP, PP, DP
    micro_batches: int  # per mini-batch; 8 mini-batches when training
    measured_s: float

    def predict(self, efficiency: float, recompute: Recompute) -> Timing:
        """Seconds at a share of peak."""
        tp, pp, dp = self.layout
        sequences = SEQUENCES // dp // (MINI_BATCHES if self.train else 1)
        strategy = TrainStrategy(
            dp=dp,
            tp=tp,
            pp=pp,
            zero_stage=1,
            micro_batch_sequences=max(sequences // self.micro_batches, 1),
            recompute=recompute,
            sequence_parallel=tp > 1,
        )
        cluster, body = load_cluster("2x8xh100"), load_model("llama-3-7b")
        shares = TrainEfficiency(flop=efficiency, attention=0.62, overhead_tokens=600)
        cost = TrainCost(body.as_critic() if self.critic else body, cluster, Ring(cluster, BUS), strategy, shares)
        batch = np.full(SEQUENCES, float(TOKENS))
        found = cost.train_s(batch, MINI_BATCHES) if self.train else cost.forward_s(batch)
        return Timing(found.total_s, self.measured_s)


CALLS = (
    Call("reward inference, node 1", True, False, (2, 1, 4), 16, 6.0),
    Call("reference inference, node 2", False, False, (1, 2, 4), 4, 8.0),
    Call("critic inference, both nodes", True, False, (1, 2, 8), 8, 4.7),
    Call("critic train, node 2", True, True, (4, 2, 1), 2, 28.1),
    Call("actor train, node 1", False, True, (2, 4, 1), 2, 26.6),
    Call("reward inference, heuristic", True, False, (8, 1, 2), 4, 7.3),
    Call("reference inference, heuristic", False, False, (8, 1, 2), 4, 7.6),
    Call("critic inference, heuristic", True, False, (8, 1, 2), 4, 6.8),
    Call("critic train, heuristic", True, True, (8, 1, 2), 4, 24.3),
    Call("actor train, heuristic", False, True, (8, 1, 2), 4, 24.7),
)


def check_real(efficiency: float) -> list[tuple[Call, tuple[Timing, ...]]]:
    """Every call: one prediction for inference, without and with recomputation for training."""
    recomputes: dict[bool, tuple[Recompute, ...]] = {False: ("none",), True: ("none", "full")}
    return [(call, tuple(call.predict(efficiency, how) for how in recomputes[call.train])) for call in CALLS]
