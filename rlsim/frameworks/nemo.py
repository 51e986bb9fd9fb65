"""`rlsim init --from-nemo`: a GRPO configuration of NeMo-RL as an experiment, every value with where it is from."""

from __future__ import annotations

from collections.abc import Sequence

from rlsim.errors import ConfigError
from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft
from rlsim.frameworks.mapping import Reading, Use, names, unlike, unlike_rows
from rlsim.frameworks.parts import Options, joined
from rlsim.frameworks.sources import read_sources
from rlsim.sim.request import EngineConfig

#: What settings of the engines themselves begin with.
_SECTIONS = {
    "vllm": ("policy.generation.vllm_kwargs.", "policy.generation.vllm_cfg."),
    "sglang": ("policy.generation.sglang_cfg.",),
}


def from_nemo(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that NeMo-RL's YAML files and overrides describe.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_sources(sources, "NeMo-RL", "--from-nemo", "nemo")
    reading = Reading("nemo", config)
    reading.refuse()
    draft = Draft({}, notes=list(config.notes))
    nodes, per_node, engine = config.whole("nodes"), config.whole("per_node"), config.text("backend")
    machines = parts.add_cluster(draft, options, nodes, per_node, config.said("nodes", "per_node"))
    config.names = {**config.names, **names(f"nemo-{engine}")}
    tp, where, gpus = config.whole("tp"), config.where("tp"), nodes * per_node
    apart = not config.flag("colocated_on")
    asynchronous = apart and config.flag("asynchronous")
    rollout = 0
    if apart:
        rollout = (1 if nodes == 1 else config.whole("rollout_nodes")) * config.whole("rollout_gpus")
        said = config.said("rollout_gpus", *(["rollout_nodes"] if nodes > 1 else []))
        if rollout >= gpus:
            raise ConfigError(f"{said}: {rollout} GPUs for generation leave none of {gpus} for training")
        where = joined(where, said)
    actor = parts.add_model(draft, options, options.model or config.text("model"), config.where("model"))
    parts.add_calibration(draft, options, machines, config.entry("backend"))
    new = config.value("new_tokens")
    cap = config.entry("new_tokens" if new is not None and new < config.whole("longest") else "longest")
    filters = "filters" if config.flag("filters") else ""
    parts.add_trace(draft, options, actor, cap, config.key(filters) if filters else "", None)
    draft.block("trace")["max_model_len"] = config.entry("longest")
    alone = engine == "vllm" and config.flag("async_engine")
    use: Use = "engine" if alone else "class"
    parts.add_engine(config, draft, engine, machines.gpu, use, config.where("async_engine") if alone else "")
    replica = parts.add_replica(config, draft, tp, "ep", "pp")
    ahead = config.needed("age") if asynchronous else 0
    reading.facts |= {
        "apart": apart, "ahead": ahead, "rollout": rollout, "replica": replica, "has_experts": actor.num_experts > 0,
        "budget": draft.data()["engine"].get("max_num_batched_tokens", EngineConfig().max_num_batched_tokens),
    }  # fmt: skip
    parts.add_mapped(reading, draft, actor)
    over_nodes, more = replica > machines.domain_gpus, parts.filtering(config, draft, filters)
    policy = "nemo_async" if asynchronous else ""
    parts.add_systems(reading, draft, replica, where, more, policy, rollout, over_nodes=over_nodes)
    parts.add_memory(draft, config.entry("memory"), options.folder, apart=apart)
    draft.missing = parts.unlike_of(config, draft, "nemo", engine, *_SECTIONS.get(engine, ()))
    fp8 = config.value("precision") == "fp8"
    draft.missing += unlike(config, unlike_rows("nemo-fp8")) if fp8 else []
    draft.missing += reading.texts("missing")
    training = draft.data()["training"]
    values = {
        **{degree: training.get(degree, 1) for degree in ("tp", "pp", "cp")},
        "gpus": gpus - rollout, "on_policy": config.flag("force_on_policy"), "fp8": fp8 if engine == "vllm" else None,
        "kv_fp8": str(config.value("kv_precision")).startswith("fp8"),
    }  # fmt: skip
    program = {"vllm": "vLLM", "sglang": "SGLang"}.get(engine, "")
    megatron = training["backend"] == "megatron"
    parts.note_refusals(config, draft, actor, "NeMo-RL", program, megatron=megatron, **values)
    return parts.finish(config, draft, options, sources, parts.own_name(config.name))
