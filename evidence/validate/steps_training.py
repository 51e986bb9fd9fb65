"""Training calls of veRL by FSDP and Megatron, from the MFU that it prints and the seconds of its calls.

veRL counts 6 FLOPs for each token and parameter (embedding and head both) and 12 for each pair of a query and a key,
masked ones too (`FlopsCounter`), over the seconds of the optimizer steps alone: neither offload nor the controller is
in them. So an MFU says how long a batch takes whose lengths are known but for a few percent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq

from evidence.validate.parts import EVIDENCE
from evidence.validate.rows import Kind, Row, read_rows
from rlsim.base.schema import Schema
from rlsim.cost.calibration import load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.flops import Floats
from rlsim.cost.strategy import EXPERT_IMBALANCE, TrainStrategy, attention_of, context_parallel_of, logits_of
from rlsim.cost.train import TrainTime
from rlsim.models.hardware import load_cluster
from rlsim.models.layers import Experts
from rlsim.models.model import load_model

PROMPT_TOKENS = 150  # assumed: DAPO's questions with their template
SPREAD = 0.8  # of log response length, assumed
RESPONSES = 16
#: Seconds in which veRL's single controller hands a call a token of its padded batch (`scripts/fit_calibrations.py
#: training`).
DRIVER_S = 0.107e-6
#: Mean responses of runs that state none, as the counter implies: by the slope of their seconds over 1 / (MFU × GPUs)
#: on H100, of 235B by its run of 64 prompts alone. A test works them out.
IMPLIED = {"qwen2.5-7b": 1220.0, "qwen3-30b-a3b": 945.0, "qwen3-235b-a22b": 5370.0}


class TrainingRun(Schema):
    """One configuration of veRL, the seconds of its calls and its MFU; token budgets are those of a CP group."""

    id: str
    model: str
    cluster: str
    backend: Literal["fsdp", "megatron"]
    tp: int
    pp: int
    interleaved: int
    cp: int
    ep: int
    shard_gpus: int | None = None
    recompute: str
    fused_rope: bool = True
    micro_batch_tokens: int = 16384
    micro_batch_sequences: int | None = None
    log_prob_micro_batch_tokens: int | None = None
    log_prob_micro_batch_sequences: int | None = None
    prompts: int
    mini_batches: int
    cap: int
    mean_response: float | None = None
    update_actor_s: float | None = None
    old_log_prob_s: float | None = None
    mfu: float

    @property
    def mixture(self) -> bool:
        return any(isinstance(layer.mlp, Experts) for layer in load_model(self.model).groups)

    @property
    def case(self) -> str:
        kind = "-moe" if self.mixture else "" if self.fused_rope else "-unfused-rope"
        return f"verl-{self.backend}{kind}/{self.group}/{self.id}"

    @property
    def group(self) -> str:
        return f"{self.model}/{self.cluster.rpartition('x')[2]}"

    @property
    def kind(self) -> Kind:
        """What is fitted to runs of DAPO on H100: the traffic of FSDP and Megatron to the 7B, experts' balance to the
        30B, the seconds of an expert that runs by itself to its one run under FSDP."""
        fitted = self.group in ("qwen2.5-7b/h100", "qwen3-30b-a3b/h100") and self.id.startswith("dapo")
        return "input" if fitted and self.fused_rope else "output"

    @property
    def log_probs_kind(self) -> Kind:
        """The controller's time is fitted to those of dense models, experts' balance to those of the 30B on H100."""
        dense = not self.mixture and self.fused_rope
        return "input" if dense or (self.kind == "input" and self.backend == "megatron") else "output"

    @property
    def lengths(self) -> Floats:
        """Of every sequence, prompt included: lognormal responses cut at the cap."""
        mean = self.mean_response or IMPLIED[self.model]
        return lengths(self.prompts * RESPONSES, PROMPT_TOKENS, mean, self.cap, SPREAD)

    @property
    def padded_tokens(self) -> float:
        """Of the batch, every sequence as long as the longest possible one (prompts of at most 2,048 tokens)."""
        return len(self.lengths) * (self.cap + 2048.0)

    @property
    def counted_s(self) -> float:
        """Seconds of the optimizer steps over these lengths at the printed MFU."""
        model, cluster = load_model(self.model), load_cluster(self.cluster)
        weights = sum(count * layer.active_weights for layer, count in model.groups.items())
        heads: Any = [(count, layer.attention) for layer, count in model.groups.items()]
        pairs = sum(count * attention.heads * attention.head_dim for count, attention in heads)
        flops = 6.0 * (weights + 2 * model.vocab_size * model.hidden_size) * self.lengths.sum()
        flops += 12.0 * pairs * (self.lengths**2).sum()
        return float(flops / (self.mfu * cluster.gpus * cluster.gpu.bf16_flop_per_s))

    @property
    def strategy(self) -> TrainStrategy:
        fsdp, share = self.backend == "fsdp", self.tp * self.pp * self.cp
        own = [one.name for one in fields(TrainStrategy) if one.name in TrainingRun.model_fields]
        kinds: dict[str, Any] = {name: getattr(self, name) for name in own}
        return TrainStrategy(
            **kinds, dp=load_cluster(self.cluster).gpus // share, offload=True, host_memory="pageable",
            sequence_parallel=self.tp > 1, zero_stage=3 if fsdp else 1, logits=logits_of(self.backend, not fsdp),
            attention=attention_of(self.backend), context_parallel=context_parallel_of(self.backend),
            looped_experts=fsdp,
        )  # fmt: skip

    def simulated(self, expert_imbalance: float = EXPERT_IMBALANCE) -> tuple[TrainTime, TrainTime]:
        """Log-probs and update by rlsim."""
        cluster = load_cluster(self.cluster)
        calibration = load_calibration(f"{cluster.gpu.name.partition('-')[0]}-vllm")
        costs = CallCosts({"actor": load_model(self.model)}, cluster, calibration, self.backend)
        call = costs.of("actor", replace(self.strategy, expert_imbalance=expert_imbalance))
        return call.forward_s(self.lengths), call.train_s(self.lengths, self.mini_batches)

    def steps_s(self, update: TrainTime) -> float:
        """Seconds of an update's optimizer steps; interleaved stages divide the pipeline's bubble."""
        return update.total_s - update.offload_s - update.bubble_s * (1 - 1 / self.interleaved)


def lengths(count: int, prompt: float, response: float, cap: float, spread: float) -> Floats:
    """`count` lengths, prompt included: lognormal responses cut at `cap` with mean `response`, always the same."""
    draws = np.exp(spread * np.random.default_rng(0).standard_normal(count))
    scale = float(brentq(lambda x: float(np.minimum(draws * x, cap).mean()) - response, 1e-3, 1e6))
    return np.asarray(np.round(np.minimum(draws * scale, cap)) + prompt)


def training_runs(evidence: Path = EVIDENCE) -> list[TrainingRun]:
    """The measured runs."""
    return read_rows(evidence / "verl_training.csv", TrainingRun)


def training_rows(evidence: Path) -> Iterator[Row]:
    """Every run: the optimizer steps, and log-probs where lengths are known, the controller's time among them."""
    for run in training_runs(evidence):
        log_probs, update = run.simulated()
        yield Row("steps", run.case, "optimizer_steps_s", run.counted_s, run.steps_s(update), kind=run.kind)
        if run.old_log_prob_s:
            whole_s = log_probs.total_s + DRIVER_S * run.padded_tokens
            yield Row("steps", run.case, "old_log_prob_s", run.old_log_prob_s, whole_s, kind=run.log_probs_kind)
