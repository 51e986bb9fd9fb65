"""veRL's own defaults, of the keys that bear on time, by version.

Read off `ppo_trainer.yaml` and `ppo_megatron_trainer.yaml` in `verl/trainer/config` of the releases 0.2 to 0.9 (from
0.5 on the flattened `_generated_…` files), github.com/verl-project/verl, Apache-2.0.
"""

from __future__ import annotations

from typing import Any

from rlsim.errors import ConfigError

#: Releases whose defaults are known, oldest first.
VERSIONS = ("0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
TP = ROLLOUT + "tensor_model_parallel_size"
NODES, GPUS_PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
#: Groups whose rewards are all alike are dropped, and others generated: `dynamic_sampling`.
FILTER = "algorithm.filter_groups.enable"
#: Log-probs do not wait for rewards: `reward_beside`, or `workflow.reward.order`.
REWARD_ASYNC = "reward_model.launch_reward_fn_async"

#: Key -> its default, or the defaults since the versions named.
_COMMON: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    MODEL + "enable_gradient_checkpointing": True,
    MODEL + "use_remove_padding": {"0.2": False, "0.7": True},
    MODEL + "lora_rank": 0,
    ACTOR + "strategy": "fsdp",
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "ppo_micro_batch_size_per_gpu": None,
    ACTOR + "use_dynamic_bsz": False,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    ACTOR + "use_kl_loss": False,
    ACTOR + "ppo_epochs": 1,
    ACTOR + "ulysses_sequence_parallel_size": 1,
    ACTOR + "fsdp_config.param_offload": False,
    ACTOR + "fsdp_config.optimizer_offload": False,
    ACTOR + "fsdp_config.fsdp_size": -1,
    ROLLOUT + "name": {"0.2": "vllm", "0.6": None},  # from 0.6 on it must be given
    ROLLOUT + "mode": {"0.2": "sync", "0.7": "async"},
    ROLLOUT + "n": 1,
    ROLLOUT + "tensor_model_parallel_size": 2,
    ROLLOUT + "data_parallel_size": 1,
    ROLLOUT + "pipeline_model_parallel_size": 1,
    ROLLOUT + "expert_parallel_size": 1,
    ROLLOUT + "gpu_memory_utilization": 0.5,
    ROLLOUT + "max_num_batched_tokens": 8192,
    ROLLOUT + "max_num_seqs": {"0.2": 1024, "0.9": 256},
    ROLLOUT + "enable_chunked_prefill": True,
    ROLLOUT + "enable_prefix_caching": True,
    ROLLOUT + "enforce_eager": {"0.2": True, "0.6": False},
    ROLLOUT + "free_cache_engine": True,
    ROLLOUT + "multi_turn.enable": False,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.filter_groups.enable": False,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.balance_batch": {"0.2": False, "0.3": True},
}

_MEGATRON: dict[str, Any] = {
    MODEL + "enable_gradient_checkpointing": {"0.2": False, "0.5": True},  # from then on recompute_granularity decides
    MODEL + "use_remove_padding": {"0.2": True},  # Megatron's own packing
    ACTOR + "strategy": "megatron",
    ACTOR + "megatron.tensor_model_parallel_size": {"0.2": 4, "0.4": 1},
    ACTOR + "megatron.pipeline_model_parallel_size": 1,
    ACTOR + "megatron.context_parallel_size": 1,
    ACTOR + "megatron.expert_model_parallel_size": 1,
    ACTOR + "megatron.param_offload": False,
    ACTOR + "megatron.optimizer_offload": False,
    ACTOR + "megatron.use_distributed_optimizer": True,
    ROLLOUT + "tensor_model_parallel_size": {"0.2": 2, "0.4": 1, "0.6": 2},
    ROLLOUT + "enable_chunked_prefill": {"0.2": False, "0.6": True},
}
_FSDP_ONLY = (ACTOR + "ulysses", ACTOR + "fsdp_config")


def _of(value: Any, version: str) -> Any:
    if not isinstance(value, dict):
        return value
    since = [name for name in value if VERSIONS.index(name) <= VERSIONS.index(version)]
    return value[since[-1]]


#: Keys that have no default.
WITHOUT_DEFAULT = (
    ACTOR + "fsdp_config.ulysses_sequence_parallel_size",
    ACTOR + "ppo_micro_batch_size_per_gpu",
    ACTOR + "ppo_micro_batch_size",
    ROLLOUT + "log_prob_micro_batch_size_per_gpu",
    ROLLOUT + "log_prob_max_token_len_per_gpu",
    ROLLOUT + "response_length",
)


def release(version: str) -> str:
    """The release of `VERSIONS` whose defaults a version has; raises `ConfigError` for one that is not known."""
    major, _, rest = version.removeprefix("v").partition(".")
    name = f"{major}.{rest.partition('.')[0]}"
    if name not in VERSIONS:
        raise ConfigError(f"veRL {version}: its defaults are not known; one of: {', '.join(VERSIONS)}")
    return name


def defaults(version: str, megatron: bool) -> dict[str, Any]:
    """The default of every key that bears on time; None where there is none. `version` is one of `VERSIONS`."""
    keys = {**_COMMON, **(_MEGATRON if megatron else {})}
    known = {key: value for key, value in keys.items() if not (megatron and key.startswith(_FSDP_ONLY))}
    return {key: _of(value, version) for key, value in known.items()}
