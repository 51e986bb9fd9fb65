"""Measured steps of colocated, synchronous veRL by phase: A100 or A800 with known mean lengths, H20 without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.validate.parts import Options
from rlsim.validate.rows import Row
from rlsim.validate.steps_stated import cluster_of, seconds

STEPS = "rl_timings/verl_steps.csv"
#: Tokens, where a row states none. The response: of the same model on the same prompts elsewhere (AsyncFlow's runs).
GUESSED_RESPONSE = 1024
GUESSED_PROMPT = 150
#: Of a phase: its column, and the call that it is.
PHASES = {"gen_s": "generate", "old_logprob_s": "old_log_prob", "update_actor_s": "train", "step_s": "step"}

row = partial(Row, "steps")


@dataclass(frozen=True)
class Stack:
    """What a row's script says beyond the table, and what is guessed (see texts/steps.md)."""

    cluster: str
    calibration: str
    tp: int  # of generation
    training: Mapping[str, Any]
    sequences: tuple[int, int] | None = None  # of a micro-batch: training, log-probs
    responses: tuple[int, int] | None = None  # prompts and responses to each, where the table has none
    memory_utilization: float = 0.78
    engine: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""


def _dapo(cap: int, mini_batches: int, **training: Any) -> dict[str, Any]:
    whole = 2048 + cap
    return {"backend": "fsdp", "cp": 4, "offload": True, "micro_batch_tokens": 2 * whole * 4,
            "mini_batches": mini_batches, **training}  # fmt: skip


_FSDP = {"backend": "fsdp", "mini_batches": 4}
_H20 = {"chunked_prefill": True}
_LENGTHS = "mean response not stated: 1,024 guessed"
STACKS = {
    2: Stack("8xa800", "a100-vllm", 2, _FSDP, (16, 16), missing="interconnect"),
    3: Stack("8xa800", "a100-vllm", 2, _FSDP, (16, 16), missing="interconnect"),
    4: Stack("8xa800", "a100-vllm", 2, {"backend": "megatron", "tp": 2, "pp": 2, "mini_batches": 4, "recompute": "none"},
             (4, 4), missing="interconnect"),
    10: Stack("4x8xh20", "h20-vllm", 4, _dapo(28672, 16), memory_utilization=0.8, engine=_H20, missing=_LENGTHS),
    11: Stack("4x8xh20", "h20-vllm", 4, _dapo(28672, 16), memory_utilization=0.8, engine=_H20, missing=_LENGTHS),
    12: Stack("4x8xh20", "h20-vllm", 4, _dapo(28672, 16), memory_utilization=0.8, engine=_H20, missing=_LENGTHS),
    28: Stack("4x8xh20", "h20-vllm", 2, _dapo(20480, 16), None, (512, 12), 0.8, _H20, _LENGTHS),
    29: Stack("4x8xh20", "h20-vllm", 2, {"backend": "megatron", "tp": 2, "pp": 2, "mini_batches": 16,
                                         "recompute": "none", "offload": True}, (2, 4), (512, 16), 0.8, _H20, _LENGTHS),
}  # fmt: skip


def verl_rows(data: Path, options: Options) -> Iterator[Row]:
    """Every phase of every row that can be run."""
    table = pd.read_csv(data / STEPS).set_index("id")
    for number, stack in STACKS.items():
        options.progress(f"veRL, row {number}")
        run = table.loc[number].to_dict()
        experiment, mean = verl_experiment(run, stack)
        found = seconds(experiment, mean)
        for column, call in PHASES.items():
            name = f"verl/row-{number}"
            yield row(name, f"{call}_s" if call != "step" else "step_time_s", run[column], found[call], stack.missing)


def verl_experiment(run: Mapping[str, Any], stack: Stack) -> tuple[dict[str, Any], float]:
    """A row as an experiment without the trace's path, and its mean response (tokens)."""

    def stated(key: str, otherwise: float) -> float:
        return otherwise if math.isnan(run[key]) else run[key]

    prompts, responses = stack.responses or (int(run["prompts_per_step"]), int(run["n"]))
    prompt, response = stated("mean_prompt", GUESSED_PROMPT), stated("mean_response", GUESSED_RESPONSE)
    training = dict(stack.training)
    if stack.sequences:
        training["micro_batch_tokens"] = round(stack.sequences[0] * (prompt + response))
    experiment = {
        "name": "verl",
        "cluster": cluster_of(stack.cluster, int(run["n_gpus"]) // 8),
        "model": "qwen2.5-7b",
        "calibration": stack.calibration,
        "engine": dict(stack.engine),
        "memory_utilization": stack.memory_utilization,
        "trace": {"cap": int(run["max_response"]), "default_prompt_tokens": round(prompt)},
        "workflow": {"prompts": prompts, "responses": responses, "steps": 2, "reference": False},
        "training": training,
        "seeds": 1,
        "systems": [{"verl": {"tp": stack.tp}}],
    }
    return experiment, response
