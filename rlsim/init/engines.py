"""Limits that rollout engines set themselves where a configuration does not: by the engine and the GPU's memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from rlsim.hardware import Gpu
from rlsim.init.unlike import Table

_GIB = 2.0**30
#: SGLang's `chunked_prefill_size` on GPUs of less than so much memory (`_handle_gpu_memory_settings` of
#: python/sglang/srt/server_args.py, 0.5), and beyond.
_SGLANG_CHUNKS = ((35 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, 8192))
_SGLANG_MOST = 16384


#: Arguments of the engines that bear on time or memory and that nothing here represents: key, when it matters, and what
#: it does. A framework's section comes before the key; what is taken stands in the frameworks' own tables.
NOTED: dict[str, Table] = {
    "vllm": (
        ("speculative_config", "set", "speculative decoding: here each token is decoded"),
        ("speculative_model", "set", "speculative decoding: here each token is decoded"),
        ("compilation_config", "set", "compilation and CUDA graphs of its own: here graphs of every batch"),
        ("cudagraph_capture_sizes", "set", "CUDA graphs of these batches alone: here of every batch"),
        ("max_seq_len_to_capture", "set", "no CUDA graphs beyond a length: here of every batch"),
        ("cpu_offload_gb", "set", "weights in host memory"),
        ("swap_space", "set", "host memory for preempted responses: here they are computed again"),
        ("num_gpu_blocks_override", "set", "a KV cache of so many blocks: here as large as memory allows"),
        ("kv_cache_memory_bytes", "set", "a KV cache of so many bytes: here as large as memory allows"),
        ("num_scheduler_steps", "above 1", "several decode steps for each scheduling"),
        ("max_num_partial_prefills", "above 1", "several chunked prefills at a time"),
        ("long_prefill_token_threshold", "set", "a limit on chunks of long prompts"),
        ("async_scheduling", "off", "scheduling that does not overlap decode steps: here as in the calibration"),
        ("enable_lora", "on", "LoRA: here all weights are served"),
        ("enable_dbo", "on", "two batches that overlap"),
        ("enable_eplb", "on", "experts moved for balance"),
        ("decode_context_parallel_size", "above 1", "the KV cache cut by context"),
        ("kv_transfer_config", "set", "prefill and decode apart, or a KV cache elsewhere"),
        ("quantization", "set", "weights of another type: here in bf16, or as rollout.quantization says"),
        ("disable_custom_all_reduce", "on", "NCCL's all-reduce: here as in the calibration"),
    ),
    "sglang": (
        ("speculative_algorithm", "set", "speculative decoding: here each token is decoded"),
        ("chunked_prefill_size", "set", "prefills in chunks of that size: here of SGLang's default"),
        ("max_total_tokens", "set", "a KV cache of so many tokens: here as large as memory allows"),
        ("max_prefill_tokens", "set", "a budget of prefills: here SGLang's default"),
        ("cuda_graph_max_bs", "set", "CUDA graphs of small batches alone: here of every batch"),
        ("cuda_graph_bs", "set", "CUDA graphs of these batches alone: here of every batch"),
        ("disable_overlap_schedule", "on", "scheduling that does not overlap decode steps"),
        ("schedule_conservativeness", "set", "how cautiously responses are admitted"),
        ("num_continuous_decode_steps", "above 1", "several decode steps for each scheduling"),
        ("cpu_offload_gb", "set", "weights in host memory"),
        ("dp_size", "above 1", "data parallelism inside an engine: here replicas are apart"),
        ("enable_dp_attention", "on", "attention data-parallel inside an engine"),
        ("enable_two_batch_overlap", "on", "two batches that overlap"),
        ("enable_mixed_chunk", "on", "chunks that share iterations with decodes: here prefills have their own"),
        ("quantization", "set", "weights of another type: here in bf16"),
        ("disable_custom_all_reduce", "on", "NCCL's all-reduce: here as in the calibration"),
    ),
}


def noted(engine: str, *sections: str, taken: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """The rows of an engine below these sections of a framework, without the keys that it has `taken`."""
    rows = [(section + key, when, what) for section in sections for key, when, what in NOTED.get(engine, ())]
    return [row for row in rows if row[0] not in taken]


#: How an engine is used, as vLLM's `UsageContext` tells: its class `LLM`, a server, or its asynchronous engine.
Use = Literal["class", "server", "engine"]


def own_limits(engine: str, gpu: Gpu, use: Use = "class") -> dict[str, Any]:
    """The fields of `EngineConfig` that the engine sets by itself on such a GPU; empty for one that is not known.

    - vLLM 0.9 to 0.26 (`EngineArgs.get_batch_defaults` of vllm/engine/arg_utils.py): chunks share iterations with
      decodes; limits go by memory, A100 apart, and by `use`: `AsyncLLM` as a library has those of `SchedulerConfig`.
    - SGLang 0.5: prefills have iterations of their own (`enable_mixed_chunk` is off), whose budget goes by memory.
    """
    if engine == "vllm":
        large = gpu.memory_bytes >= 70 * _GIB and "a100" not in gpu.name
        tokens, seqs = {
            "class": (16384 if large else 8192, 1024 if large else 256),
            "server": (8192 if large else 2048, 1024 if large else 256),
            "engine": (2048, 128),
        }[use]
        return {"chunked_prefill": True, "max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    if engine == "sglang":
        chunk = next((chunk for below, chunk in _SGLANG_CHUNKS if gpu.memory_bytes < below), _SGLANG_MOST)
        return {"chunked_prefill": False, "max_num_batched_tokens": chunk, "max_num_seqs": 4096}
    return {}
