"""AReaL's keys."""

from __future__ import annotations

ACTOR, ROLLOUT, GENERATION = "actor.", "rollout.", "gconfig."

#: Of each engine: its share of GPU memory, its limit of sequences and of tokens, and what switches graphs and
#: prefix caching off.
ENGINE_KEYS: dict[str, dict[str, str]] = {
    "vllm": {
        "memory": "vllm.gpu_memory_utilization", "max_num_seqs": "vllm.max_num_seqs", "eager": "vllm.enforce_eager",
        "page_tokens": "vllm.block_size",
        "no_prefix_caching": "vllm.no_enable_prefix_caching",
    },
    "sglang": {
        "memory": "sglang.mem_fraction_static", "max_num_seqs": "sglang.max_running_requests",
        "max_num_batched_tokens": "sglang.chunked_prefill_size", "eager": "sglang.disable_cuda_graph",
        "chunked": "sglang.enable_mixed_chunk", "page_tokens": "sglang.page_size",
        "no_prefix_caching": "sglang.disable_radix_cache",
    },
}  # fmt: skip

BETWEEN_STEPS = ("saver", "evaluator", "recover")
