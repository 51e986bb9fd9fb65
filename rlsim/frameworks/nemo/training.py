"""How training of a NeMo-RL configuration runs on its GPUs, in an experiment's words."""

from __future__ import annotations

import math

from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.parts import recompute
from rlsim.frameworks.settings import Settings

FP8_RECIPES = {"tensorwise": "fp8", "blockwise": "fp8_block"}


def add_training(config: Settings, draft: Draft, *, apart: bool, has_experts: bool = False) -> None:
    """Degrees, micro-batches and switches of training; with generation on its GPUs its states make room for it."""
    megatron = config.flag("megatron_on")
    of, recipe = "megatron" if megatron else "dtensor", config.value("fp8_recipe")
    entries = {"backend": Entry("megatron" if megatron else "fsdp", config.where("megatron_on"))}
    if megatron and config.flag("fp8_on") and recipe in FP8_RECIPES:
        entries["precision"] = Entry(FP8_RECIPES[recipe], config.said("fp8_on", "fp8_recipe"))
    for degree in ("tp", "pp", "cp") if megatron else ("tp", "cp"):
        if config.whole(f"{of}_{degree}") > 1 or megatron:
            entries[degree] = config.entry(f"{of}_{degree}")
    _add_experts(config, entries, megatron, has_experts)
    if megatron and not config.flag("sharded"):
        entries["zero_stage"] = Entry(0, config.where("sharded"))
    if not megatron:
        entries["logits"] = Entry("torch", "DTensor's loss: log_softmax of a copy in fp32")
    if megatron and not config.flag("reduced"):
        entries["gradients"] = Entry("bf16", config.where("reduced"))
    # Tokens, a budget, with packing or dynamic batching; else sequences.
    budget = next((name for name in ("packing", "dynamic") if config.flag(name)), "")
    for call in ("", "log_prob_"):
        unit, name = ("tokens", f"{budget}_tokens") if budget else ("sequences", "micro")
        entries[f"{call}micro_batch_{unit}"] = config.entry(call + name)
    entries["recompute"] = recompute(config, f"{of}_checkpoints", "granularity" if megatron else "")
    if config.flag("packing"):
        entries["packing"] = Entry("first_fit", config.where("packing"))
    if not megatron and config.flag("cpu_offload"):
        entries["offload"] = config.entry("cpu_offload")
    elif not apart or config.flag("offload_for_logprob"):
        where = config.where("offload_for_logprob" if apart else "colocated_on")
        meanwhile = "log-probs are computed" if apart else "they generate"
        entries["offload"] = Entry(True, f"{where}: the states leave the GPUs while {meanwhile}")
        entries["host_memory"] = Entry("pageable", "copied by tensor.to('cpu')")
    responses, batch = config.whole("prompts") * config.whole("responses"), config.whole("batch")
    said = config.where("batch")
    entries["mini_batches"] = Entry(math.ceil(responses / batch), f"{responses:,} responses / {said}")
    if batch > responses:
        draft.notes.append(f"{said} = {batch:,} is more than the {responses:,} responses of a step")
    draft.entries["training"] = entries


def _add_experts(config: Settings, entries: dict[str, Entry], megatron: bool, has_experts: bool) -> None:
    """How experts are spread, where the model has any; DTensor shares them out whole."""
    name = "megatron_ep" if megatron else "dtensor_ep"
    ep, expert_tp = config.whole(name), config.whole("megatron_expert_tp") if megatron else 1
    if has_experts and ep > 1:
        entries["ep"] = config.entry(name)
    if has_experts and megatron and expert_tp != (1 if ep > 1 else entries["tp"].value):
        entries["expert_tp"] = config.entry("megatron_expert_tp")
