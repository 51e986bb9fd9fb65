"""`rlsim init --from-verl`: a veRL configuration as an experiment, every value with where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from rlsim.errors import ConfigError, RlsimError, unknown_name
from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.names import find_model
from rlsim.frameworks.parts import Options, joined
from rlsim.frameworks.settings import ANYTHING, FLAG, TEXT, WHOLE
from rlsim.frameworks.verl import asynchronous, notes
from rlsim.frameworks.verl.asynchronous import Apart
from rlsim.frameworks.verl.config import read_config
from rlsim.frameworks.verl.defaults import (
    ACTOR,
    GPUS_PER_NODE,
    NODES,
    ROLLOUT,
    TP,
    VERSIONS,
)
from rlsim.frameworks.verl.log import VerlLog
from rlsim.frameworks.verl.run import RunSettings, replica_problem, settings_of
from rlsim.frameworks.verl.settings import STRATEGY, VerlSettings
from rlsim.frameworks.verl.training import add_engine, add_training
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.model import Model
from rlsim.trace.metrics import METRICS

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
_ESTIMATOR, _MODEL, _CRITIC = "algorithm.adv_estimator", "actor_rollout_ref.model.path", "critic.model.path"


def from_verl(sources: Sequence[str], options: Options, version: str = VERSIONS[-1]) -> Draft:
    """The experiment that `sources` (see `read_config`) describe; `version` is the release whose defaults hold.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_config(sources, version)
    config.check_keys((*config.default, *config.keys(*config.names), *notes.KEYS))
    apart = asynchronous.apart_of(config)
    draft = Draft({}, missing=notes.missing(config), notes=list(config.notes))
    machines = apart.cluster(draft, options) if apart else _cluster(config, draft, options)
    if apart is not None:
        draft.missing += asynchronous.missing(config, apart, machines)
    settings = _settings(config, draft, machines, apart)
    actor = _model(config, draft, options)
    _calibration(config, draft, machines, options)
    _trace(config, draft, actor, settings, options)
    _workflow(config, draft, settings, apart)
    _models(config, draft, options)
    add_engine(config, draft, settings, measured=options.calibration is not None)
    dp_key = "rollout_dp" if notes.experts_apart(config) else ""
    if actor.quantised_parameters and str(config.told(TEXT, _MODEL)).lower().rstrip("/").endswith("-bf16"):
        draft.entries["engine"] |= {"precision": Entry("bf16", config.where(_MODEL))}  # type: ignore[operator]
    replica = parts.add_replica(config, draft, settings.rollout_tp, "rollout_ep", "rollout_pp", dp_key)
    add_training(config, draft, settings)
    notes.note_refusals(config, draft, settings, actor, apart=apart is not None)
    asynchronous.add_one_batch(config, draft, settings.prompts * settings.responses, machines.gpus // replica)
    _systems(config, draft, replica, apart, over_nodes=settings.rollout_tp > machines.domain_gpus)
    share = Entry(settings.memory_utilization, config.where("memory"))
    parts.add_memory(draft, share, options.folder, apart=apart is not None)
    draft.notes += [note for note in settings.notes if "enforce_eager" not in note]
    draft.unread = [key for key in config.unasked() if key.startswith(ROLLOUT)]
    named = config.told(ANYTHING, "trainer.experiment_name")
    return parts.finish(config, draft, options, sources, named, config.name)


def _cluster(config: VerlSettings, draft: Draft, options: Options) -> Cluster:
    keys, named = (NODES, GPUS_PER_NODE), options.cluster
    if named is None:
        nodes, per_node = map(config.whole, keys)
        return parts.add_cluster(draft, options, nodes, per_node, joined(*map(config.where, keys)))
    found = load_cluster(named)
    told = [config.told(WHOLE, key) if config.is_given(key) else None for key in keys]
    for key, said, has in zip(keys, told, (found.nodes, found.gpus_per_node), strict=True):
        if said is not None and said != has:
            raise ConfigError(f"{config.origin[key]}: {key} is {said}, cluster {found.name} has {has}")
        config.doubts.pop(key, None)
        if said is None:
            config.put({key: has}, f"--cluster {named}")
    draft.entries["cluster"] = Entry(named, "as given; veRL's configuration names no GPU")
    return found


def _settings(config: VerlSettings, draft: Draft, machines: Cluster, apart: Apart | None) -> RunSettings:
    """The configuration as `rlsim calibrate from-run` reads it."""
    strategy, tp = config.text(STRATEGY), config.whole(TP)
    rollout = apart.rollout if apart else (machines.gpus // machines.domain_gpus, machines.domain_gpus)
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise ConfigError(f"{config.where(STRATEGY)}: {strategy} is not simulated; fsdp, fsdp2 or megatron are")
    if problem := replica_problem(tp, *rollout):
        raise ConfigError(f"{config.where(TP)} = {tp}: it {problem}")
    if tp > rollout[1]:
        draft.notes.append(
            f"{config.where(TP)} = {tp}: a replica is on {tp // rollout[1]} nodes, of which no engine's steps were "
            "measured: generation may come out too fast (docs/validation.md)"
        )
    for doubtful in config.doubts:
        if doubtful in config.default:
            config.get(ANYTHING, doubtful)  # which says what is missing
    no_steps = pd.DataFrame(columns=["line", *METRICS], dtype=float)
    log = VerlLog(Path(config.name or "the configuration"), no_steps, (), config)
    try:
        return settings_of(log, apart.trainers(machines) if apart else machines, rollout=rollout)
    except ConfigError as error:
        if not config.is_given("train_ep"):
            raise
        key = config.key("train_expert_tp")
        cut = "" if config.is_given(key) else f"; without {key} Megatron cuts an expert over TP"
        raise ConfigError(f"{config.where('train_ep')}: {error}{cut}") from None


def _model(config: VerlSettings, draft: Draft, options: Options) -> Model:
    path = options.model or config.value("model")
    if path is None and not config.has("actor_rollout_ref"):
        raise ConfigError(
            f"{config.name or 'the configuration'}: no setting of actor_rollout_ref: supervised fine-tuning and "
            "evaluation are no RL training, of which experiments are"
        )
    if path is None:
        raise ConfigError(f"the configuration names no model ({_MODEL}): give --model")
    return parts.add_model(draft, options, path, config.where(_MODEL))


def _calibration(config: VerlSettings, draft: Draft, machines: Cluster, options: Options) -> None:
    engine = Entry(config.value("engine"), config.where("engine"))
    if engine.value is None:
        engine = Entry("vllm", "assumed")
        if options.calibration is None:
            draft.notes.append(
                f"{config.key('engine')} is not given, though veRL {config.version} requires it: vllm is taken"
            )
    parts.add_calibration(draft, options, machines, engine)


def _trace(config: VerlSettings, draft: Draft, actor: Model, settings: RunSettings, options: Options) -> None:
    filters = config.key("filters") if config.flag("filters") else ""
    cap = Entry(settings.cap, config.where("cap"))
    parts.add_trace(draft, options, actor, cap, filters, config.entry("prompts_longest"))
    entries, longest = draft.entries["trace"], config.value("max_model_len")
    assert isinstance(entries, dict)
    if longest and longest < entries.get("max_model_len", Entry(longest + 1)).value:
        entries["max_model_len"] = config.entry("max_model_len")


def _workflow(config: VerlSettings, draft: Draft, settings: RunSettings, apart: Apart | None) -> None:
    estimator, critic = config.text(_ESTIMATOR), config.told(FLAG, "critic.enable")
    if estimator not in _ALGORITHMS:
        raise ConfigError(f"{config.where(_ESTIMATOR)}: {unknown_name('advantage estimator', estimator, _ALGORITHMS)}")
    algorithm = _ALGORITHMS[estimator]
    if critic is not None and critic != (algorithm == "ppo"):
        raise ConfigError(f"{config.origin['critic.enable']}: critic.enable = {critic} with {_ESTIMATOR}={estimator}: "
                          "no algorithm of rlsim has these calls; write it as workflow.algorithm: custom")  # fmt: skip
    same_calls = "" if estimator in (algorithm, "gae") else f"{estimator} has the calls of {algorithm}"
    kl_keys = (ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward")
    on = [key for key in kl_keys if config.flag(key)]
    with_reference = " and ".join(map(config.where, on)) or "no KL term: " + " and ".join(map(config.where, kl_keys))
    bypass_key = "algorithm.rollout_correction.bypass_mode"
    fully = apart is not None and apart.policy == "verl_fully_async"
    bypass = not asynchronous.recomputes(config) if fully else config.flag(bypass_key)
    workflow = {
        "algorithm": Entry(algorithm, joined(config.where(_ESTIMATOR), same_calls)),
        "prompts": Entry(settings.prompts, config.where("data.train_batch_size")),
        "responses": Entry(settings.responses, config.where(ROLLOUT + "n")),
        "steps": parts.steps_of(asynchronous.ahead(config, apart)),
        "reference": Entry(bool(on), with_reference),
        "old_log_probs": Entry(not bypass, config.where(bypass_key) if bypass else "veRL computes them anew"),
    }
    scored = draft.entries["workflow"]["reward"]  # type: ignore[index]  # of `add_trace`
    if config.told(FLAG, "reward_async"):
        scored = Entry(
            {"order": "beside_log_probs", **scored.value}, joined(scored.comment, config.where("reward_async"))
        )
    draft.entries["workflow"] = {**workflow, "reward": scored}


def _models(config: VerlSettings, draft: Draft, options: Options) -> None:
    """The shapes of the critic, unless it is the actor's, and of a reward model."""
    models, folder, reward_model = dict[str, Entry](), options.folder, options.reward_model
    if _ALGORITHMS[config.text(_ESTIMATOR)] == "ppo" and config.is_given(_CRITIC):
        path, actor = config.text(_CRITIC), draft.data()["model"]
        try:
            chosen, said = find_model(path, folder)
        except RlsimError:
            chosen, said = actor, ""
            if path != config.told(TEXT, _MODEL):
                draft.notes.append(f"{config.where(_CRITIC)}: the shape of {path} is not known; the critic is taken to "
                                   "be like the actor")  # fmt: skip
        if chosen != actor:
            models["critic"] = Entry(chosen, joined(config.where(_CRITIC), said))
    for path_name in ("reward_model", "new_reward_model"):
        switch, path_key = f"{path_name}_on", config.key(path_name)
        if config.told(FLAG, switch):
            named = reward_model or config.get(TEXT, path_key)
            if named is None:
                raise ConfigError(f"{config.where(switch)}: but {path_key} names no model: give --reward-model")
            chosen, said = find_model(named, folder, option="--reward-model")
            models["reward"] = Entry(chosen, joined("--reward-model" if reward_model else config.where(path_key), said))
            draft.entries["workflow"]["reward"] = Entry({}, config.where(switch))  # type: ignore[index]
            draft.notes.append("the reward model reads each response once, on the GPUs of the other calls")
    if models:
        draft.entries["models"] = models


def _systems(config: VerlSettings, draft: Draft, tp: int, apart: Apart | None, *, over_nodes: bool) -> None:
    more = parts.filtering(config, draft)
    if config.value("mode") == "async" or apart:
        where = f"{config.where('mode')}: each request goes to the server with fewest"
        draft.entries["routing"] = Entry("round_robin", where)
    if apart is not None:
        system = (apart.policy, asynchronous.parameters(config, apart))
        more = [*more, *asynchronous.parts_beside(config, apart)]
        parts.add_systems(draft, tp, asynchronous.said_of(config, apart), more, apart=system, over_nodes=over_nodes)
    else:
        colocated = asynchronous.colocated_of(config)
        best = "best-tp" if colocated else "verl-best"
        parts.add_systems(draft, tp, config.where(TP), more, apart=colocated, best=best, over_nodes=over_nodes)
