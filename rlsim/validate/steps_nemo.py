"""Measured steps of NeMo-RL v0.4 on H100: dense models and mixtures of experts, on policy and one step off policy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.cost.calibration import load_calibration
from rlsim.cost.roofline import RooflineStep
from rlsim.errors import CapacityError, ConfigError
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.validate.parts import Options
from rlsim.validate.rows import Row
from rlsim.validate.steps_stated import seconds

PERFORMANCE = "rl_timings/nemo_perf.csv"
RECIPES = "rl_timings/nemo_recipes.csv"
RELEASE = "v0.4"
CALIBRATION = "h100-vllm"
#: Columns of the table on mixtures of experts.
SPENT = (
    "row", "generation s", "log-probs s", "update s", "weights s", "TP", "batch",
    "products and experts ms", "attention", "all-reduces", "host", "other",
)  # fmt: skip
MODELS = {
    "LLAMA3.1_8B": "nemo-rl/llama-3.1-8b",
    "Qwen3-32B": "nemo-rl/qwen3-32b",
    "Qwen3-30B3A": "nemo-rl-moe/qwen3-30b-a3b",
    "Qwen3-235B": "nemo-rl-moe/qwen3-235b-a22b",
    "DeepSeek V3": "nemo-rl-moe/deepseek-v3",
}
#: GRPO one step off policy: generation may use weights of the step before the last. Log-probs begin when those of the
#: last one are on their way, the policy's first.
OFF_POLICY = (
    "generate -> reward",
    "generate -> old_log_prob",
    "generate -> ref_log_prob",
    "reward -> train",
    "old_log_prob -> train",
    "ref_log_prob -> train",
    "train -> weight_sync",
)

row = partial(Row, "steps")


def nemo_rows(data: Path, options: Options) -> tuple[list[Row], list[str], list[str]]:
    """The rows of the release, each as its recipe says, and what one step off gains; which cannot run, and why; and the
    lines of a table on where the time of mixtures of experts goes."""
    recipes = pd.read_csv(data / RECIPES).query(f"release == '{RELEASE}.0'").set_index("recipe")
    table = pd.read_csv(data / PERFORMANCE).query(f"release == '{RELEASE}'")
    known: dict[tuple[str, str], tuple[float, float]] = {}  # measured and simulated steps of a model
    rows: list[Row] = []
    refused: list[str] = []
    spent: list[str] = []
    for run in table[table["model"].isin(MODELS)].to_dict("records"):
        options.progress(f"NeMo-RL, {run['recipe']}")
        recipe = {str(key): value for key, value in recipes.loc[str(run["recipe"])].items()}
        prompt = run["tokens_per_sample_implied"] - run["mean_len"]
        kind = "one-step-off" if recipe["async_on"] else "on-policy"
        case = MODELS[run["model"]]
        try:
            found = seconds(nemo_experiment(recipe, case.split("/")[1], round(prompt)), run["mean_len"])
        except (CapacityError, ConfigError) as error:
            refused.append(f"- `{case}/{kind}`: {str(error).splitlines()[0]}")
            continue
        known[case, kind] = run["step_s"], found["step"]
        if case.startswith("nemo-rl-moe"):
            spent.append(f"| {case.split('/')[1]}, {kind} | {_spent(recipe, case.split('/')[1], run, found)} |")
        rows.append(row(f"{case}/{kind}", "step_time_s", run["step_s"], found["step"]))
    for case in MODELS.values():
        if {(case, "on-policy"), (case, "one-step-off")} <= known.keys():
            both = zip(known[case, "on-policy"], known[case, "one-step-off"], strict=True)
            measured, simulated = (on_policy / off for on_policy, off in both)
            rows.append(row(f"{case}/one-step-off", "gain", measured, simulated))
    return rows, refused, spent


def _spent(recipe: dict[str, Any], model: str, run: Mapping[Hashable, Any], calls: dict[str, float]) -> str:
    """Cells of `SPENT`: seconds of the calls, and milliseconds of a decode step of the full batch, its responses half
    grown."""
    tp, samples = int(recipe["gen_tp"]), int(recipe["prompts_per_step"]) * int(recipe["n"])
    gpus = int(recipe["rollout_gpus"] if recipe["async_on"] else recipe["total_gpus"])
    batch = samples * tp // gpus
    step = RooflineStep(load_model(model), tp, load_cluster(f"{recipe['nodes']}x8xh100"), load_calibration(CALIBRATION))
    parts = step.breakdown(batch, batch * (run["tokens_per_sample_implied"] - run["mean_len"] / 2))
    shown = [1e3 * parts.pop(name) for name in ("products", "attention", "all_reduce", "host")]
    inference_s = calls["old_log_prob"] + calls["ref_log_prob"]
    seconds_of = [calls["generate"], inference_s, calls["train"], calls["weight_sync"]]
    cells = [f"{one:.0f}" for one in seconds_of] + [str(tp), str(batch)]
    return " | ".join([*cells, *(f"{one:.1f}" for one in (*shown, 1e3 * sum(parts.values())))])


def nemo_experiment(recipe: dict[str, Any], model: str, prompt_tokens: int) -> dict[str, Any]:
    """A recipe as an experiment, without the trace's path."""
    asynchronous = bool(recipe["async_on"])
    batch = {"prompts": int(recipe["prompts_per_step"]), "responses": int(recipe["n"])}
    degrees = {name: int(recipe[f"train_{name}"]) for name in ("tp", "pp", "cp", "ep")}
    samples = batch["prompts"] * batch["responses"]
    return {
        "name": str(model),
        "cluster": f"{recipe['nodes']}x8xh100",
        "model": model,
        "calibration": CALIBRATION,
        "memory_utilization": float(recipe["gpu_mem_util"]),
        "trace": {"cap": int(recipe["max_total_len"]) - prompt_tokens, "default_prompt_tokens": prompt_tokens},
        "workflow": {**batch, **(_off_policy() if asynchronous else {"steps": 3})},
        "training": {
            "backend": "megatron",
            "gradients": "bf16",
            **degrees,
            "micro_batch_tokens": int(recipe["max_total_len"]) * int(recipe["train_mbs"]),
            "log_prob_micro_batch_tokens": int(recipe["max_total_len"]) * int(recipe["logprob_bs"]),
            "recompute": "full" if recipe["act_ckpt"] else "none",
            "offload": not asynchronous,
            "mini_batches": samples // int(recipe["train_gbs"]),
        },
        "seeds": 1,
        "systems": [_split(recipe, degrees) if asynchronous else {"verl": {"tp": int(recipe["gen_tp"])}}],
    }


