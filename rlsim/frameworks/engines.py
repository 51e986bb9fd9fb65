"""Limits that rollout engines set themselves where a configuration does not: by the engine and the GPU's memory."""

from __future__ import annotations

from typing import Any, Literal

from rlsim.models.hardware import Gpu

_GIB = 2.0**30
#: SGLang's `chunked_prefill_size` on GPUs of less than so much memory (`_handle_gpu_memory_settings` of
#: python/sglang/srt/server_args.py, 0.5), and beyond.
_SGLANG_CHUNKS = ((35 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, 8192))
_SGLANG_MOST = 16384


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
