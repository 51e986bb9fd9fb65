"""How the engine and training of a veRL configuration run on their GPUs, in an experiment's words."""

from __future__ import annotations

from typing import Any

from rlsim.experiment.schema import TrainingSpec
from rlsim.init.draft import Draft, Entry
from rlsim.init.parts import add_offloading, add_precision
from rlsim.init.settings import FLAG, INTEGER, TEXT, WHOLE
from rlsim.sim.request import EngineConfig
from rlsim.verl.defaults import ACTOR, MODEL, ROLLOUT
from rlsim.verl.engines import DEGREES
from rlsim.verl.notes import KV_TYPES, QUANTISED, REFERENCE_OFFLOAD, SGLANG, VLLM
from rlsim.verl.run import RunSettings
from rlsim.verl.settings import FSDP_REDUCES, MEGATRON_REDUCES, STRATEGY, VerlSettings

_OFFLOADED = ("param", "optimizer")


def add_engine(config: VerlSettings, draft: Draft, settings: RunSettings, *, measured: bool) -> None:
    """Limits of the engine that are not rlsim's own defaults, and whether it decodes without CUDA graphs.

    `measured`: its calibration is one that was given, whose host time is that of the run.
    """
    keys = {
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "chunked_prefill": "enable_chunked_prefill",
        "enable_prefix_caching": "enable_prefix_caching",
    }
    default = EngineConfig()
    own = "" if config.get(TEXT, ROLLOUT + "name") != "sglang" else "SGLang's own: veRL does not hand it on"
    entries = draft.entries["engine"] = {
        ours: Entry(
            getattr(settings.engine, ours),
            own if own and ours != "max_num_seqs" else config.where(ROLLOUT + theirs),
        )
        for ours, theirs in keys.items()
        if config.is_given(ROLLOUT + theirs) or getattr(settings.engine, ours) != getattr(default, ours)
    }
    eager = ROLLOUT + "enforce_eager"
    if config.is_given("page_tokens"):
        entries["page_tokens"] = config.entry("page_tokens")
    if config.flag(eager) and not measured:
        entries["graphs"] = Entry(False, f"{config.where(eager)}; launch times of an eager `generate`")
    draft.missing += add_offloading(config, draft, VLLM, SGLANG, settings.rollout_tp)
    draft.missing += add_precision(config, draft, QUANTISED, {"fp8": "fp8_block", True: "fp8_block"}, *KV_TYPES)


def add_training(config: VerlSettings, draft: Draft, settings: RunSettings) -> None:
    """Degrees, micro-batches and switches of training."""
    strategy, megatron = settings.train, settings.backend == "megatron"
    default = TrainingSpec()
    entries = {"backend": Entry(settings.backend, config.where(STRATEGY))}

    def add(name: str, value: Any, *keys: str) -> None:
        entries[name] = Entry(value, config.where(*keys))

    sharded = ACTOR + "megatron.use_distributed_optimizer"
    tp_key, pp_key, ep_key, expert_key = DEGREES
    ulysses = [f"{ACTOR}{part}ulysses_sequence_parallel_size" for part in ("fsdp_config.", "")]
    cp_keys = [ACTOR + "megatron.context_parallel_size"] if megatron else ulysses
    degrees = {"tp": (strategy.tp, [tp_key]), "pp": (strategy.pp, [pp_key]), "cp": (strategy.cp, cp_keys)}
    for name, (degree, said) in degrees.items():
        if megatron or degree > 1:
            add(name, degree, *said)
    if strategy.ep > 1:
        add("ep", strategy.ep, ep_key)
    if strategy.expert_tp is not None and strategy.experts_apart:
        add("expert_tp", strategy.expert_tp, expert_key)
    if megatron and config.get(FLAG, sharded) is False:
        add("zero_stage", 0, sharded)
    shard = config.get(INTEGER, ACTOR + "fsdp_config.fsdp_size")
    if not megatron and shard and 0 < shard < strategy.shards:
        add("shard_gpus", shard, ACTOR + "fsdp_config.fsdp_size")
    if strategy.gradients != default.gradients:
        add("gradients", strategy.gradients, MEGATRON_REDUCES if megatron else FSDP_REDUCES)
    unit, entry = _micro_batch(config, settings)
    entries[f"micro_batch_{unit}"] = entry
    if settings.inference != strategy:
        unit, entry = _log_prob_micro_batch(config, settings)
        entries[f"log_prob_micro_batch_{unit}"] = entry
    about = "assumed: veRL's single controller, as on one cluster of H20 (docs/calibration.md)"
    entries["driver_per_token"] = Entry("0.185 us", about)
    granularity = [ACTOR + "megatron.override_transformer_config.recompute_granularity"] if megatron else []
    add("recompute", strategy.recompute, *granularity, MODEL + "enable_gradient_checkpointing")
    if strategy.logits == "fused":
        add("fused_kernels", True, MODEL + "use_fused_kernels")
    if strategy.offload != default.offload:
        keys = (f"{ACTOR}{part}.{kind}_offload" for part in ("fsdp_config", "megatron") for kind in _OFFLOADED)
        add("offload", strategy.offload, *(key for key in keys if config.flag(key)))
    mini = config.where(ACTOR + "ppo_mini_batch_size")
    entries["mini_batches"] = Entry(settings.mini_batches, f"data.train_batch_size / {mini}")
    if settings.epochs != default.epochs:
        add("epochs", settings.epochs, ACTOR + "ppo_epochs")
    draft.entries["training"] = entries
    if not megatron and config.flag(REFERENCE_OFFLOAD) and not strategy.offload:
        draft.missing.append(f"{config.where(REFERENCE_OFFLOAD)}: the reference's weights stay on the GPUs here")


def _micro_batch(config: VerlSettings, settings: RunSettings) -> tuple[str, Entry]:
    """A micro-batch of training: tokens, its budget, or sequences."""
    strategy = settings.train
    sequences, key = strategy.micro_batch_sequences, ACTOR + "ppo_micro_batch_size_per_gpu"
    dynamic, of_all_gpus = config.flag(ACTOR + "use_dynamic_bsz"), ACTOR + "ppo_micro_batch_size"  # before 0.3
    if sequences is None and not dynamic and (together := config.get(WHOLE, of_all_gpus)):
        sequences, key = max(together // strategy.dp, 1), of_all_gpus
    if sequences is None:
        per = f" × {strategy.cp} GPUs of a rank" if strategy.cp > 1 else ""
        return "tokens", Entry(strategy.micro_batch_tokens, config.where(ACTOR + "ppo_max_token_len_per_gpu") + per)
    return "sequences", Entry(sequences, config.where(key))


def _log_prob_micro_batch(config: VerlSettings, settings: RunSettings) -> tuple[str, Entry]:
    """The same of log-probs, where it is another one."""
    strategy, keys = settings.inference, ("log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu")
    tokens, sequences = (config.where(ROLLOUT + key) for key in keys)
    if strategy.micro_batch_sequences is not None:
        return "sequences", Entry(strategy.micro_batch_sequences, sequences)
    of = f" × {strategy.cp} GPUs of a rank" if strategy.cp > 1 else ""
    return "tokens", Entry(strategy.micro_batch_tokens, tokens + of)
