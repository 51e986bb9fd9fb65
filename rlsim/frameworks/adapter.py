"""A configuration of NeMo-RL, AReaL, slime or SkyRL as an experiment, every value with where it is from, by one table.

A framework's file beside this one has only what a table cannot say: its own words, and what is settled before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.mapping import Reading, names
from rlsim.frameworks.names import node_gpus
from rlsim.frameworks.parts import Options
from rlsim.sim.request import EngineConfig

#: What conditions of `rlsim/data/starts.yaml` call the engines.
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def adapted(
    reading: Reading, engine: str, options: Options, sources: Sequence[str], model: Callable[[], str] | None = None
) -> Draft:
    """The experiment of a configuration whose generation is by `engine`; `model` tells its name if not a setting does.

    Of the keys of `draft`, `gpus` and `per_node` are all GPUs and those of a node, `tp` those of a replica, `cap` and
    `prompts` the longest response and prompt, `use` how the engine is used, `memory` its share. Of the facts, `apart`
    says whether generation has GPUs of its own, `rollout` how many, `policy` the asynchronous system, `filter_by` the
    setting that drops prompts by their rewards, `sections` what the engine's own settings begin with, and `also_unlike`
    more rows of what is unlike. Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = reading.config
    config.names = {**config.names, **names(f"{reading.of}-{engine}")}
    reading.facts["node_gpus"] = lambda: node_gpus(options.gpu) if options.gpu else None
    reading.refuse()
    draft = Draft({}, notes=list(config.notes))
    said = reading.entries("draft")
    size, where = said["gpus"].value, said["gpus"].comment
    machines = parts.add_cluster(
        draft, options, *parts.whole_nodes(size, said["per_node"].value, where, options), where
    )
    path = model() if model else options.model or config.text("model")
    actor = parts.add_model(draft, options, path, config.where("model"))
    parts.add_calibration(draft, options, machines, said["engine"])
    filter_by = reading.fact("filter_by") or ""
    filters = config.key(filter_by) if filter_by else ""
    parts.add_trace(draft, options, actor, said["cap"], filters, said.get("prompts"))
    reading.facts["of_turns"] = "environment" in draft.entries
    trace = draft.block("trace")
    trace.update(reading.entries("trace"))
    if "max_model_len" in config.names:
        parts.limit_context(config, draft)
    parts.add_own_model(config, draft, options, "critic", "critic")
    use = said.get("use", Entry("class"))
    parts.add_engine(config, draft, engine, machines.gpu, use.value, use.comment)
    limits = EngineConfig().model_dump() | draft.data()["engine"]
    longest = trace["max_model_len"].value if "max_model_len" in trace else None
    reading.facts |= {"max_tokens": limits["max_num_batched_tokens"], "max_len": longest}
    parts.add_mapped(reading, draft, actor)
    if draft.data()["workflow"].get("reference"):
        parts.add_own_model(config, draft, options, "reference_model", "reference")
    more = parts.batching(reading, draft, filter_by)
    apart, tp = bool(reading.fact("apart")), said["tp"]
    policy, rollout = reading.fact("policy") or "", reading.fact("rollout") if apart else 0
    over_nodes = tp.value > machines.domain_gpus
    parts.add_systems(reading, draft, tp.value, tp.comment, more, policy, rollout, over_nodes=over_nodes)
    parts.add_memory(draft, said["memory"], options.folder, apart=apart)
    also, sections = reading.fact("also_unlike") or "", reading.fact("sections") or ()
    draft.missing = parts.unlike_of(config, draft, reading.of, engine, *sections, also=also)
    draft.missing += reading.texts("missing")
    training, gpus = draft.data()["training"], reading.fact("gpus")
    degrees = {degree: training.get(degree, 1) for degree in ("tp", "pp", "cp")}
    degrees["dp"] = max(gpus // math.prod(degrees.values()), 1)
    program, _, release = config.program.partition(" ")
    of, megatron = (program, _ENGINES.get(engine, "")), training["backend"] == "megatron"
    parts.note_refusals(reading, draft, actor, *of, megatron=megatron, release=release, **degrees)
    # Beside a YAML file the experiment has another name than that; what ends otherwise is a name already.
    own = f"{Path(config.name).stem}-rlsim" if config.name.endswith((".yaml", ".yml")) else config.name
    return parts.finish(config, draft, options, sources, reading.fact("title"), own)
