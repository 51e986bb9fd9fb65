"""`rlsim init --from-verl`: a veRL configuration as an experiment, every value with where it is from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.errors import ConfigError, RlsimError, unknown_name
from rlsim.experiment.build import find_trace
from rlsim.experiment.schema import Experiment
from rlsim.hardware import Cluster, load_cluster
from rlsim.init.draft import Draft, Entry
from rlsim.init.names import check_calibration, find_calibration, find_cluster, find_model, load_from, nearest_trace
from rlsim.models import Model
from rlsim.schema import validate
from rlsim.trace import Trace, read_trace
from rlsim.verl import notes
from rlsim.verl.config import read_config
from rlsim.verl.defaults import ACTOR, MODEL, ROLLOUT, VERSIONS, WITHOUT_DEFAULT
from rlsim.verl.log import METRICS, VerlLog
from rlsim.verl.overrides import FILTER, GPUS_PER_NODE, NODES, REWARD_ASYNC, TP
from rlsim.verl.run import RunSettings, settings_of
from rlsim.verl.settings import STRATEGY, Settings
from rlsim.verl.training import add_engine, add_memory, add_training

_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "vllm_omni": "vllm"}
#: Advantage estimators: rlsim's algorithm of the same calls.
_ALGORITHMS = {
    **dict.fromkeys(
        ("grpo", "grpo_passk", "grpo_vectorized", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg",
         "reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline",
         "tir_optimal_token_baseline"),
        "grpo",
    ),
    "gae": "ppo",
    "remax": "remax",
}  # fmt: skip
STEPS, SEEDS = 5, 5
_ESTIMATOR, _MODEL, _CRITIC = "algorithm.adv_estimator", MODEL + "path", "critic.model.path"
#: What switches a reward model on, and the key that names it.
_REWARD_MODEL = {
    "reward_model.enable": "reward_model.model.path",
    "reward.reward_model.enable": "reward.reward_model.model_path",
}
#: Further keys that a misspelt one may have meant.
_MORE_KEYS = (
    _MODEL, _CRITIC, REWARD_ASYNC, *_REWARD_MODEL, *_REWARD_MODEL.values(), *WITHOUT_DEFAULT,
    ACTOR + "megatron.override_transformer_config.recompute_granularity",
    ROLLOUT + "log_prob_micro_batch_size", ROLLOUT + "log_prob_use_dynamic_bsz",
    MODEL + "enable_activation_offloading", MODEL + "use_fused_kernels",
    "critic.ppo_micro_batch_size", "critic.enable",
)  # fmt: skip


def from_verl(
    sources: Sequence[str],
    *,
    folder: Path,
    gpu: str | None = None,
    cluster: str | None = None,
    model: str | None = None,
    reward_model: str | None = None,
    calibration: str | None = None,
    trace: str | None = None,
    name: str | None = None,
    version: str = VERSIONS[-1],
) -> Draft:
    """The experiment that `sources` (see `read_config`) describe, to be written into `folder`.

    veRL's configuration names no GPU: `gpu` or `cluster` does. `model` and `reward_model` name shapes that their paths
    do not tell, `trace` the lengths (default: the nearest that ships), `calibration` the costs (default: that of the
    GPU and engine), `version` the release whose defaults hold. Raises `RlsimError`s that say what is missing, unknown
    or unsupported.
    """
    config = read_config(sources, version)
    config.check_keys((*config.default, *_MORE_KEYS, *notes.KEYS))
    notes.refuse_asynchronous(config)
    config.check_values()
    draft = Draft({}, missing=notes.missing(config), notes=list(config.notes))
    machines = _cluster(config, draft, gpu, cluster)
    settings = _settings(config, machines)
    actor = _model(config, draft, folder, model)
    _calibration(config, draft, machines, calibration, folder)
    lengths = _trace(config, draft, actor, settings, trace, folder)
    _workflow(config, draft, settings)
    _models(config, draft, folder, reward_model)
    add_engine(config, draft, settings)
    add_training(config, draft, settings, lengths)
    _systems(config, draft, settings)
    add_memory(config, draft, settings, folder)
    draft.notes += [note for note in settings.notes if "enforce_eager" not in note]
    title = name or _name(config)
    draft.heading = [
        f"{title}: made by rlsim init from {' '.join(sources)}",
        f"What the configuration does not say is veRL {version}'s default. Run it: rlsim run FILE",
    ]
    ordered = (key for key in Experiment.model_fields if key in draft.entries)
    draft.entries = {"name": Entry(title), **{key: draft.entries[key] for key in ordered}}
    return draft


def check(draft: Draft, folder: Path) -> str:
    """Why `rlsim run` would refuse the experiment of a draft in `folder`; empty if it would not."""
    from rlsim.experiment.run import checked_cases

    try:
        checked_cases(validate(draft.data(), Experiment), folder)
    except RlsimError as error:
        return str(error)
    return ""


def _name(config: Settings) -> str:
    given = config.given.get("trainer.experiment_name")
    text = given if isinstance(given, str) and "$" not in given else config.name or "from-verl"
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "from-verl"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _cluster(config: Settings, draft: Draft, gpu: str | None, named: str | None) -> Cluster:
    keys = (NODES, GPUS_PER_NODE)
    if named is None:
        found = find_cluster(gpu, *(config.get(key) for key in keys))
        draft.entries["cluster"] = Entry(found.name, _joined(f"--gpu {gpu}", *map(config.where, keys)))
        return found
    found = load_cluster(named)
    told = [config.given.get(key) for key in keys]
    for key, said, has in zip(keys, told, (found.nodes, found.gpus_per_node), strict=True):
        if said is not None and said != has:
            raise ConfigError(f"{config.origin[key]}: {key} is {said}, cluster {found.name} has {has}")
        config.doubts.pop(key, None)
        if said is None:
            config.put({key: has}, f"--cluster {named}")
    draft.entries["cluster"] = Entry(named, "as given; veRL's configuration names no GPU")
    return found


def _settings(config: Settings, machines: Cluster) -> RunSettings:
    """The configuration as `rlsim calibrate from-run` reads it."""
    strategy, key = config.get(STRATEGY), TP
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise ConfigError(f"{config.where(STRATEGY)}: {strategy} is not simulated; fsdp, fsdp2 or megatron are")
    if machines.gpus_per_node % config.get(key):
        raise ConfigError(
            f"{config.where(key)} = {config.get(key)}: it does not divide the {machines.gpus_per_node} GPUs of a node; "
            "replicas over several nodes are not simulated"
        )
    for doubtful in config.doubts:
        if doubtful in config.default:
            config.get(doubtful)  # which says what is missing
    no_steps = pd.DataFrame(columns=["line", *METRICS], dtype=float)
    return settings_of(VerlLog(Path(config.name or "the configuration"), no_steps, (), config), machines)


def _model(config: Settings, draft: Draft, folder: Path, given: str | None) -> Model:
    path = given or config.get(_MODEL)
    if path is None:
        raise ConfigError(f"the configuration names no model ({_MODEL}): give --model")
    chosen, said = find_model(str(path), folder)
    draft.entries["model"] = Entry(chosen, _joined("--model" if given else config.where(_MODEL), said))
    return load_from(chosen, folder)


def _calibration(config: Settings, draft: Draft, machines: Cluster, given: str | None, folder: Path) -> None:
    if given is not None:
        check_calibration(given, machines, folder)
        draft.entries["calibration"] = Entry(given, "as given")
        return
    key = ROLLOUT + "name"
    engine = config.get(key)
    if engine is None:
        draft.notes.append(f"{key} is not given, though veRL {config.version} requires it: vllm is taken")
    elif engine not in _ENGINES:
        raise ConfigError(f"{config.where(key)}: {unknown_name('rollout engine', str(engine), _ENGINES)}")
    name, said = find_calibration(machines.gpu.name, _ENGINES[engine or "vllm"])
    draft.notes += [said] if said else []
    draft.entries["calibration"] = Entry(name, config.where(key) if engine else "assumed")


def _trace(
    config: Settings, draft: Draft, actor: Model, settings: RunSettings, given: str | None, folder: Path
) -> Trace:
    filters, prompt_key = bool(config.get(FILTER)), "data.max_prompt_length"
    if given is None:
        path, trace, why = nearest_trace(actor, settings.cap, rewards=filters)
        draft.notes.append(f"response lengths: {path}, {why}")
        comment = "assumed: " + why
    else:
        path, comment = given, "as given"
        trace = read_trace(find_trace(given, folder))
        if filters and not {"correct", "reward"} & set(trace.frame.columns):
            raise ConfigError(f"--trace {given}: {FILTER} drops prompts by their rewards, but the trace has neither "
                              "the column reward nor correct")  # fmt: skip
    cut = trace.meta.cap_tokens
    if cut is not None and cut < settings.cap:
        draft.notes.append(f"the trace was sampled under a cap of {cut:,} tokens, below {settings.cap:,}: no response "
                           "gets longer")  # fmt: skip
    where = config.where("data.max_response_length", ROLLOUT + "response_length")
    entries = {"path": Entry(path, comment), "cap": Entry(settings.cap, where)}
    limit = config.get(prompt_key)
    longest = trace.frame["prompt_tokens"].max() if "prompt_tokens" in trace.frame else None
    if longest is None:
        entries["default_prompt_tokens"] = Entry(limit, f"the trace has no prompt lengths: {prompt_key}")
    elif longest > limit:
        draft.notes.append(f"{config.where(prompt_key)} = {limit:,}; the trace's longest prompt has {int(longest):,} "
                           "and is not cut")  # fmt: skip
    draft.entries["trace"] = entries
    return trace


def _workflow(config: Settings, draft: Draft, settings: RunSettings) -> None:
    estimator, critic = str(config.get(_ESTIMATOR)), config.given.get("critic.enable")
    if estimator not in _ALGORITHMS:
        raise ConfigError(f"{config.where(_ESTIMATOR)}: {unknown_name('advantage estimator', estimator, _ALGORITHMS)}")
    algorithm = _ALGORITHMS[estimator]
    if critic is not None and critic != (algorithm == "ppo"):
        raise ConfigError(f"{config.origin['critic.enable']}: critic.enable = {critic} with {_ESTIMATOR}={estimator}: "
                          "no algorithm of rlsim has these calls; write it as workflow.algorithm: custom")  # fmt: skip
    same_calls = "" if estimator in (algorithm, "gae") else f"{estimator} has the calls of {algorithm}"
    kl_keys = (ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward")
    on = [key for key in kl_keys if config.get(key)]
    with_reference = " and ".join(map(config.where, on)) or "no KL term: " + " and ".join(map(config.where, kl_keys))
    bypass_key = "algorithm.rollout_correction.bypass_mode"
    bypass = bool(config.get(bypass_key))
    workflow = {
        "algorithm": Entry(algorithm, _joined(config.where(_ESTIMATOR), same_calls)),
        "prompts": Entry(settings.prompts, config.where("data.train_batch_size")),
        "responses": Entry(settings.responses, config.where(ROLLOUT + "n")),
        "steps": Entry(STEPS, "to simulate; each draws its prompts from the trace"),
        "reference": Entry(bool(on), with_reference),
        "old_log_probs": Entry(not bypass, config.where(bypass_key) if bypass else "veRL computes them anew"),
    }
    if config.given.get(REWARD_ASYNC):
        workflow["reward"] = Entry({"order": "beside_log_probs"}, config.where(REWARD_ASYNC))
    draft.entries["workflow"] = workflow


def _models(config: Settings, draft: Draft, folder: Path, reward_model: str | None) -> None:
    """The shapes of the critic, unless it is the actor's, and of a reward model."""
    models: dict[str, Entry] = {}
    if _ALGORITHMS[str(config.get(_ESTIMATOR))] == "ppo" and config.is_given(_CRITIC):
        path, actor = str(config.get(_CRITIC)), draft.data()["model"]
        try:
            chosen, said = find_model(path, folder)
        except RlsimError:
            chosen, said = actor, ""
            if path != config.given.get(_MODEL):
                draft.notes.append(f"{config.where(_CRITIC)}: the shape of {path} is not known; the critic is taken to "
                                   "be like the actor")  # fmt: skip
        if chosen != actor:
            models["critic"] = Entry(chosen, _joined(config.where(_CRITIC), said))
    for switch, path_key in _REWARD_MODEL.items():
        if config.given.get(switch):
            path = reward_model or config.get(path_key)
            if path is None:
                raise ConfigError(f"{config.where(switch)}: but {path_key} names no model: give --reward-model")
            chosen, said = find_model(str(path), folder, option="--reward-model")
            models["reward"] = Entry(
                chosen, _joined("--reward-model" if reward_model else config.where(path_key), said)
            )
            draft.notes.append("the reward model reads each response once, on the GPUs of the other calls")
    if models:
        draft.entries["models"] = models


def _systems(config: Settings, draft: Draft, settings: RunSettings) -> None:
    more, mode = [], ROLLOUT + "mode"
    if config.get(FILTER):
        more = ["dynamic_sampling"]
        draft.notes.append(f"{config.where(FILTER)}: dynamic_sampling in every system")

    def system(name: str, part: Any, comment: str) -> Entry:
        return Entry({"name": name, "use": [part, *more]}, comment)

    if config.get(mode) == "async":
        where = f"{config.where(mode)}: each request goes to the server with fewest"
        draft.entries["routing"] = Entry("round_robin", where)
    draft.entries["seeds"] = Entry(SEEDS, "runs of each system, each on other draws")
    draft.entries["baseline"] = Entry("as-configured")
    where = config.where(TP)
    draft.entries["systems"] = Entry(
        (
            system("as-configured", {"verl": {"tp": settings.rollout_tp}}, where),
            system("verl-best", {"verl": {"tp": "best"}}, "the fastest static TP"),
            system("pat", "pat", "TP switched while responses are generated"),
        )
    )
