"""How an engine sizes its KV cache: what it takes of a GPU beside weights, and the rule by which KV gets the rest.

From the engines' sources: vLLM's `determine_available_memory` with the profiling run before it, SGLang's
`profile_max_num_token`, TensorRT-LLM's `KvCacheCreator`. What these measure at run time and no source tells is fitted
to start-up logs that users have published (as of commit 8f206fb2, docs/calibration.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GIB = 2.0**30

#: Bytes for each logit of `max_num_seqs` at the peak of vLLM's profiling run: PyTorch sorts them for top-k and top-p
#: (bf16 and fp32 logits, sorted values and their indices, and as much again while it sorts), or a kernel does not.
SORTED_SAMPLING_BYTES = 38.3
SAMPLING_BYTES = 8.46

#: Of a GPU, beside what PyTorch allocates: what libraries take while vLLM profiles, more with each doubling of TP, and
#: what is gone before SGLang loads weights (CUDA context; NCCL's buffers where NVLink joins the GPUs).
LIBRARY_BYTES = 0.13 * GIB
LIBRARY_BYTES_PER_DOUBLING = 0.6 * GIB
CONTEXT_BYTES = 0.45 * GIB
NVLINK_BUFFER_BYTES = 2.1 * GIB

#: What vLLM expects of its CUDA graphs before it sizes the KV cache, since 0.21: the median of published logs.
GRAPH_BYTES = 0.6 * GIB


@dataclass(frozen=True)
class EngineMemory:
    """The rule of one engine: the KV cache has what its share of a GPU leaves.

    `share_of`: the share is of all memory and holds weights, working memory, libraries and graphs too (`all`, vLLM);
    of what is free before weights are loaded, and holds these only (`before_weights`, SGLang: activations and graphs
    must find room in the rest); or KV alone has a share of what all others leave (`after_all`, TensorRT-LLM).
    `sampling_bytes`: of each logit of `max_num_seqs` while the engine samples. `graph_bytes`: of CUDA graphs, where the
    share holds them.
    """

    share_of: Literal["all", "before_weights", "after_all"] = "all"
    sampling_bytes: float = SAMPLING_BYTES
    graph_bytes: float = 0.0

    def beside_bytes(self, tp: int, *, nvlink: bool = True) -> float:
        """What nobody's tensors take: libraries and graphs, or context and communication buffers, of one GPU."""
        if self.share_of == "all":
            return LIBRARY_BYTES + LIBRARY_BYTES_PER_DOUBLING * math.log2(tp) + self.graph_bytes
        return CONTEXT_BYTES + NVLINK_BUFFER_BYTES * (tp > 1 and nvlink)

    def kv_bytes(
        self, memory: float, share: float, weights: float, working: float, beside: float, resident: float = 0.0
    ) -> float:
        """Bytes left for KV on a GPU of `memory` bytes; below 0: weights and working memory do not fit.

        Of `share`, others have what they keep there meanwhile (`resident`), unless it is a share of what is left. Never
        more than what is there.
        """
        left = memory - beside - weights - working - resident
        own = share - resident / memory
        if self.share_of == "all":
            return own * memory - beside - weights - working
        if self.share_of == "before_weights":
            return min(own * (memory - beside) - weights, left)
        return share * left

    def share_for(
        self, kv: float, memory: float, weights: float, working: float, beside: float, resident: float = 0.0
    ) -> float:
        """The share at which `kv_bytes` is `kv`, be it above what there is."""
        others = resident / memory
        if self.share_of == "all":
            return others + (kv + beside + weights + working) / memory
        if self.share_of == "before_weights":
            return others + (kv + weights) / (memory - beside)
        return kv / max(memory - beside - weights - working - resident, 1.0)

    def most_share(self, memory: float) -> float:
        """The largest share with which the engine starts on a GPU: vLLM's must be free beside CUDA's context."""
        return 1.0 - CONTEXT_BYTES / memory if self.share_of == "all" else 1.0


#: The rule where no engine is said: today's vLLM.
VLLM = EngineMemory(graph_bytes=GRAPH_BYTES)
#: Those of other engines.
RULES = {"sglang": EngineMemory("before_weights"), "trtllm": EngineMemory("after_all")}


def engine_memory_of(engine: str, release: str = "") -> EngineMemory:
    """The rule of an engine, by its release (`0.24.0`; empty: today's)."""
    if engine == "vllm" and release and tuple(map(int, release.split(".")[:2])) < (0, 21):
        return EngineMemory(sampling_bytes=SORTED_SAMPLING_BYTES)
    return RULES.get(engine, VLLM)
