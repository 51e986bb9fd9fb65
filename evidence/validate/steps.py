"""Part `steps`: measured steps of real RL runs, by framework and plan, and iterations of trainers alone.

`megatron-moe`: mixtures of experts in pre-training with Megatron Core in bf16 on H800, 8 a node, micro-batches of whole
sequences, load forced to be balanced (30B: tokens beyond an expert's capacity dropped), all-to-all dispatcher,
distributed optimizer. Of XTuner's table, rows with DeepEP, dropped tokens, recomputation of the MoE part alone or ZeRO
and TP overlapped are left out: rlsim has none of these. `prime-rl`: full training of dense models and mixtures with
FSDP2, one sequence a micro-batch, two of them a GPU; `prime-sft`: supervised; `prime-lora`: adapters of rank 16;
`prime-lora-looped`: of mixtures on B200, where prime-rl's code takes one expert after the other. Left out: offloaded
activations and GPUs without a calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from evidence.validate.asynchronous import stated
from evidence.validate.parts import EVIDENCE, Options, Section
from evidence.validate.published import figures, measured_section, published_rows, told
from evidence.validate.rows import Kind, Row, markdown, read_rows
from evidence.validate.steps_nemo import SPENT, nemo_rows
from evidence.validate.steps_training import training_rows
from rlsim.base.schema import Schema
from rlsim.cost.calibration import load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.memory import BF16, call_bytes
from rlsim.cost.strategy import EXPERT_LAUNCH_S, TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

VERL = "verl_steps.csv"


def section(options: Options) -> Section:
    """Every measured step (about three minutes, most of it the search for plans)."""
    options.progress("ReaLHF")
    steps = {name: told(result) for name, result in figures(options, "realhf_steps").results().items()}
    realhf = published_rows(options, "steps", steps, file="realhf_steps")
    order = spearmanr([one.reference for one in realhf], [one.simulated for one in realhf])[0]
    nemo, refused, spent = nemo_rows(options)
    options.progress("trainers alone")
    found = [*realhf, *nemo, *trainer_rows(options.evidence), *verl_rows(options), *training_rows(options.evidence)]
    not_run = "\n".join(("Rows that cannot run, and why:", "", *refused)) if refused else "All rows run as published."
    tables = {
        "realhf_order": f"Rank correlation of rlsim's steps of ReaLHF with the measured ones: {order:.2f}.",
        "nemo_spent": markdown(SPENT, spent),
        "nemo_not_run": not_run,
    }
    return measured_section(found, 1, **tables)


def verl_rows(options: Options) -> list[Row]:
    """Every phase, and the step, of every row of veRL's that can be run."""
    table = pd.read_csv(options.evidence / VERL).set_index("id")
    measured = {f"row_{number}": phases for number, phases in table.to_dict("index").items()}
    found = stated(options, "verl_steps") | {"measured": measured}
    return published_rows(options, "steps", found, whose="measured", file="verl_steps")


