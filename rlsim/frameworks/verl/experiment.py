"""`rlsim init --from-verl`: a veRL configuration as an experiment, every value with where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.base.catalogue import DATA
from rlsim.base.reading import read_text
from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError
from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.mapping import Reading, names, unlike_rows
from rlsim.frameworks.names import find_model
from rlsim.frameworks.parts import Options, joined
from rlsim.frameworks.settings import ANYTHING, FLAG, TEXT, WHOLE
from rlsim.frameworks.verl import asynchronous
from rlsim.frameworks.verl.asynchronous import Apart
from rlsim.frameworks.verl.config import read_config
from rlsim.frameworks.verl.log import VerlLog
from rlsim.frameworks.verl.run import RunSettings, replica_problem, settings_of
from rlsim.frameworks.verl.settings import (
    ACTOR,
    GPUS_PER_NODE,
    MODEL,
    NODES,
    ROLLOUT,
    STRATEGY,
    TP,
    VERSIONS,
    VerlSettings,
)
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.model import Model
from rlsim.sim.request import EngineConfig
from rlsim.trace.metrics import METRICS

#: Advantage estimators: rlsim's algorithm of the same calls.
_ALGORITHMS = dict(line.split(",") for line in read_text(DATA / "frameworks" / "estimators.csv").splitlines())
_ESTIMATOR, _MODEL = "algorithm.adv_estimator", "actor_rollout_ref.model.path"
#: What settings of the engines themselves begin with.
_SECTIONS = {engine: f"{ROLLOUT}engine_kwargs.{engine}." for engine in ("vllm", "sglang")}
#: Keys that are known beside those that have names or defaults.
_KEYS = (
    *(key for engine in _SECTIONS for _, keys in names(f"verl-{engine}").values() for key in keys),
    *(key for of in ("verl", "verl-turns") for key, _, _ in unlike_rows(of)),
    *(key for engine, section in _SECTIONS.items() for key, _, _ in unlike_rows(engine, section)),
)
#: Positions of a model where nothing says how many it has: models of today have as many or more.
_CONTEXT = 32_768


def from_verl(sources: Sequence[str], options: Options, version: str = VERSIONS[-1]) -> Draft:
    """The experiment that `sources` (see `read_config`) describe; `version` is the release whose defaults hold.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_config(sources, version)
    Reading("verl", config).refuse()
    config.check_keys((*config.default, *config.keys(*config.names), *_KEYS))
    apart = asynchronous.apart_of(config)
    draft = Draft({}, notes=list(config.notes))
    machines = apart.cluster(draft, options) if apart else _cluster(config, draft, options)
    settings = _settings(config, draft, machines, apart)
    actor = _model(config, draft, options)
    _calibration(config, draft, machines, options)
    reading = Reading("verl", config, **_facts(config, settings, machines, apart))
    filters, cap = config.key("filters") if reading.fact("filtering") else "", Entry(settings.cap, config.where("cap"))
    parts.add_trace(draft, options, actor, cap, filters, config.entry("prompts_longest"))
    parts.limit_context(config, draft)
    draft.missing += _unlike(config, draft)
    reading.facts["measured"] = options.calibration is not None
    published = str(config.told(TEXT, _MODEL)).lower().rstrip("/")
    reading.facts["plain_weights"] = bool(actor.quantised_parameters) and published.endswith("-bf16")
    scored = draft.block("workflow").pop("reward")
    parts.add_mapped(reading, draft, actor)
    if config.told(FLAG, "reward_async") and not config.told(FLAG, "reward_loop"):
        said = joined(scored.comment, config.where("reward_async"))
        scored = Entry({"order": "beside_log_probs", **scored.value}, said)
    draft.block("workflow")["reward"] = scored
    _models(config, draft, options)
    replica = reading.fact("replica")
    _note_refusals(reading, draft, settings, actor)
    asynchronous.add_one_batch(config, draft, settings.prompts * settings.responses, machines.gpus // replica)
    _systems(config, reading, draft, replica, apart, over_nodes=settings.rollout_tp > machines.domain_gpus)
    draft.missing += reading.texts("missing")
    share = Entry(settings.memory_utilization, config.where("memory"))
    parts.add_memory(draft, share, options.folder, apart=apart is not None)
    draft.notes += [note for note in settings.notes if "enforce_eager" not in note]
    named = config.told(ANYTHING, "trainer.experiment_name")
    unread = ("actor_rollout_ref.", "reward.", *(["critic."] if reading.facts["algorithm"] == "ppo" else ()))
    return parts.finish(config, draft, options, sources, named, config.name, unread=unread)


def _facts(config: VerlSettings, settings: RunSettings, machines: Cluster, apart: Apart | None) -> dict[str, Any]:
    """What follows from several settings, for the table data/frameworks/verl.yaml. Raises `ConfigError`."""
    estimator, critic, train = config.text(_ESTIMATOR), config.told(FLAG, "critic.enable"), settings.train
    told = {"where": config.where(_ESTIMATOR), "critic": critic, "place": config.origin.get("critic.enable")}
    refuse("veRL's algorithm", estimator=estimator, known=_ALGORITHMS, **told)
    algorithm = _ALGORITHMS[estimator]
    flags = (f"{ACTOR}{part}.{kind}_offload" for part in ("fsdp_config", "megatron") for kind in ("param", "optimizer"))
    offloaded = [key for key in flags if config.flag(key)]
    scores = (name for name in ("sandbox", "scoring") if any(config.told(ANYTHING, key) for key in config.keys(name)))
    return {
        "algorithm": algorithm, "policy": apart.policy if apart else "", "apart": apart.where if apart else "",
        "rollout": apart.rollout_gpus if apart else 0,
        "colocated": apart is None and asynchronous.colocated_of(config) is not None,
        "mixed_nodes": bool(apart and apart.shares_nodes(machines.gpus_per_node) and apart.rollout[0] > 1),
        "run": settings, "limits": EngineConfig(), "train": train, "inference": settings.inference,
        "megatron": settings.backend == "megatron",
        "of_rank": f" × {train.cp} GPUs of a rank" if train.cp > 1 else "", "scores": next(scores, ""),
        "offloaded": config.where(*offloaded) if offloaded else "",
    }  # fmt: skip


def _note_refusals(reading: Reading, draft: Draft, settings: RunSettings, model: Model) -> None:
    config, megatron, release = reading.config, settings.backend == "megatron", reading.config.program.partition(" ")[2]
    values: dict[str, Any] = {
        name: sum(map(config.is_given, config.keys(name))) for name in ("micro_sizes", "log_prob_sizes")
    }
    if not config.told(WHOLE, "max_model_len"):
        values["positions"] = model.max_position_embeddings or _CONTEXT
    of = ("veRL", "vLLM") if config.told(TEXT, "engine") in ("vllm", None) else ("veRL",)
    parts.note_refusals(reading, draft, model, *of, megatron=megatron, release=release, **values)


def _unlike(config: VerlSettings, draft: Draft) -> list[str]:
    """What bears on time and is not in the experiment, by the tables of what is unlike, each with where it is said."""
    elsewhere = {key for key in _KEYS if key.startswith(ACTOR + "megatron.") and not config.megatron}
    elsewhere.add(MODEL + ("lora_rank" if config.megatron else "lora.rank"))
    if config.megatron:  # whose own key counts before 0.8, the model's from then on
        elsewhere.add((MODEL if config.version < "0.8" else ACTOR + "megatron.") + "use_remove_padding")
    engine = config.told(TEXT, "engine") or "vllm"
    return parts.unlike_of(config, draft, "verl", engine, _SECTIONS.get(engine, ""), but=elsewhere)


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
    where, problem = {"where": config.where(STRATEGY), "tp_where": config.where(TP)}, replica_problem(tp, *rollout)
    refuse("veRL's strategy", strategy=strategy, tp=tp, problem=problem, **where)
    if tp > rollout[1]:
        draft.notes.append(
            f"{config.where(TP)} = {tp}: a replica is on {tp // rollout[1]} nodes, of which no engine's steps were "
            "measured: generation may come out too fast (docs/validation.md)"
        )
    for doubtful in config.doubts:
        if doubtful in config.default:
            config.get(ANYTHING, doubtful)  # which says what is missing
    no_steps = pd.DataFrame(columns=["line", *METRICS], dtype=float)
    log = VerlLog(Path(config.file), no_steps, (), config)
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
    refuse("veRL's model", path=path, file=config.file, key=_MODEL, trains=config.has("actor_rollout_ref"))
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


def _models(config: VerlSettings, draft: Draft, options: Options) -> None:
    """The shapes of the critic and the reference, unless they are the actor's, and of a reward model."""
    if _ALGORITHMS[config.text(_ESTIMATOR)] == "ppo":
        parts.add_own_model(config, draft, options, "critic", "critic")
    if draft.data()["workflow"].get("reference"):
        parts.add_own_model(config, draft, options, "reference_model", "reference")
    for path_name in ("reward_model", "new_reward_model"):
        switch, path_key = f"{path_name}_on", config.key(path_name)
        if config.told(FLAG, switch):
            named = options.reward_model or config.get(TEXT, path_key)
            if named is None:
                raise ConfigError(f"{config.where(switch)}: but {path_key} names no model: give --reward-model")
            chosen, said = find_model(named, options.folder, option="--reward-model")
            where = "--reward-model" if options.reward_model else config.where(path_key)
            draft.block("models")["reward"] = Entry(chosen, joined(where, said))
            draft.block("workflow")["reward"] = Entry({}, config.where(switch))
            draft.notes.append("the reward model reads each response once, on the GPUs of the other calls")


def _systems(
    config: VerlSettings, reading: Reading, draft: Draft, tp: int, apart: Apart | None, *, over_nodes: bool
) -> None:
    more = parts.batching(reading, draft, "filters" if reading.fact("filtering") else "")
    if apart is not None:
        if beside := reading.fact("beside"):
            until = {key: entry.value for key, entry in reading.entries(beside).items()}
            more.append({beside: until} if until else beside)
        where = config.said("rollout_tp", "rollout_nodes")
        parts.add_systems(reading, draft, tp, where, more, apart.policy, over_nodes=over_nodes)
        return
    reward_model = any(config.told(FLAG, name) for name in ("reward_model_on", "new_reward_model_on"))
    if config.told(FLAG, "reward_loop") and not reward_model:  # which shares the GPUs
        more.append("async_reward")
    colocated = asynchronous.colocated_of(config)
    best = "best-tp" if colocated else "verl-best"
    parts.add_systems(reading, draft, tp, config.where(TP), more, apart=colocated, best=best, over_nodes=over_nodes)