def _off_policy() -> dict[str, Any]:
    kinds = {
        "generate": ("generate", "actor"), "reward": ("reward", "reward"), "old_log_prob": ("inference", "actor"),
        "ref_log_prob": ("inference", "reference"), "train": ("train", "actor"), "weight_sync": ("sync", "actor"),
    }  # fmt: skip
    calls = [{"name": name, "kind": kind, "model": model} for name, (kind, model) in kinds.items()]
    syncs = [
        {"source": "weight_sync", "target": call, "lag": lag} for call, lag in (("generate", 2), ("old_log_prob", 1))
    ]
    order = {"source": "old_log_prob", "target": "ref_log_prob", "barrier": True}
    edges = [*OFF_POLICY, *syncs, order]
    return {"algorithm": "custom", "calls": calls, "edges": edges, "group_advantage": True, "steps": 7}


def _split(recipe: dict[str, Any], degrees: dict[str, int]) -> dict[str, Any]:
    """Generation on the first GPUs, the rest on the others."""
    rollout, total = int(recipe["rollout_gpus"]), int(recipe["total_gpus"])
    others = {"gpus": f"{rollout}-{total - 1}", **degrees}
    calls = {"generate": {"gpus": f"0-{rollout - 1}", "tp": int(recipe["gen_tp"])}}
    calls |= dict.fromkeys(("old_log_prob", "train"), others) | {"ref_log_prob": {**others, "offload": True}}
    return {"name": "split", "use": [{"plan": {"calls": calls}}]}
