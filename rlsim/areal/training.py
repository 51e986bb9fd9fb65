"""How training of an AReaL configuration runs on its GPUs, in an experiment's words."""

from __future__ import annotations

from rlsim.areal.allocation import Allocation
from rlsim.areal.defaults import ACTOR, GENERATION
from rlsim.init.draft import Draft, Entry
from rlsim.init.parts import joined, recompute
from rlsim.init.settings import TYPE, WHOLE, Settings

_MINI, _TOKENS, _COUNT = ACTOR + "ppo_n_minibatches", ACTOR + "mb_spec.max_tokens_per_mb", ACTOR + "mb_spec.n_mbs"
_CHECKPOINTS, _GRANULARITY = ACTOR + "gradient_checkpointing", ACTOR + "megatron.recompute_granularity"
_BATCH, _SAMPLES = "train_dataset.batch_size", GENERATION + "n_samples"


def add_training(config: Settings, draft: Draft, strategy: Allocation, where: str) -> None:
    """Degrees, micro-batches and switches of training."""
    megatron = strategy.engine == "megatron"
    entries = {"backend": Entry("megatron" if megatron else "fsdp", where)}
    for name, degree in (("tp", strategy.tp), ("pp", strategy.pp), ("cp", strategy.cp), ("ep", strategy.ep)):
        if degree > 1:
            entries[name] = Entry(degree, where)
    reduced = ACTOR + ("megatron.ddp.grad_reduce_in_fp32" if megatron else "grad_reduce_dtype")
    if config.get(TYPE, reduced) in (False, "bfloat16"):
        entries["gradients"] = Entry("bf16", config.where(reduced))
    minis = config.whole(_MINI)
    unit, micro_batch = _micro_batch(config, strategy, minis)
    entries[f"micro_batch_{unit}"] = micro_batch
    entries["recompute"] = recompute(config, _CHECKPOINTS, _GRANULARITY if megatron else "")
    offloads = [key for key in (ACTOR + "offload", "enable_offload") if config.flag(key)]
    if offloads:
        entries["offload"] = Entry(True, joined(*map(config.where, offloads)))
    entries["mini_batches"] = Entry(minis, config.where(_MINI))
    draft.entries["training"] = entries


def _micro_batch(config: Settings, strategy: Allocation, minis: int) -> tuple[str, Entry]:
    """Tokens, a budget; without one sequences: a mini-batch of a rank is cut into so many parts."""
    if config.get(WHOLE, _TOKENS) is not None:
        return "tokens", config.entry(WHOLE, _TOKENS)
    sequences = config.whole(_BATCH) * config.whole(_SAMPLES) // (minis * strategy.dp * config.whole(_COUNT))
    return "sequences", Entry(max(sequences, 1), f"no {_TOKENS}; {config.where(_COUNT)}")
