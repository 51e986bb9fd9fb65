"""NeMo-RL's keys. A recipe inherits from a file by `defaults`; without it only the defaults of the code hold."""

from __future__ import annotations

from typing import Any

from rlsim.init.settings import FLAG, NUMBER, WHOLE, Kind

GRPO, ASYNC, POLICY = "grpo.", "grpo.async_grpo.", "policy."
GENERATION, DTENSOR, MEGATRON = POLICY + "generation.", POLICY + "dtensor_cfg.", POLICY + "megatron_cfg."
COLOCATED = GENERATION + "colocated."
OFFLOAD_FOR_LOGPROB = POLICY + "offload_optimizer_for_logprob"

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
FP8, FP8_RECIPE = MEGATRON + "fp8_cfg.enabled", MEGATRON + "fp8_cfg.fp8_recipe"
FP8_RECIPES = {"tensorwise": "fp8", "blockwise": "fp8_block"}
