"""How the engine and training of a veRL configuration run on their GPUs, in an experiment's words."""

from __future__ import annotations

from typing import Any

from rlsim.experiment.schema import TrainingSpec
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.parts import add_offloading, add_precision
from rlsim.frameworks.settings import FLAG
from rlsim.frameworks.verl.defaults import ACTOR, ROLLOUT
from rlsim.frameworks.verl.run import RunSettings
from rlsim.frameworks.verl.settings import FSDP_REDUCES, MEGATRON_REDUCES, STRATEGY, VerlSettings
from rlsim.models.precision import Precision
from rlsim.sim.request import EngineConfig

_OFFLOADED = ("param", "optimizer")


def add_engine(config: VerlSettings, draft: Draft, settings: RunSettings, *, measured: bool) -> None:
    """Limits of the engine that are not rlsim's own defaults, and whether it decodes without CUDA graphs.

    `measured`: its calibration is one that was given, whose host time is that of the run.
    """
    values, default = settings.engine.model_dump(), EngineConfig().model_dump()
    by = "" if config.value("engine") != "sglang" else "SGLang's own: veRL does not hand it on"
    entries = draft.entries["engine"] = {
        limit: Entry(values[limit], by if by and limit != "max_num_seqs" else config.where(limit))
        for limit in ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "enable_prefix_caching")
        if config.is_given(limit) or values[limit] != default[limit]
    }
    for own in ("page_tokens", "async_scheduling"):
        early = own == "async_scheduling" and not by and config.value(own) is False  # a release with vLLM before 0.14
        if early or config.is_given(own):
            entries[own] = config.entry(own)
    if config.flag("eager") and not measured:
        entries["graphs"] = Entry(False, f"{config.where('eager')}; launch times of an eager `generate`")
    draft.missing += add_offloading(config, draft, settings.rollout_tp)
    precisions: dict[Any, Precision] = {"fp8": "fp8_block", True: "fp8_block"}
    draft.missing += add_precision(config, draft, "quantised", precisions, "vllm_kv_type", "sglang_kv_type")


def add_training(config: VerlSettings, draft: Draft, settings: RunSettings) -> None:
    """Degrees, micro-batches and switches of training."""
    strategy, megatron = settings.train, settings.backend == "megatron"
    default = TrainingSpec()
    entries = {"backend": Entry(settings.backend, config.where(STRATEGY))}

    def add(name: str, value: Any, *keys: str) -> None:
        entries[name] = Entry(value, config.where(*keys))

    sharded = ACTOR + "megatron.use_distributed_optimizer"
    degrees = {
        "tp": "train_tp",
        "pp": "train_pp",
        "cp": ACTOR + "megatron.context_parallel_size" if megatron else "ulysses",
    }
    for degree, said in degrees.items():
        if megatron or getattr(strategy, degree) > 1:
            add(degree, getattr(strategy, degree), said)
    if strategy.ep > 1:
        add("ep", strategy.ep, "train_ep")
    if strategy.expert_tp is not None and strategy.experts_apart:
        add("expert_tp", strategy.expert_tp, "train_expert_tp")
    if megatron and config.get(FLAG, sharded) is False:
        add("zero_stage", 0, sharded)
    shard = config.value("shards")
    if not megatron and shard and 0 < shard < strategy.shards:
        add("shard_gpus", shard, "shards")
    if strategy.gradients != default.gradients:
        add("gradients", strategy.gradients, MEGATRON_REDUCES if megatron else FSDP_REDUCES)
    sequences, name = strategy.micro_batch_sequences, "micro"  # the name of the other is from before 0.3
    if sequences is None and not config.flag("dynamic") and (together := config.value("micro_of_all")):
        sequences, name = max(together // strategy.dp, 1), "micro_of_all"
    of_rank = f" × {strategy.cp} GPUs of a rank" if strategy.cp > 1 else ""

    def add_micro_batch(call: str, sequences: int | None, tokens: int, name: str, budget: str) -> None:
        if sequences is not None:
            add(f"{call}micro_batch_sequences", sequences, name)
        else:
            entries[f"{call}micro_batch_tokens"] = Entry(tokens, config.where(budget) + of_rank)

    add_micro_batch("", sequences, strategy.micro_batch_tokens, name, ACTOR + "ppo_max_token_len_per_gpu")
    if (other := settings.inference) != strategy:
        names = f"{ROLLOUT}log_prob_micro_batch_size_per_gpu", "log_prob_tokens"
        add_micro_batch("log_prob_", other.micro_batch_sequences, other.micro_batch_tokens, *names)
    about = "assumed: veRL's single controller, as on one cluster of H20 (docs/calibration.md)"
    entries["driver_per_token"] = Entry("0.185 us", about)
    add("recompute", strategy.recompute, *(["granularity"] if megatron else []), "checkpoints")
    if strategy.logits == "fused":
        add("logits", "fused", "fused")
    if not megatron and config.value("attention") == "flash_attention_3":
        add("attention", "flash_attention_3", "attention")
    if strategy.offload != default.offload:
        keys = (f"{ACTOR}{part}.{kind}_offload" for part in ("fsdp_config", "megatron") for kind in _OFFLOADED)
        add("offload", strategy.offload, *(key for key in keys if config.flag(key)))
    mini = config.where("mini")
    entries["mini_batches"] = Entry(settings.mini_batches, f"data.train_batch_size / {mini}")
    if settings.epochs != default.epochs:
        add("epochs", settings.epochs, ACTOR + "ppo_epochs")
    draft.entries["training"] = entries
    if not megatron and config.flag("reference_offload") and not strategy.offload:
        draft.missing.append(f"{config.where('reference_offload')}: the reference's weights stay on the GPUs here")
