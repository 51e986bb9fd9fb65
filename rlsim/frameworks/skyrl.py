"""`rlsim init --from-skyrl`: settings of SkyRL as an experiment, every value with where it is from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsim.frameworks import parts
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.mapping import Reading, default_values, names
from rlsim.frameworks.names import node_gpus
from rlsim.frameworks.parts import Options
from rlsim.frameworks.settings import TEXT, Settings
from rlsim.frameworks.shell import Override
from rlsim.frameworks.sources import override_of, read_sources
from rlsim.frameworks.variables import Argument
from rlsim.models.model import Model

_ROOTS = ("trainer.", "generator.", "environment.", "data.")
_ENGINE = "generator.inference_engine."
#: What settings of the engine itself begin with, today and before `inference_engine` was a section.
_SECTIONS = (f"{_ENGINE}engine_init_kwargs.", "generator.engine_init_kwargs.")
#: Entry points whose generator is SkyRL's own.
_OWN = ("main_base", "main_async", "main_fully_async", "")
#: The last release that takes the keys of before.
_OLD = "0.2"


def _given(text: str) -> Override | None:
    """A setting of SkyRL's, whose keys have dots; other names are a script's."""
    override = override_of(text)
    return override if override and override.key.startswith(_ROOTS) else None


def takes(found: list[Override], before: str, argument: Argument) -> bool:  # noqa: ARG001
    """See `rlsim.frameworks.shell.Takes`: each override is one word."""
    override = _given(argument.text)
    found += [replace(override, value=argument.unknown or override.value, line=argument.line)] if override else []
    return override is not None


def from_skyrl(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that SkyRL's run scripts, YAML files and overrides describe.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_sources(sources, "SkyRL", "--from-skyrl", "skyrl", takes, _given)
    config.names = {**config.names, **names("skyrl-vllm")}
    _settle_release(config)
    program = config.text("program")
    apart, one_ahead = not config.flag("colocate"), "main_async" in program
    fully = config.flag("fully") or "fully_async" in program
    reading = Reading("skyrl", config, program=program, one_ahead=one_ahead, fully=fully)
    reading.refuse()
    draft = Draft({}, notes=list(config.notes))
    nodes, per_node, tp, where = *map(config.whole, ("nodes", "per_node", "tp")), config.said("nodes", "per_node")
    replica = tp * config.whole("rollout_pp")
    train, rollout = nodes * per_node, config.whole("engines") * replica * config.whole("rollout_dp")
    critic, reference = config.value("critic") is not None, config.flag("kl_loss") or config.flag("kl_in_reward")
    of_critic, of_ref = (config.whole(f"{of}_nodes") * config.whole(f"{of}_per_node") for of in ("critic", "ref"))
    others: dict[str, int] = {}
    if apart:
        others |= {"critic": of_critic} if critic else {}
        others |= {"reference": of_ref} if reference and not config.flag("colocate_ref") else {}
        total = train + rollout + sum(others.values())
        of_others = (f"{name.replace('reference', 'ref')}_per_node" for name in others)
        where = config.said("nodes", "per_node", "engines", "tp", *of_others)
        of_node = node_gpus(options.gpu) if options.gpu else total
        nodes, per_node = parts.whole_nodes(total, of_node, where, options)
    machines = parts.add_cluster(draft, options, nodes, per_node, where)
    actor = parts.add_model(draft, options, config.text("model"), config.where("model"))
    parts.add_calibration(draft, options, machines, config.entry("backend"))
    filters = _filters(config, fully=fully)
    _trace(config, draft, options, actor, config.key(filters) if filters else "")
    parts.add_critic(config, draft, options, actor)
    parts.add_engine(config, draft, "vllm", machines.gpu)
    dp_key = "rollout_dp" if config.whole("rollout_ep") > 1 else ""
    replica = parts.add_replica(config, draft, tp, "rollout_ep", "rollout_pp", dp_key)
    megatron = config.text("strategy") == "megatron"
    asked = ("correction", "outliers", "token_mask")
    corrected = config.flag("truncated_sampling") or any(config.value(name) is not None for name in asked)
    reading.facts |= {
        "apart": apart, "others": others, "train": train, "rollout": rollout, "replica": replica, "megatron": megatron,
        "has_experts": actor.num_experts > 0, "reference": reference, "corrected": corrected,
        "own": program.rpartition(".")[2] in _OWN,
    }  # fmt: skip
    parts.add_mapped(reading, draft, actor)
    over_nodes, more = replica > machines.domain_gpus, parts.filtering(config, draft, filters)
    policy = "skyrl_async" if fully else "one_step_off" if one_ahead else ""
    gpus = rollout if apart else 0
    parts.add_systems(reading, draft, replica, config.where("tp"), more, policy, gpus, over_nodes=over_nodes)
    parts.add_memory(draft, config.entry("memory"), options.folder, apart=apart)
    draft.missing = [*parts.unlike_of(config, draft, "skyrl", "vllm", *_SECTIONS), *reading.texts("missing")]
    training = draft.data()["training"]
    degrees = {degree: training.get(degree, 1) for degree in ("tp", "pp", "cp")}
    values: dict[str, Any] = {
        **degrees, "gpus": train, "dp": max(train // math.prod(degrees.values()), 1), "rollout_gpus": rollout,
        "ref_gpus": of_ref if reference else train, "critic_gpus": of_critic if critic else train,
        "has_critic": critic, "apart": apart, "tp_of_engine": tp, "drops": config.flag("zero_variance"),
        "anchored": config.value("anchor") == "rollout", "longest": draft.data()["trace"].get("max_model_len"),
        "fully": fully,
    }  # fmt: skip
    release = config.program.rpartition(" ")[2]
    parts.note_refusals(config, draft, actor, "SkyRL", "vLLM", megatron=megatron, release=release, **values)
    titles = config.told(TEXT, "title"), parts.own_name(config.name)
    return parts.finish(config, draft, options, sources, *titles)


def _settle_release(config: Settings) -> None:
    """Keys of before today's layout have the defaults of the last release that takes them."""
    old = [key for key in config.given if key.startswith(("generator.num_inf", "generator.inference_engine_"))]
    if old:
        config.program = f"SkyRL {_OLD}"
        config.default = dict(default_values("skyrl", _OLD))
        config.notes.append(f"{old[0]} ({config.origin[old[0]]}): of a layout that releases up to {_OLD} take; their "
                            f"defaults hold, and rlsim tune names keys as today ({_ENGINE}…)")  # fmt: skip


def _filters(config: Settings, *, fully: bool) -> str:
    """The setting that drops prompts without variance and generates others; empty if none does."""
    if fully:
        return "full_batch" if config.flag("full_batch") else ""
    return "sampling" if config.value("sampling") == "filter" else ""


def _trace(config: Settings, draft: Draft, options: Options, actor: Model, filters: str) -> None:
    """The lengths: `max_generate_length` is of a turn, `max_input_length` of what a turn begins with."""
    cap, turns = config.entry("new_tokens"), config.whole("turns")
    context = Entry((config.value("longest_input") or config.whole("longest_prompt")) + cap.value,
                    config.said("longest_input", "new_tokens"))  # fmt: skip
    if turns > 1:
        cap = Entry(min(turns * cap.value, context.value), f"{config.where('turns')} × {cap.comment}")
    parts.add_trace(draft, options, actor, cap, filters, config.entry("longest_prompt"))
    if "environment" in draft.entries:  # of whose turns the observations count
        draft.block("trace")["cap"] = context
    if turns > 1:
        draft.block("trace")["max_model_len"] = context
    parts.limit_context(config, draft)
