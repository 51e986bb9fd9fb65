"""How training of an AReaL configuration runs on its GPUs, in an experiment's words."""

from __future__ import annotations

from rlsim.frameworks.areal.allocation import Allocation
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.parts import recompute
from rlsim.frameworks.settings import Settings


def add_training(config: Settings, draft: Draft, strategy: Allocation, where: str) -> None:
    """Degrees, micro-batches and switches of training."""
    backend = "megatron" if strategy.engine == "megatron" else "fsdp"
    degrees = {name: getattr(strategy, name) for name in ("tp", "pp", "cp", "ep")}
    entries = {"backend": Entry(backend, where)}
    entries |= {name: Entry(degree, where) for name, degree in degrees.items() if degree > 1}
    reduced = f"{backend}_reduced"
    if config.value(reduced) in (False, "bfloat16"):
        entries["gradients"] = Entry("bf16", config.where(reduced))
    minis = config.whole("mini_batches")
    if config.value("tokens") is not None:
        entries["micro_batch_tokens"] = config.entry("tokens")
    else:  # a mini-batch of a rank is cut into so many parts
        sequences = config.whole("batch") * config.whole("samples") // (minis * strategy.dp * config.whole("parts"))
        said = f"no {config.key('tokens')}; {config.where('parts')}"
        entries["micro_batch_sequences"] = Entry(max(sequences, 1), said)
    entries["recompute"] = recompute(config, "checkpoints", "granularity" if backend == "megatron" else "")
    if backend == "fsdp" and config.value("attention") == "flash_attention_3":
        entries["attention"] = config.entry("attention")
    if offloads := [name for name in ("offload", "all_offload") if config.flag(name)]:
        entries["offload"] = Entry(True, config.said(*offloads))
    entries["mini_batches"] = config.entry("mini_batches")
    draft.entries["training"] = entries
