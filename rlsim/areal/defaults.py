"""AReaL's keys, what it takes for those that are not given, and what of them an experiment has not.

Read off `areal/api/cli_args.py`, github.com/inclusionAI/AReaL, Apache-2.0.
"""

from __future__ import annotations

from typing import Any

from rlsim.init.unlike import Table

ACTOR, ROLLOUT, GENERATION = "actor.", "rollout.", "gconfig."

DEFAULTS: dict[str, Any] = {
    "cluster.n_nodes": 32,
    "cluster.n_gpus_per_node": 8,
    GENERATION + "n_samples": 1,
    GENERATION + "max_new_tokens": 16384,
    ROLLOUT + "consumer_batch_size": 1,
    ROLLOUT + "max_head_offpolicyness": 0,
    ROLLOUT + "scheduling_strategy.type": "separation",
    ACTOR + "ppo_n_minibatches": 4,
    ACTOR + "kl_ctl": 0.1,
    ACTOR + "recompute_logprob": False,
    ACTOR + "use_decoupled_loss": False,
    ACTOR + "prox_logp_method": "recompute",
    ACTOR + "gradient_checkpointing": False,
    ACTOR + "grad_reduce_dtype": "float32",
    ACTOR + "offload": False,
    ACTOR + "mb_spec.n_mbs": 1,
    ACTOR + "megatron.recompute_granularity": "full",
    ACTOR + "megatron.ddp.grad_reduce_in_fp32": True,
    "enable_offload": False,
    "sglang.mem_fraction_static": 0.9,
    "sglang.disable_cuda_graph": False,
    "sglang.disable_radix_cache": True,
    "vllm.gpu_memory_utilization": 0.9,
    "vllm.max_num_seqs": 256,
    "vllm.enforce_eager": False,
    "vllm.no_enable_chunked_prefill": False,
    "vllm.no_enable_prefix_caching": True,
}  # fmt: skip
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

#: Key, when it matters, and what it does that the experiment has not.
UNLIKE: Table = (
    (ACTOR + "use_lora", "on", "LoRA: here all weights are trained"),
    (ACTOR + "enable_tree_training", "on", "common prompts computed once in training"),
    (ACTOR + "pad_to_maximum", "on", "training on padded sequences: here on packed ones"),
    (ACTOR + "fsdp.offload_params", "on", "parameters in host memory while training runs"),
    (ACTOR + "megatron.fp8_config.mode", "set", "training in fp8: here in bf16"),
    (ACTOR + "megatron.virtual_pipeline_parallel_size", "above 1", "interleaved pipeline stages"),
    (ACTOR + "overlong_reward_penalty", "on", "a penalty for long responses, which may change lengths"),
    ("sglang.ep_size", "above 1", "generation with experts apart: here cut by TP"),
    ("dynamic_bs", "on", "steps that train on what a batch of prompts leaves: here on all of a batch"),
    ("teacher.path", "set", "a teacher's log-probs"),
    (ROLLOUT + "queue_size", "set", "a limit on the prompts that wait for a place"),
    (GENERATION + "min_new_tokens", "above 1", "responses of at least so many tokens"),
    ("workflow", "set", "a workflow of its own, perhaps with several turns: here each response is one"),
)  # fmt: skip
BETWEEN_STEPS = ("saver", "evaluator", "recover")
