"""Measured steps of NeMo-RL: v0.4 on H100, dense models and mixtures of experts, on policy and one step off policy; a
later dense one on GB200."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from evidence.validate.asynchronous import SHAPE, seconds
from evidence.validate.parts import EVIDENCE, Options
from evidence.validate.rows import Row, number
from rlsim.base.reading import read_yaml
from rlsim.cost.calibration import load_calibration
from rlsim.cost.derived import HostTime
from rlsim.cost.roofline import RooflineStep
from rlsim.errors import CapacityError, ConfigError
from rlsim.frameworks.nemo import from_nemo
from rlsim.frameworks.parts import Options as InitOptions
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

PERFORMANCE = "nemo_steps.csv"
RECIPES = "nemo_recipes.csv"
RELEASE = "v0.4"
#: By GPUs of a node.
GPUS = {8: "h100", 4: "gb200"}
#: The release whose recipe is that of the row on GB200, which is of the weeks before the next.
GB200_RELEASE = "v0.6.0"
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
#: Steps that are simulated: colocated, and one step off policy, where the first are not steady.
STEPS, STEPS_OFF = 10, 20


row = partial(Row, "steps")


def nemo_rows(options: Options) -> tuple[list[Row], list[str], list[list[str]]]:
    """The rows of the release, each as its recipe says, and what one step off gains; which cannot run, and why; and by
    mixture of experts where its time goes (`SPENT`)."""
    recipes = _recipes(options.evidence, f"{RELEASE}.0")
    table = pd.read_csv(options.evidence / PERFORMANCE).query(f"release == '{RELEASE}'")
    known: dict[tuple[str, str], tuple[float, float]] = {}  # measured and simulated steps of a model
    rows = [_on_gb200(options.evidence)]
    refused: list[str] = []
    spent: list[list[str]] = []
    for run in table[table["model"].isin(MODELS)].to_dict("records"):
        options.progress(f"NeMo-RL, {run['recipe']}")
        recipe = recipes[run["recipe"]]
        prompt = run["tokens_per_sample_implied"] - run["mean_len"]
        kind = "one-step-off" if recipe["async_on"] else "on-policy"
        case = MODELS[run["model"]]
        try:
            experiment = nemo_experiment(recipe, case.split("/")[1], round(prompt), options.evidence)
            found = seconds(experiment, run["mean_len"])
        except (CapacityError, ConfigError) as error:
            refused.append(f"- `{case}/{kind}`: {str(error).splitlines()[0]}")
            continue
        known[case, kind] = run["step_s"], found["step"]
        if case.startswith("nemo-rl-moe"):
            spent.append([f"{case.split('/')[1]}, {kind}", *_spent(recipe, experiment, run, found)])
        rows.append(row(f"{case}/{kind}", "step_time_s", run["step_s"], found["step"]))
    for case in MODELS.values():
        if {(case, "on-policy"), (case, "one-step-off")} <= known.keys():
            measured_s, own_s = zip(known[case, "on-policy"], known[case, "one-step-off"], strict=True)
            (gain, told), (own_gain, own_told) = _gain(*measured_s), _gain(*own_s)
            rows.append(row(f"{case}/one-step-off", "gain", gain, own_gain, f"measured {told}; {own_told}"))
    return rows, refused, spent


def _recipes(evidence: Path, release: str) -> Mapping[Any, dict[Any, Any]]:
    return pd.read_csv(evidence / RECIPES).query(f"release == '{release}'").set_index("recipe").to_dict("index")


def _gain(before_s: float, after_s: float) -> tuple[float, str]:
    return before_s / after_s, f"{number(before_s)} / {number(after_s)} s"


def _on_gb200(evidence: Path) -> Row:
    """Tokens a second and GPU of Llama-3.1-8B on policy on eight GB200s, with the lengths of the same row on H100."""
    table = pd.read_csv(evidence / PERFORMANCE)
    table = table.query("model == 'LLAMA3.1_8B' and off_policy_steps == 0").set_index("gpu")
    run, like = (table.loc[gpu].to_dict() for gpu in ("GB200", "H100"))
    recipe = _recipes(evidence, GB200_RELEASE)[run["recipe"]]
    prompt_tokens = round(like["tokens_per_sample_implied"] - like["mean_len"])
    experiment = nemo_experiment(recipe, "llama-3.1-8b", prompt_tokens, evidence)
    tokens = run["samples_per_step"] * like["tokens_per_sample_implied"]
    simulated = tokens / seconds(experiment, like["mean_len"])["step"] / run["n_gpus"]
    note = "guessed: the lengths of the row on H100"
    return row("nemo-rl-gb200/llama-3.1-8b/on-policy", "tokens_per_s_gpu", run["tok_s_gpu"], simulated, note)


def _spent(
    recipe: dict[str, Any], experiment: Mapping[str, Any], run: Mapping[Hashable, Any], calls: dict[str, float]
) -> list[str]:
    """Cells of `SPENT`: seconds of the calls, and milliseconds of a decode step of the full batch, its responses half
    grown."""
    tp, samples = int(recipe["gen_tp"]), int(recipe["prompts_per_step"]) * int(recipe["n"])
    gpus = int(recipe["rollout_gpus"] if recipe["async_on"] else recipe["total_gpus"])
    batch = samples * tp // gpus
    cluster, priced = load_cluster(experiment["cluster"]), load_calibration(experiment["calibration"])
    step = RooflineStep(load_model(experiment["model"]), tp, cluster, priced)
    parts = step.breakdown(batch, batch * (run["tokens_per_sample_implied"] - run["mean_len"] / 2))
    parts["host"] = HostTime(priced.host).iteration_s(batch, prefills=False)
    shown = [1e3 * parts.pop(name) for name in ("products", "attention", "all_reduce", "host")]
    inference_s = calls["old_log_prob"] + calls["ref_log_prob"]
    seconds_of = [calls["generate"], inference_s, calls["train"], calls["weight_sync"]]
    cells = [f"{one:.0f}" for one in seconds_of] + [str(tp), str(batch)]
    return [*cells, *(f"{one:.1f}" for one in (*shown, 1e3 * sum(parts.values())))]


def nemo_experiment(
    recipe: Mapping[str, Any], model: str, prompt_tokens: int, evidence: Path = EVIDENCE
) -> dict[str, Any]:
    """A recipe as `rlsim init --from-nemo` reads it: what is configured alone, without the trace's path.

    `recipe` has columns of the table of recipes; those that are missing keep NeMo-RL's defaults.
    """
    keys = read_yaml(evidence / "nemo_keys.yaml")  # by the table's columns, and what is the same in all
    known = {**recipe, "rollout_nodes": None, "colocated": not recipe["async_on"]}
    if recipe["async_on"]:
        known["rollout_gpus_per_node"] = min(recipe["rollout_gpus"], recipe["gpus_per_node"])
        known["rollout_nodes"] = recipe["rollout_gpus"] // known["rollout_gpus_per_node"]
    stated = {key: known[column] for column, key in keys["columns"].items() if known.get(column) is not None}
    every = {**keys["always"], **stated}
    given = [f"{key}={str(value).removesuffix('.0')}" for key, value in every.items() if value == value]
    with TemporaryDirectory() as folder:
        start = Path(folder) / "recipe.yaml"
        start.write_text("grpo: {max_num_epochs: 1}\n", encoding="utf-8")
        options = InitOptions(Path(folder), gpu=GPUS[int(recipe["gpus_per_node"])], model=model, trace=SHAPE)
        made = from_nemo([str(start), *given], options).data()
    engine = made.get("engine", {}) | {"async_scheduling": False}  # vLLM before 0.14
    trace = {"cap": int(recipe["max_total_len"]) - prompt_tokens, "default_prompt_tokens": prompt_tokens}
    workflow = made["workflow"] | {"steps": STEPS_OFF if recipe["async_on"] else STEPS}
    configured = {"systems": made["systems"][:1], "baseline": made["systems"][0]["name"]}
    return made | configured | {"engine": engine, "trace": trace, "workflow": workflow, "seeds": 1}
