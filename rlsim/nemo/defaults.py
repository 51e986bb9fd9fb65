"""NeMo-RL's keys, what it takes for those that are not given, and what of them an experiment has not.

Read off `GRPOConfig` and its kin in `nemo_rl` and `examples/configs/grpo_math_1B.yaml`, github.com/NVIDIA-NeMo/RL,
Apache-2.0. A recipe inherits from that file by `defaults`; without it only the defaults of the code hold.
"""

from __future__ import annotations

from typing import Any

from rlsim.init.settings import FLAG, NUMBER, WHOLE, Kind
from rlsim.init.unlike import Table

GRPO, ASYNC, POLICY = "grpo.", "grpo.async_grpo.", "policy."
GENERATION, DTENSOR, MEGATRON = POLICY + "generation.", POLICY + "dtensor_cfg.", POLICY + "megatron_cfg."
COLOCATED = GENERATION + "colocated."
OFFLOAD_FOR_LOGPROB = POLICY + "offload_optimizer_for_logprob"

DEFAULTS: dict[str, Any] = {
    GRPO + "num_prompts_per_step": 32,
    GRPO + "num_generations_per_prompt": 16,
    GRPO + "max_rollout_turns": 1,
    GRPO + "use_dynamic_sampling": False,
    GRPO + "batch_multiplier": 1,
    GRPO + "adv_estimator.name": "grpo",
    ASYNC + "enabled": False,
    ASYNC + "max_trajectory_age_steps": 1,
    ASYNC + "in_flight_weight_updates": False,
    ASYNC + "recompute_kv_cache_after_weight_updates": False,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    DTENSOR + "tensor_parallel_size": 1,
    DTENSOR + "context_parallel_size": 1,
    DTENSOR + "expert_parallel_size": 1,
    DTENSOR + "activation_checkpointing": False,
    DTENSOR + "cpu_offload": False,
    MEGATRON + "enabled": False,
    MEGATRON + "tensor_model_parallel_size": 1,
    MEGATRON + "pipeline_model_parallel_size": 1,
    MEGATRON + "context_parallel_size": 1,
    MEGATRON + "expert_model_parallel_size": 1,
    MEGATRON + "expert_tensor_parallel_size": 1,
    MEGATRON + "activation_checkpointing": False,
    MEGATRON + "recompute_granularity": "full",
    MEGATRON + "distributed_data_parallel_config.grad_reduce_in_fp32": False,
    MEGATRON + "optimizer.use_distributed_optimizer": True,
    COLOCATED + "enabled": True,
    OFFLOAD_FOR_LOGPROB: False,
    GENERATION + "vllm_cfg.tensor_parallel_size": 1,
    GENERATION + "vllm_cfg.async_engine": False,
    GENERATION + "vllm_cfg.gpu_memory_utilization": 0.6,
    GENERATION + "sglang_cfg.tp_size": 1,
    GENERATION + "sglang_cfg.mem_fraction_static": 0.6,
    GENERATION + "trtllm_cfg.tensor_parallel_size": 1,
    GENERATION + "trtllm_cfg.gpu_memory_utilization": 0.6,
}  # fmt: skip

ASYNC_ENGINE = GENERATION + "vllm_cfg.async_engine"
_VLLM, _SGLANG, _TRTLLM = GENERATION + "vllm_", GENERATION + "sglang_cfg.", GENERATION + "trtllm_cfg."
#: Of each engine: its TP, its share of GPU memory, its limit of sequences and of tokens, and what switches graphs and
#: prefix caching off.
ENGINE_KEYS: dict[str, dict[str, str]] = {
    "vllm": {
        "tp": _VLLM + "cfg.tensor_parallel_size", "memory": _VLLM + "cfg.gpu_memory_utilization",
        "max_num_seqs": _VLLM + "kwargs.max_num_seqs",
        "max_num_batched_tokens": _VLLM + "kwargs.max_num_batched_tokens", "eager": _VLLM + "cfg.enforce_eager",
        "chunked": _VLLM + "kwargs.enable_chunked_prefill", "page_tokens": _VLLM + "kwargs.block_size",
        "ep": _VLLM + "cfg.expert_parallel_size", "pp": _VLLM + "cfg.pipeline_parallel_size",
    },
    "sglang": {
        "tp": _SGLANG + "tp_size", "memory": _SGLANG + "mem_fraction_static",
        "max_num_seqs": _SGLANG + "max_running_requests", "max_num_batched_tokens": _SGLANG + "chunked_prefill_size",
        "eager": _SGLANG + "disable_cuda_graph", "chunked": _SGLANG + "enable_mixed_chunk",
        "page_tokens": _SGLANG + "page_size", "ep": _SGLANG + "ep_size", "pp": _SGLANG + "pp_size",
        "no_prefix_caching": _SGLANG + "disable_radix_cache",
    },
    "trtllm": {
        "tp": _TRTLLM + "tensor_parallel_size", "memory": _TRTLLM + "gpu_memory_utilization",
        "max_num_seqs": _TRTLLM + "max_batch_size", "max_num_batched_tokens": _TRTLLM + "max_num_tokens",
        "eager": _TRTLLM + "disable_cuda_graph", "ep": _TRTLLM + "moe_expert_parallel_size",
        "pp": _TRTLLM + "pipeline_parallel_size",
    },
}  # fmt: skip

