"""`rlsim init --from-slime`: arguments of slime as an experiment, every value with where it is from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsim.errors import CatalogueError
from rlsim.frameworks import parts
from rlsim.frameworks.draft import ASSUMED, Draft, Entry
from rlsim.frameworks.mapping import Reading, names
from rlsim.frameworks.names import find_model, node_gpus
from rlsim.frameworks.parts import Options
from rlsim.frameworks.settings import Settings, Unknown
from rlsim.frameworks.shell import Override
from rlsim.frameworks.sources import read_sources
from rlsim.frameworks.variables import Argument
from rlsim.models.hardware import load_cluster

_PROGRAM = re.compile(r"(?:.*/)?(train(?:_async)?\.py)")
_FLAG = re.compile(r"(?P<key>--[a-z][\w-]*|program)(?:[= ](?P<value>.*))?", re.DOTALL)
#: The end of a checkpoint's name that says how its weights are written, not which shape they have.
_WRITTEN = re.compile(r"-(fp8|int4|bf16)/?$", re.IGNORECASE)
#: The share of an 80 GB GPU that SGLang 0.5 finds for itself (`_handle_gpu_memory_settings`).
_OWN_SHARE = 0.83


def takes(found: list[Override], before: str, argument: Argument) -> bool:
    """See `rlsim.frameworks.shell.Takes`: behind train.py, or in a plain list, a flag and its values."""
    flag, program = _FLAG.fullmatch(argument.text), _PROGRAM.fullmatch(argument.text)
    if not found and program:
        found.append(Override("program", program[1], argument.line))
    elif (not found and before) or (not found and not flag) or "[@]" in argument.text:
        return False
    elif flag:
        found.append(Override(flag["key"], argument.unknown or flag["value"] or "", argument.line))
    elif not isinstance(found[-1].value, Unknown):
        value = argument.unknown or f"{found[-1].value} {argument.text}".strip()
        found[-1] = replace(found[-1], value=value)
    return True


def _given(text: str) -> Override | None:
    """A flag beside files, with or without its dashes."""
    flag = _FLAG.fullmatch(f"--{text}" if re.match(r"(?!program=)[a-z][a-z\d-]*=", text) else text)
    return Override(flag["key"], flag["value"] or "", 0) if flag else None


def from_slime(sources: Sequence[str], options: Options) -> Draft:
    """The experiment that slime's run scripts and arguments describe.

    Raises `RlsimError`s that say what is missing, unknown or unsupported.
    """
    config = read_sources(sources, "slime", "--from-slime", "slime", takes, _given)
    config.names = {**config.names, **names("slime-sglang")}
    _settle_node(config, options)
    apart, asynchronous = not config.flag("colocate"), config.text("program") == "train_async.py"
    reading = Reading("slime", config, asynchronous=asynchronous)
    reading.refuse()
    draft = Draft({}, notes=list(config.notes))
    nodes, per_node, where = config.whole("nodes"), config.whole("per_node"), config.said("nodes", "per_node")
    train, rollout, tp = nodes * per_node, 0, config.whole("tp")
    if apart:
        rollout, where = config.whole("rollout_gpus"), config.said("nodes", "per_node", "rollout_gpus")
        nodes, per_node = parts.whole_nodes(train + rollout, config.whole("of_node"), where, options)
    machines = parts.add_cluster(draft, options, nodes, per_node, where)
    actor = parts.add_model(draft, options, _model(config, options), config.where("model"))
    parts.add_calibration(draft, options, machines, Entry("sglang", "slime generates by SGLang"))
    cap = config.entry("new_tokens" if config.value("new_tokens") or not config.value("longest") else "longest")
    filters, prompts = config.value("filters"), config.value("longest_prompt")
    longest_prompt = config.entry("longest_prompt") if prompts else None
    parts.add_trace(draft, options, actor, cap, config.key("filters") if filters else "", longest_prompt)
    if config.value("longest"):
        draft.block("trace")["max_model_len"] = config.entry("longest")
    parts.add_engine(config, draft, "sglang", machines.gpu)
    degrees = {degree: config.whole(f"train_{degree}") for degree in ("tp", "pp", "cp")}
    responses = config.whole("prompts") * config.whole("responses")
    reading.facts |= {
        "apart": apart, "rollout": rollout, "has_experts": actor.num_experts > 0, "of_step": responses,
        "updates": config.value("updates") or max(responses // config.whole("batch"), 1),
    }  # fmt: skip
    parts.add_mapped(reading, draft, actor)
    said, more = config.where("tp"), parts.filtering(config, draft, "filters" if filters else "")
    resumes = not apart and not filters and "active" in reading.entries("colocated_async")
    policy = "one_step_off" if asynchronous else "colocated_async" if resumes else ""
    parts.add_systems(reading, draft, tp, said, more, policy, rollout, over_nodes=tp > machines.domain_gpus)
    share = config.entry("memory") if config.value("memory") else Entry(_OWN_SHARE, f"{ASSUMED}: as SGLang finds it")
    parts.add_memory(draft, share, options.folder, apart=apart)
    draft.missing = [*parts.unlike_of(config, draft, "slime", "sglang", "--sglang-"), *reading.texts("missing")]
    values: dict[str, Any] = {**degrees, "gpus": train, "samples": responses}
    parts.note_refusals(config, draft, actor, "slime", "SGLang", megatron=True, **values)
    return parts.finish(config, draft, options, sources, config.name)


def _settle_node(config: Settings, options: Options) -> None:
    """A script that counts the GPUs of the machine it is on has whole nodes here."""
    key, kind = config.key("per_node"), options.gpu
    if key not in config.doubts or not (kind or options.cluster):
        return
    found = load_cluster(options.cluster).gpus_per_node if options.cluster else node_gpus(kind or "")
    place, unknown = config.doubts.pop(key)
    give = f"; give {unknown.variable}=… if it is another" if unknown.variable else ""
    config.notes.append(f"{key} ({place}): {unknown.why}: {found}, a whole node, is taken{give}")
    config.put({key: found}, f"{ASSUMED}: a whole node")


def _model(config: Settings, options: Options) -> str:
    """The checkpoint's name without how it is written, or, where that tells no shape, that of the model's arguments."""
    named = _WRITTEN.sub("", config.text("model"))
    for name in (named, *config.sourced):
        try:
            find_model(name, options.folder)
        except CatalogueError:
            continue
        return name
    return named
