"""`rlsim init --from-nemo`: a GRPO configuration of NeMo-RL as an experiment, every value with where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.starts import shape_values
from rlsim.init import parts
from rlsim.init.draft import Draft, Entry
from rlsim.init.engines import Use
from rlsim.init.parts import Options, joined
from rlsim.init.settings import ANYTHING, COUNT, INTEGER, NUMBER, SHARE, TEXT, WHOLE, Settings
from rlsim.init.sources import read_sources
from rlsim.init.tables import default_values, unlike_rows, without
from rlsim.init.unlike import unlike
from rlsim.models import Model
from rlsim.nemo.defaults import (
    ASYNC,
    ASYNC_ENGINE,
    BETWEEN_STEPS,
    COLOCATED,
    ENGINE_KEYS,
    FP8,
    FP8_RECIPE,
    FP8_RECIPES,
    GENERATION,
    GRPO,
    KV_PRECISION,
    POLICY,
    PRECISION,
    PRECISIONS,
    SAVE_PERIOD,
    SAVES,
    SGLANG,
    STARTS,
    VLLM,
)
from rlsim.nemo.training import add_training

OPTION = "--from-nemo"
#: Advantage estimators whose calls are GRPO's.
_ESTIMATORS = ("grpo", "gdpo", "reinforce_plus_plus")
_NODES, _PER_NODE = "cluster.num_nodes", "cluster.gpus_per_node"
_ROLLOUT_NODES, _ROLLOUT_GPUS = COLOCATED + "resources.num_nodes", COLOCATED + "resources.gpus_per_node"
_PROMPTS, _RESPONSES = GRPO + "num_prompts_per_step", GRPO + "num_generations_per_prompt"
_FILTER, _KL = GRPO + "use_dynamic_sampling", "loss_fn.reference_policy_kl_penalty"
_AGE, _IN_FLIGHT = ASYNC + "max_trajectory_age_steps", ASYNC + "in_flight_weight_updates"
_LONGEST = POLICY + "max_total_sequence_length"
_RECOMPUTE_KV = ASYNC + "recompute_kv_cache_after_weight_updates"
#: With the first, and without the second, log-probs of the old policy are those of training itself.
_ON_POLICY, _THRESHOLD = "loss_fn.force_on_policy_ratio", GRPO + "seq_logprob_error_threshold"


@dataclass(frozen=True)
class _Generation:
    """Where generation runs: its engine, TP, and its GPUs if it has some of its own."""

    engine: str
    tp: int
    gpus: int | None
    asynchronous: bool
    where: str


def from_nemo(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that NeMo-RL's YAML files and overrides describe.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_sources(sources, "NeMo-RL", OPTION)
    config.default = dict(default_values("nemo"))
    _check_algorithm(config)
    draft = Draft({}, notes=list(config.notes))
    nodes, per_node = config.whole(_NODES), config.whole(_PER_NODE)
    machines = parts.add_cluster(draft, options, nodes, per_node, joined(config.where(_NODES), config.where(_PER_NODE)))
    generation = _generation(config, nodes, per_node)
    name = POLICY + "model_name"
    path = options.model or config.text(name)
    actor = parts.add_model(draft, options, path, config.where(name))
    engine = config.where(GENERATION + "backend")
    parts.add_calibration(draft, options, machines, Entry(generation.engine, engine))
    cap = _cap(config)
    filters = _FILTER if config.flag(_FILTER) else ""
    parts.add_trace(draft, options, actor, cap, filters, None)
    draft.entries["trace"]["max_model_len"] = config.entry(WHOLE, _LONGEST)  # type: ignore[index]
    _workflow(config, draft, config.need(COUNT, _AGE) if generation.asynchronous else 0)
    add_training(config, draft, apart=generation.gpus is not None, has_experts=actor.num_experts > 0)
    keys = ENGINE_KEYS[generation.engine]
    alone = generation.engine == "vllm" and config.flag(ASYNC_ENGINE)
    use: Use = "engine" if alone else "class"
    said = config.where(ASYNC_ENGINE) if alone else ""
    parts.add_engine(config, draft, keys, generation.engine, machines.gpu, use, said)
    gpus = parts.add_replica(config, draft, generation.tp, keys["ep"], keys["pp"])
    generation = replace(generation, tp=gpus)
    offloading = parts.add_offloading(config, draft, VLLM, SGLANG, gpus)
    quantised = parts.add_precision(config, draft, PRECISION, {"fp8": "fp8_block"}, KV_PRECISION)
    _systems(config, draft, generation, over_nodes=gpus > machines.domain_gpus)
    draft.entries["weight_sync"] = _weight_sync(config, apart=generation.gpus is not None)
    memory = ENGINE_KEYS[generation.engine]["memory"]
    parts.add_memory(draft, config.entry(SHARE, memory), options.folder, apart=generation.gpus is not None)
    draft.missing = [*_missing(config, generation.engine), *offloading, *quantised]
    _note_refusals(config, draft, generation, actor, nodes * per_node - (generation.gpus or 0))
    config.check_spelling()
    draft.unread = config.unasked()
    return parts.finish(config, draft, options, sources, parts.own_name(config.name))


def _check_algorithm(config: Settings) -> None:
    """Raises `ConfigError` for configurations of other algorithms, and for trainers that are not simulated."""
    if not config.has("grpo"):
        raise ConfigError(f"{config.name}: no key grpo.…: expected a configuration of NeMo-RL's GRPO, such as "
                          f"{_PROMPTS}; its other algorithms are not read")  # fmt: skip
    if config.has("async_rl"):
        key = next(key for key in config.given if key.startswith("async_rl."))
        raise ConfigError(
            f"{config.origin[key]}: {key}: NeMo-RL's single controller is not simulated; {ASYNC}enabled is"
        )
    estimator = GRPO + "adv_estimator.name"
    if config.text(estimator) not in _ESTIMATORS:
        problem = unknown_name("advantage estimator", config.text(estimator), _ESTIMATORS)
        raise ConfigError(f"{config.where(estimator)}: {problem}")


def _generation(config: Settings, nodes: int, per_node: int) -> _Generation:
    key = GENERATION + "backend"
    engine = config.text(key)
    if engine not in ENGINE_KEYS:
        raise ConfigError(
            f"{config.where(key)}: generation by {engine} is not simulated; expected one of: {', '.join(ENGINE_KEYS)}"
        )
    tp_key = ENGINE_KEYS[engine]["tp"]
    tp, asynchronous = config.whole(tp_key), config.flag(ASYNC + "enabled")
    if config.flag(COLOCATED + "enabled"):
        if asynchronous:
            raise ConfigError(
                f"{config.where(COLOCATED + 'enabled')}: asynchronous GRPO on the GPUs that train is not simulated: "
                f"expected false, and {_ROLLOUT_GPUS}"
            )
        return _Generation(engine, tp, None, False, config.where(tp_key))
    rollout_nodes = 1 if nodes == 1 else config.whole(_ROLLOUT_NODES)
    gpus = rollout_nodes * config.whole(_ROLLOUT_GPUS)
    said = joined(config.where(_ROLLOUT_GPUS), config.where(_ROLLOUT_NODES) if nodes > 1 else "")
    if gpus >= nodes * per_node:
        raise ConfigError(f"{said}: {gpus} GPUs for generation leave none of {nodes * per_node} for training")
    return _Generation(engine, tp, gpus, asynchronous, joined(config.where(tp_key), said))


def _cap(config: Settings) -> Entry:
    """The longest response, where its prompt leaves room for it."""
    new = config.get(WHOLE, GENERATION + "max_new_tokens")
    shorter = new is not None and new < config.whole(_LONGEST)
    return config.entry(WHOLE, GENERATION + "max_new_tokens" if shorter else _LONGEST)


def _workflow(config: Settings, draft: Draft, ahead: int) -> None:
    estimator = GRPO + "adv_estimator.name"
    name = config.text(estimator)
    reference = config.need(NUMBER, _KL) > 0
    on_policy = config.flag(_ON_POLICY) and config.get(ANYTHING, _THRESHOLD) is None
    draft.entries["workflow"] |= {  # type: ignore[operator]
        "algorithm": Entry("grpo", joined(config.where(estimator), "" if name == "grpo" else "it has GRPO's calls")),
        "prompts": config.entry(WHOLE, _PROMPTS),
        "responses": config.entry(WHOLE, _RESPONSES),
        "steps": parts.steps_of(ahead),
        "reference": Entry(reference, config.where(_KL)),
        "old_log_probs": Entry(not on_policy, config.where(_ON_POLICY) if on_policy else "computed before training"),
    }


def _systems(config: Settings, draft: Draft, generation: _Generation, *, over_nodes: bool) -> None:
    more: list[Any] = []
    if config.flag(_FILTER):
        more = ["dynamic_sampling"]
        draft.notes.append(f"{config.where(_FILTER)}: dynamic_sampling in every system")
    tp, where = generation.tp, generation.where
    if generation.gpus is None:
        parts.add_systems(draft, tp, where, more, over_nodes=over_nodes)
        return
    if not generation.asynchronous:
        more = [{"split": {"rollout_gpus": generation.gpus}}, *more]
        parts.add_systems(draft, tp, where, more, apart=("verl", {}))
        return
    rule = {
        "rollout_gpus": generation.gpus,
        "max_trajectory_age_steps": config.need(COUNT, _AGE),
        "in_flight_weight_updates": config.flag(_IN_FLIGHT),
        "updated_kv": "recompute" if config.flag(_RECOMPUTE_KV) else "keep",
    }
    said = joined(where, *map(config.where, (_AGE, _IN_FLIGHT, _RECOMPUTE_KV)))
    parts.add_systems(draft, tp, said, more, apart=("nemo_async", rule))


def _note_refusals(config: Settings, draft: Draft, generation: _Generation, actor: Model, trainers: int) -> None:
    """Notes of what NeMo-RL or its engine would not start with; `trainers` are the GPUs that train."""
    training = draft.data()["training"]
    megatron, vllm = training["backend"] == "megatron", generation.engine == "vllm"
    degrees = {degree: training.get(degree, 1) for degree in ("tp", "pp", "cp")}
    values = {
        **shape_values(actor), **degrees, "gpus": trainers, "megatron": megatron, "vllm": vllm,
        "sglang": generation.engine == "sglang", "on_policy": config.flag(_ON_POLICY),
        "fp8": config.get(TEXT, PRECISION) == "fp8" if vllm else None,
        "kv_fp8": str(config.get(TEXT, KV_PRECISION)).startswith("fp8"),
    }  # fmt: skip
    of = ("NeMo-RL", *(["vLLM"] if vllm else []), *(["Megatron"] if megatron else []))
    parts.note_refusals(config, draft, STARTS, *of, **values)


def _weight_sync(config: Settings, *, apart: bool) -> Entry:
    """Whole tensors one by one on the same GPUs; elsewhere a broadcast that all of the trainer's GPUs take part in."""
    said = config.where(COLOCATED + "enabled")
    if apart:
        return Entry("multi_sender", f"{said}: trainers and engines are one group, `init_collective`")
    return Entry("naive", f"{said}: tensor by tensor, `stream_weights_via_ipc_zmq`")


