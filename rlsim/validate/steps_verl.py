"""Measured steps of colocated, synchronous veRL by phase: A100 or A800 with known mean lengths, H20 without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.hardware import load_cluster
from rlsim.schema import Schema, load
from rlsim.validate.parts import EVIDENCE, Options
from rlsim.validate.rows import Kind, Row
from rlsim.validate.steps_stated import seconds

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
#: (`scripts/fit_calibrations.py training`), as the A100's 300 GB/s give 240. PCIe 4 has such a rate.
PCIE = {"name": "pcie4x16", "bytes_per_s": 22.5e9, "latency_s": 1e-6}

row = partial(Row, "steps")


class Stack(Schema):
    """What a row's script says beyond the table, and what is guessed (see `verl_steps.yaml` of the evidence)."""

    training: dict[str, Any]
    calibration: str = "h20-vllm"
    gpu: str = "h20"
    tp: int = 4
    sequences: int | None = None
    batch: tuple[int, int] | None = None
    driver_us: float = 0.185
    shape: str = "dapo-growing"
    memory_utilization: float = 0.8
    fitted: tuple[str, ...] = ()
    outside_s: float = 0.0
    note: str = "guessed: mean response 1,024 tokens"


class Stacks(Schema):
    """By the table's `id`."""

    rows: dict[int, Stack]


def stacks(evidence: Path = EVIDENCE) -> dict[int, Stack]:
    """The stacks of the rows that can be run."""
    return load(evidence / "verl_steps.yaml", Stacks).rows


def verl_rows(options: Options) -> Iterator[Row]:
    """Every phase, and the step, of every row that can be run."""
    table = pd.read_csv(options.evidence / STEPS).set_index("id")
    for number, stack in stacks(options.evidence).items():
        options.progress(f"veRL, row {number}")
        run: dict[str, Any] = {str(column): value for column, value in table.loc[number].items()}
        run["step_s"] -= stack.outside_s
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
        "engine": {"chunked_prefill": stack.gpu != "a800", "async_scheduling": False},
        "memory_utilization": stack.memory_utilization,
        "trace": {"cap": int(run["max_response"]), "default_prompt_tokens": round(prompt)},
        "workflow": {"prompts": prompts, "responses": responses, "steps": 2, "reference": False},
        "training": training,
        "seeds": 1,
        "systems": [{"verl": {"tp": stack.tp}}],
    }
    return experiment, response
