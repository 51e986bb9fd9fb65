"""How the engine and training of a veRL configuration run on their GPUs, in an experiment's words."""

from __future__ import annotations

from pathlib import Path

from rlsim.calibrate.verl_settings import RunSettings
from rlsim.errors import RlsimError
from rlsim.experiment.build import Setup
from rlsim.experiment.schema import Experiment, TrainingSpec
from rlsim.experiment.simulator import Simulator
from rlsim.init.draft import Draft, Entry
from rlsim.init.verl_config import VerlConfig
from rlsim.schema import validate
from rlsim.sim.request import EngineConfig
from rlsim.trace import Trace

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."


def add_engine(config: VerlConfig, draft: Draft, settings: RunSettings) -> None:
    """Limits of the engine that are not rlsim's own defaults."""
    keys = {
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "chunked_prefill": "enable_chunked_prefill",
    }
    default = EngineConfig()
    draft.entries["engine"] = {
        ours: Entry(getattr(settings.engine, ours), config.where(_R + theirs))
        for ours, theirs in keys.items()
        if config.is_given(_R + theirs) or getattr(settings.engine, ours) != getattr(default, ours)
    }


def add_training(config: VerlConfig, draft: Draft, settings: RunSettings, trace: Trace) -> None:
    """Degrees, micro-batches and switches of training."""
    strategy, megatron = settings.train, settings.backend == "megatron"
    default = TrainingSpec()
    offload = tuple(
        f"{_A}{part}.{kind}_offload" for part in ("fsdp_config", "megatron") for kind in ("param", "optimizer")
    )
    entries = {"backend": Entry(settings.backend, config.where(_A + "strategy"))}
    if megatron:
        for ours, theirs in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
            key = f"{_A}megatron.{theirs}_{'' if ours == 'cp' else 'model_'}parallel_size"
            entries[ours] = Entry(getattr(strategy, ours), config.where(key))
        key = _A + "megatron.use_distributed_optimizer"
        if config.get(key) is False:
            entries["zero_stage"] = Entry(0, config.where(key))
    elif strategy.cp > 1:
        entries["cp"] = Entry(
            strategy.cp,
            config.where(_A + "fsdp_config.ulysses_sequence_parallel_size", _A + "ulysses_sequence_parallel_size"),
        )
    entries["micro_batch_tokens"] = _micro_batch(config, draft, settings, trace)
    key = _M + "enable_gradient_checkpointing"
    granularity = _A + "megatron.override_transformer_config.recompute_granularity"
    entries["recompute"] = Entry(strategy.recompute, config.where(*((granularity, key) if megatron else (key,))))
    if strategy.logits == "fused":
        entries["fused_kernels"] = Entry(True, config.where(_M + "use_fused_kernels"))
    if strategy.offload != default.offload:
        entries["offload"] = Entry(strategy.offload, config.where(*(key for key in offload if config.given.get(key))))
    mini = config.where(_A + "ppo_mini_batch_size")
    entries["mini_batches"] = Entry(settings.mini_batches, f"data.train_batch_size / {mini}")
    if config.get(_A + "ppo_mini_batch_size") > settings.prompts:
        draft.notes.append(f"{mini} = {config.get(_A + 'ppo_mini_batch_size'):,} is more than the "
                           f"{settings.prompts:,} prompts of a step, with which veRL does not start")  # fmt: skip
    if settings.epochs != default.epochs:
        entries["epochs"] = Entry(settings.epochs, config.where(_A + "ppo_epochs"))
    draft.entries["training"] = entries
    if settings.inference != settings.train:
        draft.missing.append(
            f"{config.where(_R + 'log_prob_max_token_len_per_gpu', _R + 'log_prob_micro_batch_size_per_gpu')}: other "
            "micro-batches for log-probs than for training"
        )
    if not megatron and config.given.get("actor_rollout_ref.ref.fsdp_config.param_offload") and not strategy.offload:
        draft.missing.append(
            f"{config.where('actor_rollout_ref.ref.fsdp_config.param_offload')}: the reference's weights stay on the "
            "GPUs here"
        )


def _micro_batch(config: VerlConfig, draft: Draft, settings: RunSettings, trace: Trace) -> Entry:
    """The token budget of a micro-batch; a number of sequences is taken as that many of mean length."""
    strategy = settings.train
    sequences, key = strategy.micro_batch_sequences, _A + "ppo_micro_batch_size_per_gpu"
    if sequences is None and config.given.get(_A + "ppo_micro_batch_size") and not config.get(_A + "use_dynamic_bsz"):
        key = _A + "ppo_micro_batch_size"  # before 0.3: of all GPUs together
        sequences = max(config.given[key] // strategy.dp, 1)
    if sequences is None:
        per = f" × {strategy.cp} GPUs of a rank" if strategy.cp > 1 else ""
        if not config.get(_A + "use_dynamic_bsz"):
            draft.notes.append("no micro-batch size is given, without which veRL does not start: its token budget is "
                               "taken")  # fmt: skip
        return Entry(strategy.micro_batch_tokens, config.where(_A + "ppo_max_token_len_per_gpu") + per)
    prompts = trace.frame["prompt_tokens"].mean() if "prompt_tokens" in trace.frame else 0.0
    mean = round(float(prompts) + float(trace.response_tokens.clip(max=settings.cap).mean()))
    return Entry(sequences * mean, f"{config.where(key)} = {sequences} sequences of the trace's mean {mean:,} tokens")


def add_memory(config: VerlConfig, draft: Draft, settings: RunSettings, folder: Path) -> None:
    """veRL's share is the engine's own; rlsim's also holds what stays of training beside it."""
    key, share = _R + "gpu_memory_utilization", settings.memory_utilization
    setup = Setup.of(validate(draft.data() | {"name": "-"}, Experiment), folder)
    where = config.where(key)
    try:
        site = Simulator(setup).site()
        beside = site.memory.resident_bytes(site.plan, site.gpus)
    except RlsimError:  # what it is, `check` tells
        draft.entries["memory_utilization"] = Entry(share, where)
        return
    total = share + beside / setup.cluster.gpu.memory_bytes
    if total > 1.0:
        draft.notes.append(
            f"{where} = {share:g} and {beside / 1e9:.1f} GB of training states are more than a GPU has: all of it is "
            "taken"
        )
    text = f"{where} = {share:g}, which is the engine's own"
    if beside:
        text += f", and {beside / 1e9:.1f} GB of weights and optimizer states beside it"
    draft.entries["memory_utilization"] = Entry(float(f"{min(total, 1.0):.4g}"), text)
