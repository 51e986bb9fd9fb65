"""veRL's engines that train: FSDP and Megatron, and those that are simulated as FSDP2."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlsim.init.settings import TEXT
from rlsim.verl.defaults import ACTOR, MODEL, ROLLOUT
from rlsim.verl.settings import STRATEGY, VerlSettings

_MEGATRON_DEGREE = re.compile(rf"{re.escape(ACTOR)}megatron\.\w+_parallel_size")
_FSDP, _MEGATRON = ACTOR + "fsdp_config.", ACTOR + "megatron."
_SHARDS, _ULYSSES = _FSDP + "fsdp_size", _FSDP + "ulysses_sequence_parallel_size"
_TP, _PP, _EP, _EXPERT_TP = (
    f"{_MEGATRON}{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
)
#: Keys of degrees, which other engines than Megatron have under it too, once they are settled.
DEGREES = (_TP, _PP, _EP, _EXPERT_TP)
_OFFLOADS = ("param_offload", "optimizer_offload")
_TURBO = "fsdp_config.turbo_config."
#: An engine's name, and what FSDP and Megatron call its keys (below the actor's).
_ENGINES: Mapping[str, tuple[str, dict[str, str]]] = {
    "veomni": (
        "VeOmni",
        {"veomni.fsdp_size": _SHARDS, "veomni.ulysses_parallel_size": _ULYSSES, "veomni.expert_parallel_size": _EP}
        | {f"veomni.{key}": _FSDP + key for key in _OFFLOADS},
    ),
    "fsdp_turbo": (
        "FSDP-Turbo",
        {
            _TURBO + "distributed.fully_shard_parallel_size": _SHARDS,
            _TURBO + "distributed.ulysses_parallel_size": _ULYSSES,
            _TURBO + "distributed.expert_parallel_size": _EP,
            _TURBO + "memory.recompute": MODEL + "enable_gradient_checkpointing",
        },
    ),
    "torchtitan": (
        "torchtitan",
        {
            "torchtitan.data_parallel_shard_size": _SHARDS,
            "torchtitan.tensor_parallel_size": _TP,
            "torchtitan.pipeline_parallel_size": _PP,
            "torchtitan.context_parallel_size": _ULYSSES,
            "torchtitan.expert_parallel_size": _EP,
            "torchtitan.expert_tensor_parallel_size": _EXPERT_TP,
            **{f"torchtitan.{key}": _FSDP + key for key in _OFFLOADS},
        },
    ),
    "mlite": (
        "Megatron Lite",
        {"engine.tp": _TP, "engine.pp": _PP, "engine.cp": _ULYSSES, "engine.ep": _EP, "engine.etp": _EXPERT_TP}
        | {f"engine.{key}": _FSDP + key for key in _OFFLOADS},
    ),
}


#: Arguments that veRL hands to an engine over its own settings (`engine_kwargs`), and those settings.
_ARGUMENTS: Mapping[str, dict[str, str]] = {
    "vllm": {key: key for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill",
                                  "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization")},
    "sglang": {"mem_fraction_static": "gpu_memory_utilization", "max_running_requests": "max_num_seqs",
               "disable_cuda_graph": "enforce_eager", "context_length": "max_model_len"},
}  # fmt: skip
ARGUMENTS = tuple(f"{ROLLOUT}engine_kwargs.{engine}.{key}" for engine, keys in _ARGUMENTS.items() for key in keys)


def settle_arguments(config: VerlSettings) -> None:
    """Arguments of the rollout's engine as the settings that they stand for."""
    engine = config.told(TEXT, ROLLOUT + "name") or "vllm"
    for theirs, ours in _ARGUMENTS.get(engine, {}).items():
        key = f"{ROLLOUT}engine_kwargs.{engine}.{theirs}"
        if config.given.get(key) is not None:
            config.put(
                {ROLLOUT + ours: config.given.pop(key)}, f"{config.origin[key]}: engine_kwargs.{engine}.{theirs}"
            )


def settle_engine(config: VerlSettings) -> None:
    """Megatron where its degrees are set and nothing says otherwise; engines that shard as FSDP2 does as FSDP2."""
    degrees = next((key for key in config.given if _MEGATRON_DEGREE.fullmatch(key)), None)
    if degrees is not None and STRATEGY not in config.given and STRATEGY not in config.doubts:
        config.given[STRATEGY], config.origin[STRATEGY] = "megatron", config.origin[degrees]
    chosen = config.told(TEXT, STRATEGY) or ""
    if chosen not in _ENGINES:
        return
    title, keys = _ENGINES[chosen]
    config.notes.append(f"{config.where(STRATEGY)}: {title} shards as FSDP2 does, as which it is simulated")
    config.given[STRATEGY] = "fsdp2"
    for theirs, ours in keys.items():
        if ACTOR + theirs in config.given:
            config.given[ours] = config.given.pop(ACTOR + theirs)
            config.origin[ours] = f"{config.origin[ACTOR + theirs]}: {theirs}"
        if ACTOR + theirs in config.doubts:
            config.doubts[ours] = config.doubts.pop(ACTOR + theirs)
