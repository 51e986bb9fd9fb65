"""`rlsim init --from-nemo`: a GRPO configuration of NeMo-RL as an experiment, every value with where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlsim.errors import ConfigError, unknown_name
from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.nemo.training import FP8_RECIPES, add_training
from rlsim.frameworks.parts import Options, joined
from rlsim.frameworks.settings import Settings
from rlsim.frameworks.sources import read_sources
from rlsim.frameworks.tables import names, unlike_rows
from rlsim.frameworks.unlike import unlike
from rlsim.models.model import Model

OPTION = "--from-nemo"
#: Advantage estimators whose calls are GRPO's.
_ESTIMATORS = ("grpo", "gdpo", "reinforce_plus_plus")
_ENGINES = ("vllm", "sglang", "trtllm")
#: What settings of the engines themselves begin with.
_VLLM, _SGLANG = "policy.generation.vllm_kwargs.", "policy.generation.sglang_cfg."


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
    config = read_sources(sources, "NeMo-RL", OPTION, "nemo")
    _check_algorithm(config)
    draft = Draft({}, notes=list(config.notes))
    nodes, per_node = config.whole("nodes"), config.whole("per_node")
    machines = parts.add_cluster(draft, options, nodes, per_node, config.said("nodes", "per_node"))
    generation = _generation(config, nodes, per_node)
    apart = generation.gpus is not None
    actor = parts.add_model(draft, options, options.model or config.text("model"), config.where("model"))
    parts.add_calibration(draft, options, machines, config.entry("backend"))
    new = config.value("new_tokens")
    cap = config.entry("new_tokens" if new is not None and new < config.whole("longest") else "longest")
    parts.add_trace(draft, options, actor, cap, config.key("filters") if config.flag("filters") else "", None)
    draft.entries["trace"]["max_model_len"] = config.entry("longest")  # type: ignore[index]
    _workflow(config, draft, config.needed("age") if generation.asynchronous else 0)
    add_training(config, draft, apart=apart, has_experts=actor.num_experts > 0)
    alone = generation.engine == "vllm" and config.flag("async_engine")
    said = config.where("async_engine") if alone else ""
    parts.add_engine(config, draft, generation.engine, machines.gpu, "engine" if alone else "class", said)
    gpus = parts.add_replica(config, draft, generation.tp, "ep", "pp")
    generation = replace(generation, tp=gpus)
    offloading = parts.add_offloading(config, draft, gpus)
    quantised = parts.add_precision(config, draft, "precision", {"fp8": "fp8_block"}, "kv_precision")
    _systems(config, draft, generation, over_nodes=gpus > machines.domain_gpus)
    draft.entries["weight_sync"] = _weight_sync(config, apart=apart)
    parts.add_memory(draft, config.entry("memory"), options.folder, apart=apart)
    draft.missing = [*_missing(config, generation.engine), *offloading, *quantised]
    _note_refusals(config, draft, generation, actor, nodes * per_node - (generation.gpus or 0))
    config.check_spelling()
    draft.unread = config.unasked()
    return parts.finish(config, draft, options, sources, parts.own_name(config.name))


def _check_algorithm(config: Settings) -> None:
    """Raises `ConfigError` for configurations of other algorithms, and for trainers that are not simulated."""
    if not config.has("grpo"):
        raise ConfigError(f"{config.name}: no key grpo.…: expected a configuration of NeMo-RL's GRPO, such as "
                          f"{config.key('prompts')}; its other algorithms are not read")  # fmt: skip
    if config.has("async_rl"):
        key = next(key for key in config.given if key.startswith("async_rl."))
        raise ConfigError(f"{config.origin[key]}: {key}: NeMo-RL's single controller is not simulated; "
                          f"{config.key('asynchronous')} is")  # fmt: skip
    if (estimator := config.text("estimator")) not in _ESTIMATORS:
        problem = unknown_name("advantage estimator", estimator, _ESTIMATORS)
        raise ConfigError(f"{config.where('estimator')}: {problem}")


def _generation(config: Settings, nodes: int, per_node: int) -> _Generation:
    engine = config.text("backend")
    if engine not in _ENGINES:
        raise ConfigError(f"{config.where('backend')}: generation by {engine} is not simulated; expected one of: "
                          f"{', '.join(_ENGINES)}")  # fmt: skip
    config.names = {**config.names, **names(f"nemo-{engine}")}
    tp, asynchronous = config.whole("tp"), config.flag("asynchronous")
    if config.flag("colocated_on"):
        if asynchronous:
            raise ConfigError(f"{config.where('colocated_on')}: asynchronous GRPO on the GPUs that train is not "
                              f"simulated: expected false, and {config.key('rollout_gpus')}")  # fmt: skip
        return _Generation(engine, tp, None, False, config.where("tp"))
    gpus = (1 if nodes == 1 else config.whole("rollout_nodes")) * config.whole("rollout_gpus")
    said = config.said("rollout_gpus", *(["rollout_nodes"] if nodes > 1 else []))
    if gpus >= nodes * per_node:
        raise ConfigError(f"{said}: {gpus} GPUs for generation leave none of {nodes * per_node} for training")
    return _Generation(engine, tp, gpus, asynchronous, joined(config.where("tp"), said))


def _workflow(config: Settings, draft: Draft, ahead: int) -> None:
    like = "" if config.text("estimator") == "grpo" else "it has GRPO's calls"
    reference = config.needed("kl") > 0
    on_policy = config.flag("force_on_policy") and config.value("threshold") is None
    why = config.where("force_on_policy") if on_policy else "computed before training"
    draft.entries["workflow"] |= {  # type: ignore[operator]
        "algorithm": Entry("grpo", joined(config.where("estimator"), like)),
        "prompts": config.entry("prompts"),
        "responses": config.entry("responses"),
        "steps": parts.steps_of(ahead),
        "reference": Entry(reference, config.where("kl")),
        "old_log_probs": Entry(not on_policy, why),
    }


def _systems(config: Settings, draft: Draft, generation: _Generation, *, over_nodes: bool) -> None:
    more, tp, where = parts.filtering(config, draft), generation.tp, generation.where
    if generation.gpus is None:
        parts.add_systems(draft, tp, where, more, over_nodes=over_nodes)
        return
    if not generation.asynchronous:
        more = [{"split": {"rollout_gpus": generation.gpus}}, *more]
        parts.add_systems(draft, tp, where, more, apart=("verl", {}))
        return
    rule = {
        "rollout_gpus": generation.gpus,
        "max_trajectory_age_steps": config.needed("age"),
        "in_flight_weight_updates": config.flag("in_flight"),
        "updated_kv": "recompute" if config.flag("recompute_kv") else "keep",
    }
    said = joined(where, config.said("age", "in_flight", "recompute_kv"))
    parts.add_systems(draft, tp, said, more, apart=("nemo_async", rule))


def _note_refusals(config: Settings, draft: Draft, generation: _Generation, actor: Model, trainers: int) -> None:
    """Notes of what NeMo-RL or its engine would not start with; `trainers` are the GPUs that train."""
    training, vllm = draft.data()["training"], generation.engine == "vllm"
    values = {
        **{degree: training.get(degree, 1) for degree in ("tp", "pp", "cp")},
        "gpus": trainers, "on_policy": config.flag("force_on_policy"),
        "fp8": config.value("precision") == "fp8" if vllm else None,
        "kv_fp8": str(config.value("kv_precision")).startswith("fp8"),
    }  # fmt: skip
    megatron = training["backend"] == "megatron"
    engine = {"vllm": "vLLM", "sglang": "SGLang"}.get(generation.engine, "")
    parts.note_refusals(config, draft, actor, "NeMo-RL", engine, megatron=megatron, **values)


def _weight_sync(config: Settings, *, apart: bool) -> Entry:
    """Whole tensors one by one on the same GPUs; elsewhere a broadcast that all of the trainer's GPUs take part in."""
    said = config.where("colocated_on")
    if apart:
        return Entry("multi_sender", f"{said}: trainers and engines are one group, `init_collective`")
    return Entry("naive", f"{said}: tensor by tensor, `stream_weights_via_ipc_zmq`")


