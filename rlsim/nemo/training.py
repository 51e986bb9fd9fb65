"""How training of a NeMo-RL configuration runs on its GPUs, in an experiment's words."""

from __future__ import annotations

import math

from rlsim.init.draft import Draft, Entry
from rlsim.init.parts import joined, recompute
from rlsim.init.settings import TEXT, WHOLE, Settings
from rlsim.nemo.defaults import (
    COLOCATED,
    DTENSOR,
    FP8,
    FP8_RECIPE,
    FP8_RECIPES,
    GRPO,
    MEGATRON,
    OFFLOAD_FOR_LOGPROB,
    POLICY,
)

_PACKING, _DYNAMIC = POLICY + "sequence_packing.", POLICY + "dynamic_batching."
_SEQUENCES = {"train": POLICY + "train_micro_batch_size", "logprob": POLICY + "logprob_batch_size"}
_BATCH = POLICY + "train_global_batch_size"


def add_training(config: Settings, draft: Draft, *, apart: bool, has_experts: bool = False) -> None:
    """Degrees, micro-batches and switches of training; with generation on its GPUs its states make room for it."""
    megatron = config.flag(MEGATRON + "enabled")
    entries = {"backend": Entry("megatron" if megatron else "fsdp", config.where(MEGATRON + "enabled"))}
    recipe = config.get(TEXT, FP8_RECIPE)
    if megatron and config.flag(FP8) and recipe in FP8_RECIPES:
        entries["precision"] = Entry(FP8_RECIPES[recipe], joined(config.where(FP8), config.where(FP8_RECIPE)))
    degrees = (
        {name: f"{MEGATRON}{key}_model_parallel_size" for name, key in (("tp", "tensor"), ("pp", "pipeline"))}
        if megatron
        else {"tp": DTENSOR + "tensor_parallel_size"}
    )
    degrees["cp"] = (MEGATRON if megatron else DTENSOR) + "context_parallel_size"
    for name, key in degrees.items():
        if config.whole(key) > 1 or megatron:
            entries[name] = config.entry(WHOLE, key)
    _add_experts(config, entries, megatron, has_experts)
    sharded = MEGATRON + "optimizer.use_distributed_optimizer"
    reduced = MEGATRON + "distributed_data_parallel_config.grad_reduce_in_fp32"
    if megatron and not config.flag(sharded):
        entries["zero_stage"] = Entry(0, config.where(sharded))
    if megatron and not config.flag(reduced):
        entries["gradients"] = Entry("bf16", config.where(reduced))
    for kind, call in (("train", ""), ("logprob", "log_prob_")):
        unit, entry = _micro_batch(config, kind)
        entries[f"{call}micro_batch_{unit}"] = entry
    checkpoints = (MEGATRON if megatron else DTENSOR) + "activation_checkpointing"
    entries["recompute"] = recompute(config, checkpoints, MEGATRON + "recompute_granularity" if megatron else "")
    if config.flag(_PACKING + "enabled"):
        entries["packing"] = Entry("first_fit", config.where(_PACKING + "enabled"))
    cpu = DTENSOR + "cpu_offload"
    if not megatron and config.flag(cpu):
        entries["offload"] = Entry(True, config.where(cpu))
    elif not apart or config.flag(OFFLOAD_FOR_LOGPROB):
        where = config.where(OFFLOAD_FOR_LOGPROB if apart else COLOCATED + "enabled")
        meanwhile = "log-probs are computed" if apart else "they generate"
        entries["offload"] = Entry(True, f"{where}: the states leave the GPUs while {meanwhile}")
        entries["host_memory"] = Entry("pageable", "copied by tensor.to('cpu')")
    keys = (GRPO + "num_prompts_per_step", GRPO + "num_generations_per_prompt")
    responses = config.whole(keys[0]) * config.whole(keys[1])
    batch = config.whole(_BATCH)
    entries["mini_batches"] = Entry(math.ceil(responses / batch), f"{responses:,} responses / {config.where(_BATCH)}")
    if batch > responses:
        draft.notes.append(f"{config.where(_BATCH)} = {batch:,} is more than the {responses:,} responses of a step")
    draft.entries["training"] = entries


def _add_experts(config: Settings, entries: dict[str, Entry], megatron: bool, has_experts: bool) -> None:
    """How experts are spread, where the model has any; DTensor shares them out whole."""
    key = MEGATRON + "expert_model_parallel_size" if megatron else DTENSOR + "expert_parallel_size"
    cut = MEGATRON + "expert_tensor_parallel_size"
    ep, expert_tp = config.whole(key), config.whole(cut) if megatron else 1
    if has_experts and ep > 1:
        entries["ep"] = Entry(ep, config.where(key))
    if has_experts and megatron and expert_tp != (1 if ep > 1 else entries["tp"].value):
        entries["expert_tp"] = Entry(expert_tp, config.where(cut))


def _micro_batch(config: Settings, kind: str) -> tuple[str, Entry]:
    """Tokens, a budget, with packing or dynamic batching; else sequences."""
    for section in (_PACKING, _DYNAMIC):
        if config.flag(section + "enabled"):
            key = f"{section}{kind}_mb_tokens"
            return "tokens", config.entry(WHOLE, key)
    return "sequences", config.entry(WHOLE, _SEQUENCES[kind])
