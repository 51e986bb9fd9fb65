"""Measured steps of colocated, synchronous veRL by phase: A100 or A800 with known mean lengths, H20 without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from rlsim.hardware import load_cluster
from rlsim.validate.parts import Options
from rlsim.validate.rows import Kind, Row
from rlsim.validate.steps_stated import SHAPE, seconds

STEPS = "verl_steps.csv"
#: Tokens, where a row states none. The response: of the same model on the same prompts elsewhere (AsyncFlow's runs).
GUESSED_RESPONSE = 1024
GUESSED_PROMPT = 150
#: Of a phase: its column, the call that it is, and what it is called here.
PHASES = (
    ("gen_s", "generate", "generate_s"),
    ("old_logprob_s", "old_log_prob", "old_log_prob_s"),
    ("update_actor_s", "train", "train_s"),
    ("step_s", "step", "step_time_s"),
)
#: Between the GPUs of rows 2 to 4, which name no link: the one whose bus rate is the 18 GB/s that their FSDP calls fit
#: (`scripts/fit_training.py`), as the A100's 300 GB/s give 240. PCIe 4 has such a rate.
PCIE = {"name": "pcie4x16", "bytes_per_s": 22.5e9, "latency_s": 1e-6}

row = partial(Row, "steps")


@dataclass(frozen=True)
class Stack:
    """What a row's script says beyond the table, and what is guessed (see texts/steps.md).

    `sequences`: of a micro-batch in training. `batch`: prompts and responses to each, where the table has none.
    `driver_us`: of the single controller, per padded token, fitted to the other rows. `fitted`: columns that another
    number is fitted to.
    """

    training: Mapping[str, Any]
    calibration: str = "h20-vllm"
    gpu: str = "h20"
    tp: int = 4
    sequences: int | None = None
    batch: tuple[int, int] | None = None
    driver_us: float = 0.185
    shape: str = "dapo-growing"
    memory_utilization: float = 0.8
    fitted: tuple[str, ...] = ()
    note: str = "guessed: mean response 1,024 tokens"


def _a100(*fitted: str, **training: Any) -> Stack:
    sequences = 4 if training else 16
    chosen = training or {"backend": "fsdp"}
    return Stack({**chosen, "mini_batches": 4}, "a800-vllm", "a800", 2, sequences, shape=SHAPE,
                 memory_utilization=0.78, fitted=fitted, note="guessed: PCIe between the GPUs")  # fmt: skip


def _fsdp2(max_tokens: int, shard: int) -> dict[str, Any]:
    """Of the scripts: Ulysses 4, token budgets of twice (log-probs: three times) the longest sequence a GPU."""
    return {"backend": "fsdp", "cp": 4, "shard_gpus": shard, "offload": True, "mini_batches": 16,
            "micro_batch_tokens": 8 * max_tokens, "log_prob_micro_batch_tokens": 12 * max_tokens}  # fmt: skip


_MEGATRON = {"backend": "megatron", "tp": 2, "pp": 2, "recompute": "none"}
_PHASES = ("old_logprob_s", "update_actor_s")
STACKS = {
    2: _a100(*_PHASES),
    3: _a100(*_PHASES),
    4: _a100(**_MEGATRON),
    10: Stack(_fsdp2(30720, 8), driver_us=0.172),
    11: Stack(_fsdp2(30720, 8), driver_us=0.190),
    12: Stack(_fsdp2(30720, 8), driver_us=0.196),
    28: Stack(_fsdp2(10240, 2), tp=2, batch=(512, 12), driver_us=0.187),
    29: Stack({**_MEGATRON, "mini_batches": 16, "offload": True}, tp=2, sequences=2, batch=(512, 16), driver_us=0.184),
}
#: Seconds of a step that are none of its phases: row 3's mean holds a test of 175 s every five steps.
OUTSIDE_S = {3: 175 / 5}


def verl_rows(options: Options) -> Iterator[Row]:
    """Every phase, and the step, of every row that can be run."""
    table = pd.read_csv(options.evidence / STEPS).set_index("id")
    for number, stack in STACKS.items():
        options.progress(f"veRL, row {number}")
        run: dict[str, Any] = {str(column): value for column, value in table.loc[number].items()}
        run["step_s"] -= OUTSIDE_S.get(number, 0.0)
        experiment, mean = verl_experiment(run, stack)
        found = seconds(experiment, mean, stack.shape)
        for column, call, quantity in PHASES:
            kind: Kind = "input" if column in stack.fitted else "output"
            yield row(f"verl/row-{number}", quantity, float(run[column]), found[call], stack.note, kind)


def verl_experiment(run: Mapping[str, Any], stack: Stack) -> tuple[dict[str, Any], float]:
    """A row as an experiment without the trace's path, and its mean response (tokens)."""

    def stated(key: str, otherwise: float) -> float:
        return otherwise if math.isnan(run[key]) else run[key]

    prompts, responses = stack.batch or (int(run["prompts_per_step"]), int(run["n"]))
    prompt, response = stated("mean_prompt", GUESSED_PROMPT), stated("mean_response", GUESSED_RESPONSE)
    training = {**stack.training, "driver_per_token": stack.driver_us * 1e-6}
    if stack.sequences:
        training["micro_batch_tokens"] = round(stack.sequences * (prompt + response))
    cluster: Any = f"{int(run['n_gpus']) // 8}x8x{stack.gpu}"
    if stack.gpu == "a800":
        cluster = {**load_cluster(cluster).model_dump(mode="json"), "gpu": "a800-sxm-80gb", "intra": PCIE}
    experiment = {
        "name": "verl",
        "cluster": cluster,
        "model": "qwen2.5-7b",
        "calibration": stack.calibration,
        "engine": {"chunked_prefill": stack.gpu != "a800"},
        "memory_utilization": stack.memory_utilization,
        "trace": {"cap": int(run["max_response"]), "default_prompt_tokens": round(prompt)},
        "workflow": {"prompts": prompts, "responses": responses, "steps": 2, "reference": False},
        "training": training,
        "seeds": 1,
        "systems": [{"verl": {"tp": stack.tp}}],
    }
    return experiment, response