#: What settings of the engines themselves begin with.
VLLM, SGLANG = _VLLM + "kwargs.", _SGLANG
#: Key, when it matters, and what it does that the experiment has not.
UNLIKE: Table = (
    (GRPO + "max_rollout_turns", "above 1", "turns with an environment between them: here each response is one"),
    ("env.should_use_nemo_gym", "on", "turns with NeMo-Gym's tools between them: here each response is one"),
    (GENERATION + "refit_transport", "set", "how weights are sent: here as weight_sync says"),
    (MEGATRON + "peft.enabled", "on", "LoRA: here all weights are trained"),
    (MEGATRON + "optimizer.optimizer_cpu_offload", "on", "the optimizer steps on the CPU"),
    (MEGATRON + "mtp_num_layers", "above 1", "multi-token prediction"),
    (MEGATRON + "use_fused_linear_logprobs", "on", "log-probs from hidden states, never all logits at once"),
    (MEGATRON + "defer_fp32_logits", "on", "logits kept in bf16"),
    (DTENSOR + "lora_cfg.enabled", "on", "LoRA: here all weights are trained"),
    (POLICY + "logprob_chunk_size", "set", "log-probs by chunks of the sequence"),
    (POLICY + "draft.enabled", "on", "a draft model for speculative decoding"),
    (POLICY + "dynamic_batching.enabled", "on", "sequences padded to a multiple of a length inside a micro-batch"),
    ("env.reward_model.enabled", "on", "a reward model scores: here a check of 10 ms (workflow.reward)"),
    ("data_plane.enabled", "on", "batches by way of a data plane"),
)  # fmt: skip
#: Settings by the names that start conditions have for them (`rlsim/data/starts.yaml`).
STARTS: dict[str, tuple[Kind[Any], str]] = {
    "async_engine": (FLAG, ASYNC_ENGINE),
    "asynchronous": (FLAG, ASYNC + "enabled"),
    "batch": (WHOLE, POLICY + "train_global_batch_size"),
    "chunked": (FLAG, _VLLM + "kwargs.enable_chunked_prefill"),
    "budget": (WHOLE, _VLLM + "kwargs.max_num_batched_tokens"),
    "seqs": (WHOLE, _VLLM + "kwargs.max_num_seqs"),
    "longest": (WHOLE, POLICY + "max_total_sequence_length"),
    "dtensor": (FLAG, DTENSOR + "enabled"),
    "dynamic": (FLAG, POLICY + "dynamic_batching.enabled"),
    "filters": (FLAG, GRPO + "use_dynamic_sampling"),
    "log_prob_micro": (WHOLE, POLICY + "logprob_batch_size"),
    "micro": (WHOLE, POLICY + "train_micro_batch_size"),
    "multiplier": (NUMBER, GRPO + "batch_multiplier"),
    "packing": (FLAG, POLICY + "sequence_packing.enabled"),
    "prompts": (WHOLE, GRPO + "num_prompts_per_step"),
    "responses": (WHOLE, GRPO + "num_generations_per_prompt"),
    "rollout_ep": (WHOLE, _VLLM + "cfg.expert_parallel_size"),
    "rollout_pp": (WHOLE, _VLLM + "cfg.pipeline_parallel_size"),
    "rollout_tp": (WHOLE, _VLLM + "cfg.tensor_parallel_size"),
}
#: Those of other words: periods of what happens between steps, precisions.
BETWEEN_STEPS = (GRPO + "val_period",)
SAVES, SAVE_PERIOD = "checkpointing.enabled", "checkpointing.save_period"
PRECISION, KV_PRECISION = GENERATION + "vllm_cfg.precision", GENERATION + "vllm_cfg.kv_cache_dtype"
PRECISIONS = (GENERATION + "trtllm_cfg.precision", POLICY + "precision")
#: Microscaling (MXFP8) in the place of blocks, and layers that stay in bf16.
FP8_VARIANTS: Table = (
    (GENERATION + "vllm_cfg.is_mx", "on", "MXFP8: here fp8 with a scale for each block of weights"),
    (GENERATION + "vllm_cfg.num_first_layers_in_bf16", "set", "first layers that stay in bf16: here none do"),
    (GENERATION + "vllm_cfg.num_last_layers_in_bf16", "set", "last layers that stay in bf16: here none do"),
)
FP8, FP8_RECIPE = MEGATRON + "fp8_cfg.enabled", MEGATRON + "fp8_cfg.fp8_recipe"
FP8_RECIPES = {"tensorwise": "fp8", "blockwise": "fp8_block"}
