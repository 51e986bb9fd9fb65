"""Part `steps`: measured steps of real RL runs, by framework and plan, beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
from scipy.stats import spearmanr

from evidence.validate.parts import Options, Section
from evidence.validate.published import measured_section, published_rows
from evidence.validate.rows import Kind, Row, markdown
from evidence.validate.runs import run
from evidence.validate.steps_nemo import SPENT, nemo_rows
from evidence.validate.steps_stated import stated
from evidence.validate.steps_trainer import trainer_rows

REALHF = "realhf_steps.csv"
VERL = "verl_steps.csv"
#: Of ReaLHF's actors, in billions of parameters: launches are fitted to it (`scripts/fit_calibrations.py eager`).
FITTED = 7
#: Share of the peak that its training and inference reach, fitted to the same steps.
EFFICIENCY = 0.50
#: Of ReaLHF's runs: actor by billions of parameters.
ACTORS = {7: "llama-2-7b", 34: "llama-2-34b"}
CLUSTERS = {1: "8xa800", 4: "4x8xa800"}
PROMPT_TOKENS = 128
MINI_BATCHES = 4
_CALLS = ("reward_score", "ref_log_prob", "values", "train_critic", "train")

row = partial(Row, "steps")


def section(options: Options) -> Section:
    """Every measured step (about three minutes, most of it the search for plans)."""
    realhf = list(realhf_rows(pd.read_csv(options.evidence / REALHF), options))
    order = spearmanr([one.reference for one in realhf], [one.simulated for one in realhf])[0]
    nemo, refused, spent = nemo_rows(options)
    options.progress("trainers alone")
    found = [*realhf, *nemo, *trainer_rows(options.evidence), *verl_rows(options)]
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


def realhf_rows(
    table: pd.DataFrame, options: Options, calibration: str | Path = "a800-sglang", efficiency: float = EFFICIENCY
) -> Iterator[Row]:
    """ReaLHF's steps, by actor, batch and plan; those of a searched plan with the plan that rlsim finds."""
    setting = ["model_b_parameters", "nodes_of_8_a800", "batch", "generated_tokens"]
    for numbers, runs in table.groupby(setting, sort=False):
        size, nodes, batch, tokens = map(int, cast(tuple[int, ...], numbers))
        options.progress(f"ReaLHF, {size}B on {nodes * 8} GPUs, {tokens} tokens")
        plans = [plan.split()[0] for plan in runs["plan"]]
        steps = realhf_experiment(size, nodes, batch, tokens, plans, calibration, efficiency)
        seconds = run(steps).summary().set_index("system")["step_time_s"]
        for plan, measured in zip(plans, runs["step_s"], strict=True):
            case = f"realhf/llama-2-{size}b/{plan}/{batch}x{tokens}"
            kind: Kind = "input" if size == FITTED else "output"
            yield row(case, "step_time_s", measured, seconds[plan], kind=kind)


def realhf_experiment(
    size: int,
    nodes: int,
    batch: int,
    tokens: int,
    plans: Sequence[str],
    calibration: str | Path = "a800-sglang",
    efficiency: float = EFFICIENCY,
) -> dict[str, Any]:
    """PPO as ReaLHF ran it: `tokens` new tokens of each of `batch` prompts, an actor of `size` billion parameters.

    Generation runs without CUDA graphs, and new weights go from layout to layout without an engine that loads them. The
    heuristic's stages go over the nodes; twice as many micro-batches as stages are assumed.
    """
    layout = {"gpus": "all", "tp": 8, "pp": nodes}
    calls = {"generate": layout} | {name: layout | {"micro_batches": 2 * nodes} for name in _CALLS}
    systems = {"heuristic": {"plan": {"calls": calls}}, "searched": "real"}
    return {
        "name": f"realhf-{size}b",
        "cluster": CLUSTERS[nodes],
        "model": ACTORS[size],
        "models": {"critic": ACTORS[7], "reward": ACTORS[7]},
        "calibration": str(calibration),
        "engine": {"graphs": False},
        "weight_sync": "reshard",
        "trace": {"fixed": tokens, "cap": tokens, "default_prompt_tokens": PROMPT_TOKENS},
        "workflow": {
            "algorithm": "ppo", "prompts": batch, "responses": 1, "steps": 3, "reward": {"order": "beside_log_probs"},
        },
        "training": {"backend": "megatron", "efficiency": efficiency, "mini_batches": MINI_BATCHES},
        "seeds": 1,
        "systems": [{"name": plan, "use": [systems[plan]]} for plan in plans],
    }  # fmt: skip