class Iteration(Schema):
    """One configuration and its seconds for an optimizer step over `sequences` of `tokens` tokens each.

    `interleaved`: chunks of layers of a GPU, which divide the pipeline's bubble (Narayanan et al. 2021). `peak_gib`: of
    one GPU's memory, where it was printed (else 0). `lora_rank`: 0 where all weights are trained.
    """

    group: str
    model: str
    cluster: str
    calibration: str
    gpus: int
    tokens: int
    sequences: int
    micro_batch: int
    tp: int
    pp: int
    ep: int
    interleaved: int
    recompute: str
    attention: str
    logits: str
    iteration_s: float
    peak_gib: float = 0.0
    lora_rank: int = 0
    looped_experts: bool = False

    @property
    def case(self) -> str:
        degrees = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "vpp": self.interleaved}
        cut = "-".join(f"{name}{degree}" for name, degree in degrees.items() if name != "vpp" or degree > 1)
        where = cut if self.megatron else f"{self.gpus}-of-{self.cluster}-{self.attention}"
        return f"{self.group}/{self.model}/{where}/{self.micro_batch}x{self.tokens}-{self.recompute}"

    @property
    def megatron(self) -> bool:
        return self.group.startswith("megatron")

    @property
    def kind(self) -> Kind:
        """The launches of a layer with experts are fitted to the iteration whose micro-batches are the smallest, what
        reading a position takes to the smallest model that prime-rl trains."""
        return "input" if self.tp == 4 or (self.group, self.model) == ("prime-rl", "qwen3-0.6b") else "output"

    @property
    def strategy(self) -> TrainStrategy:
        kinds: dict[str, Any] = {"recompute": self.recompute, "logits": self.logits, "attention": self.attention}
        return TrainStrategy(
            dp=self.gpus // (self.tp * self.pp), tp=self.tp, pp=self.pp, ep=self.ep, sequence_parallel=self.tp > 1,
            zero_stage=1 if self.megatron else 3, micro_batch_sequences=self.micro_batch,
            lora_rank=self.lora_rank or None, looped_experts=self.looped_experts, **kinds,
        )  # fmt: skip

    @property
    def gpu_tokens(self) -> int:
        return self.tokens * self.sequences * self.tp * self.pp // self.gpus

    def simulated_s(self, expert_launch_s: float = EXPERT_LAUNCH_S) -> float:
        """The same by rlsim, with the share of the peak of the calibration, which none of these was fitted to."""
        cluster, backend = load_cluster(self.cluster), "megatron" if self.megatron else "fsdp"
        costs = CallCosts({"actor": load_model(self.model)}, cluster, load_calibration(self.calibration), backend)
        call = costs.of("actor", self.strategy)
        efficiency = replace(call.efficiency, expert_launch_s=expert_launch_s)
        call = TrainCost(call.model, cluster, costs.collectives, self.strategy, efficiency)
        time = call.train_s(np.full(self.sequences, float(self.tokens)))
        return time.total_s - time.bubble_s * (1 - 1 / self.interleaved)

    @property
    def simulated_gib(self) -> float:
        """The fullest GPU's peak by rlsim, as PyTorch reserves it.

        Its allocator keeps the block of the bf16 logits when these are fp32, as no larger tensor fits into it, until
        memory runs short: what is printed is `torch.cuda.max_memory_reserved`.
        """
        model, tokens = load_model(self.model), float(self.micro_batch * self.tokens)
        used = sum(call_bytes(model, self.strategy, tokens, backward=True).values())
        reserved = used + BF16 * tokens * model.vocab_size * (self.logits == "torch")
        return (reserved if reserved <= load_cluster(self.cluster).gpu.memory_bytes else used) / 2**30


def iterations(evidence: Path = EVIDENCE) -> list[Iteration]:
    """The published iterations."""
    return read_rows(evidence / "trainers.csv", Iteration)


def position_s(found: Sequence[Iteration]) -> float:
    """Seconds in which prime-rl's host reads the position of one token from the GPU and waits for it.

    Until June 2026 it looked for the ends of sequences so, token by token and with nothing else under way
    (`get_response_lengths`). What reinforcement learning takes longer than supervised training of the same shape, as
    far as the loss does not explain it.
    """
    rl = next(one for one in found if (one.group, one.kind) == ("prime-rl", "input"))
    sft = next(one for one in found if (one.group, one.model, one.tokens) == ("prime-sft", rl.model, rl.tokens))
    return (rl.iteration_s - sft.iteration_s - rl.simulated_s() + sft.simulated_s()) / rl.gpu_tokens


def trainer_rows(evidence: Path = EVIDENCE) -> Iterator[Row]:
    """Every published iteration beside rlsim's."""
    found = iterations(evidence)
    reading_s = position_s(found)
    for one in found:
        host_s = reading_s * one.gpu_tokens if one.group.startswith(("prime-rl", "prime-lora")) else 0.0
        yield Row("steps", one.case, "iteration_s", one.iteration_s, one.simulated_s() + host_s, kind=one.kind)
        if one.peak_gib > 0:
            yield Row("steps", one.case, "peak_gib", one.peak_gib, one.simulated_gib)