def _missing(config: Settings, engine: str) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    sections = {"vllm": (VLLM, VLLM.replace("kwargs", "cfg")), "sglang": (SGLANG,)}.get(engine, ())
    rows = (*unlike_rows("nemo"), *(unlike_rows(engine, *sections) if sections else ()))
    found = unlike(config, without(rows, *ENGINE_KEYS[engine].values()))
    if config.get(TEXT, PRECISION) == "fp8":
        found += unlike(config, unlike_rows("nemo-fp8"))
    recipe = config.get(TEXT, FP8_RECIPE)
    if config.flag(FP8) and recipe not in FP8_RECIPES:
        found.append(f"{config.where(FP8)}, {config.where(FP8_RECIPE)} = {recipe}: here in bf16")
    for key in PRECISIONS:
        value = config.get(TEXT, key)
        if value not in (None, "bfloat16", "auto"):
            found.append(f"{config.where(key)} = {value}: here in bf16")
    factor = GRPO + "batch_multiplier"
    if config.flag(_FILTER) and (times := config.need(NUMBER, factor)) != 1:
        found.append(f"{config.where(factor)} = {times}: so many times the prompts are generated at a "
                     "time; here a step begins with its own and launches what is lacking")  # fmt: skip
    often = [key for key in BETWEEN_STEPS if (config.get(INTEGER, key) or -1) > 0]
    if config.flag(SAVES):
        often.append(SAVE_PERIOD)
    if often:
        found.append(f"{' and '.join(map(config.where, often))}: validation and checkpoints between steps")
    return found
