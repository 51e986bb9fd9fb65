"""Published iterations of pre-training mixtures of experts with Megatron Core in bf16, beside rlsim's training call.

On H800, 8 a node, micro-batches of whole sequences, load forced to be balanced (30B: tokens beyond an expert's capacity
dropped), all-to-all dispatcher, distributed optimizer. Of XTuner's table, rows with DeepEP, dropped tokens,
recomputation of the MoE part alone or ZeRO and TP overlapped are left out: rlsim has none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.cost.calibration import load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.train_efficiency import EXPERT_LAUNCH_S
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.validate.parts import EVIDENCE
from rlsim.validate.rows import Kind, Row

CALIBRATION = "h100-vllm"


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One configuration and its seconds for an optimizer step over `sequences` of `tokens` tokens each.

    `interleaved`: chunks of layers of a GPU, which divide the pipeline's bubble (Narayanan et al. 2021).
    """

    model: str
    gpus: int
    tokens: int
    sequences: int
    micro_batch: int
    tp: int
    pp: int
    ep: int
    interleaved: int
    recompute: str
    iteration_s: float

    @property
    def case(self) -> str:
        cut = f"tp{self.tp}-pp{self.pp}-ep{self.ep}" + f"-vpp{self.interleaved}" * (self.interleaved > 1)
        return f"megatron-moe/{self.model}/{cut}/{self.micro_batch}x{self.tokens}-{self.recompute}"

    @property
    def kind(self) -> Kind:
        """The launches of a layer with experts are fitted to the iteration whose micro-batches are the smallest."""
        return "input" if self.tp == 4 else "output"

    def simulated_s(self, expert_launch_s: float = EXPERT_LAUNCH_S) -> float:
        """The same by rlsim, with the share of the peak of the calibration, which no mixture was fitted to."""
        cluster = load_cluster(f"{self.gpus // 8}x8xh800")
        costs = CallCosts({"actor": load_model(self.model)}, cluster, load_calibration(CALIBRATION), "megatron")
        kinds: dict[str, Any] = {"recompute": self.recompute, "logits": "fp32"}
        strategy = TrainStrategy(
            dp=self.gpus // (self.tp * self.pp), tp=self.tp, pp=self.pp, ep=self.ep, zero_stage=1,
            sequence_parallel=self.tp > 1, micro_batch_sequences=self.micro_batch, **kinds,
        )  # fmt: skip
        call = costs.of("actor", strategy)
        efficiency = replace(call.efficiency, expert_launch_s=expert_launch_s)
        call = TrainCost(call.model, cluster, costs.collectives, strategy, efficiency)
        time = call.train_s(np.full(self.sequences, float(self.tokens)))
        return time.total_s - time.bubble_s * (1 - 1 / self.interleaved)


def iterations(evidence: Path = EVIDENCE) -> list[Iteration]:
    """The published iterations."""
    table = pd.read_csv(evidence / "megatron.csv", keep_default_na=False).drop(columns="source")
    return [Iteration(**{str(name): value for name, value in row.items()}) for row in table.to_dict("records")]


def megatron_rows(evidence: Path = EVIDENCE) -> Iterator[Row]:
    """Every published iteration beside rlsim's."""
    for one in iterations(evidence):
        yield Row("steps", one.case, "iteration_s", one.iteration_s, one.simulated_s(), kind=one.kind)
