"""What share of a GPU's peaks a training framework's kernels reach, and what its host takes to launch them."""

from __future__ import annotations

from dataclasses import dataclass

from rlsim.cost.strategy import AttentionKernel
from rlsim.errors import ConfigError
from rlsim.models.hardware import Gpu

#: The host's seconds to launch the forward pass of a layer with experts; the backward pass takes twice that. Megatron
#: Core's dispatcher waits for the number of every expert's tokens, so that the host cannot launch ahead. Fitted to one
#: published iteration of pre-training on H800 (`scripts/fit_calibrations.py expert-launch`).
EXPERT_LAUNCH_S = 4.12e-3
#: Bytes that a training framework moves for each FLOP of its linear layers, at the data sheet's bandwidth: kernels that
#: are not fused, and gaps between kernels. Fitted to runs of veRL and NeMo-RL (`scripts/fit_calibrations.py training`).
TRAFFIC = 2.29e-3


def efficiency_of(gemm_share: float, flops_per_byte: float, traffic: float = TRAFFIC) -> float:
    """Share of the peak that linear layers reach, with `traffic` bytes moved for each of their FLOPs.

    `gemm_share`: what large products alone reach; `flops_per_byte`: the GPU's peak over its memory bandwidth.
    """
    return 1.0 / (1.0 / gemm_share + traffic * flops_per_byte)


#: What FlashAttention-2 reaches of an SM with Ampere's matrix instructions, however fast Hopper's and later ones are:
#: 35% of the peak on an H100 SXM5 of 132 SMs (Shah et al. 2024, FlashAttention-3, arXiv 2407.08608).
FLASH_ATTENTION_2_FLOP_PER_S = 0.35 * 989.4e12 / 132


@dataclass(frozen=True, kw_only=True)
class TrainEfficiency:
    """What share of the data-sheet peaks the kernels of a training framework reach.

    `flop` is that of the linear layers and absorbs what the model leaves out (gaps between kernels, unfused
    element-wise kernels); `forward` the same of calls without gradient, if a run showed another one. `attention` is
    flash attention's on long sequences, and `overhead_tokens` the length at which half of that is reached: measured
    A100 0.66 and 290, H100 0.62 and 600 tokens (aiconfigurator commit 095f58a, context_attention, SGLang 0.5.10,
    forward). `memory` is that of memory-bound kernels: measured norms 0.3, activations 0.5, additions 0.9 of peak
    bandwidth on A100 and H100 (Vidur commit 7d47513, 4,096 tokens), weighted by their bytes in a llama layer.
    `fp8_saved`: seconds that FP8 products of the layers save of each second that they would take at the bf16 peak.
    `expert_launch_s`: the host's to launch a forward pass of a layer with experts, which takes no less. `recurrent`:
    how many times their roofline layers with linear attention or a state-space mixer take.
    """

    flop: float
    forward: float | None = None
    fp8_saved: float = 0.0
    attention: float = 0.62
    overhead_tokens: float = 400.0
    memory: float = 0.55
    expert_launch_s: float = 0.0
    recurrent: float = 1.0

    def __post_init__(self) -> None:
        for key in ("flop", "forward", "attention", "memory"):
            if getattr(self, key) is not None and not 0 < getattr(self, key) <= 1:
                raise ConfigError(f"training efficiency: {key} must lie in (0, 1], got {getattr(self, key)}")

    def attention_on(self, gpu: Gpu, kernel: AttentionKernel) -> float:
        """The share of that GPU's bf16 peak that an attention kernel reaches on long sequences."""
        if kernel != "flash_attention_2":
            return self.attention
        return min(self.attention, FLASH_ATTENTION_2_FLOP_PER_S * gpu.sm_count / gpu.bf16_flop_per_s)

    @property
    def layers(self) -> float:
        """The share of the bf16 peak that the layers' products reach; in FP8 it may be above 1."""
        return 1.0 / (1.0 / self.flop - self.fp8_saved) if self.fp8_saved else self.flop