def _missing(config: Settings, engine: str) -> list[str]:
    """What bears on time and is not in the experiment, each with where it is said."""
    sections = {"vllm": (_VLLM, _VLLM.replace("kwargs", "cfg")), "sglang": (_SGLANG,)}.get(engine, ())
    found = parts.unlike_of(config, "nemo", engine, *sections)
    if config.value("precision") == "fp8":
        found += unlike(config, unlike_rows("nemo-fp8"))
    if config.flag("fp8_on") and (recipe := config.value("fp8_recipe")) not in FP8_RECIPES:
        found.append(f"{config.where('fp8_on')}, {config.where('fp8_recipe')} = {recipe}: here in bf16")
    for name in ("trtllm_precision", "train_precision"):
        if (value := config.value(name)) not in (None, "bfloat16", "auto"):
            found.append(f"{config.where(name)} = {value}: here in bf16")
    if config.flag("filters") and (times := config.needed("multiplier")) != 1:
        found.append(f"{config.where('multiplier')} = {times}: so many times the prompts are generated at a "
                     "time; here a step begins with its own and launches what is lacking")  # fmt: skip
    often = ["val_period"] if (config.value("val_period") or -1) > 0 else []
    return found + parts.between_steps(config, *often, *(["save_period"] if config.flag("saves") else []))
