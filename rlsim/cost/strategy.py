"""How a training or inference call is spread over its GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlsim.base.refusals import refuse
from rlsim.cost.flops import moved_elements
from rlsim.errors import ConfigError
from rlsim.models.hardware import Gpu
from rlsim.models.layers import Experts
from rlsim.models.model import Model

Recompute = Literal["none", "selective", "full"]
GradientType = Literal["fp32", "bf16"]
WeightType = Literal["fp32", "bf16"]
Packing = Literal["balanced", "first_fit"]
HostMemory = Literal["pinned", "pageable", "pageable_weights", "saver"]
Logits = Literal["bf16", "fp32", "torch", "fused"]
ContextParallel = Literal["ulysses", "ring"]
AttentionKernel = Literal["flash_attention_2", "flash_attention_3", "cudnn"]


def logits_of(backend: str, fused_kernels: bool = False) -> Logits:
    """How veRL computes log-probabilities under that training backend: see `TrainStrategy.logits`."""
    if fused_kernels:
        return "fused"
    return "bf16" if backend == "fsdp" else "fp32"


def attention_of(backend: str) -> AttentionKernel:
    """What a training backend computes attention with: Hugging Face's default under FSDP, else Transformer Engine's."""
    return "flash_attention_2" if backend == "fsdp" else "cudnn"


def context_parallel_of(backend: str) -> ContextParallel:
    """How a training backend shares sequences out: veRL, SkyRL and AReaL under FSDP by heads, Megatron in a ring."""
    return "ulysses" if backend == "fsdp" else "ring"


_FROM_ONE = (
    *("dp", "tp", "pp", "cp", "ep", "micro_batch_tokens", "expert_tp", "micro_batches", "shard_gpus"),
    *("log_prob_micro_batch_tokens", "micro_batch_sequences", "log_prob_micro_batch_sequences", "expert_imbalance"),
    "lora_rank",
)


@dataclass(frozen=True, kw_only=True)
class TrainStrategy:
    """Degrees and switches of one call; GPUs are numbered with TP innermost, then CP, DP and PP (Megatron's order).

    What the fields mean are rows of `rlsim/data/meanings.csv` (`TrainingSpec`). Beyond that:

    - `ep`: the experts of a layer are dealt to that many neighbouring blocks of `expert_tp` GPUs of a pipeline stage,
      whichever of TP, CP and DP these belong to (Megatron Core's parallel folding: Liu et al. 2025, arXiv 2504.14960).
      Every ep · expert_tp GPUs hold all experts of a layer; those with the same ones reduce their gradients. By default
      `expert_tp` is as in NeMo-RL and Megatron Bridge; Megatron-LM's own is `tp`.
    - `micro_batch_tokens`: a sequence with more gets a micro-batch of its own.
    - `micro_batches`: if given, so many micro-batches of each rank's share, balanced by work; at most its sequences.
    - `zero_stage`: what is sharded over data-parallel ranks: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters
      (3 is FSDP's full sharding).
    - `shard_gpus`: the groups are replicas of each other, which reduce their gradients once an optimizer step.
    - `recompute`: `full` keeps each layer's input only; `selective` recomputes norms and the MLP's activation function,
      which costs next to no time. Attention is a flash kernel: its score matrix is never stored.
    - `packing`: `balanced` has as few micro-batches as the budget has room for a rank's sum; `first_fit` packs over all
      ranks, and deals them out in turn.
    - `sequence_parallel`: Megatron's: the parts of a layer outside TP are cut along the sequence, over its GPUs.
    - `attention`: all but `flash_attention_2` (`TrainEfficiency.attention_on`) are taken as equally fast.

    Raises `ConfigError` for a degree below 1 or a combination that no framework offers.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    expert_imbalance: float = 1.0
    micro_batch_tokens: int = 16384
    log_prob_micro_batch_tokens: int | None = None
    micro_batch_sequences: int | None = None
    log_prob_micro_batch_sequences: int | None = None
    micro_batches: int | None = None
    zero_stage: int = 0
    shard_gpus: int | None = None
    lora_rank: int | None = None
    gradients: GradientType = "fp32"
    weights: WeightType = "fp32"
    recompute: Recompute = "full"
    packing: Packing = "balanced"
    offload: bool = False
    host_memory: HostMemory = "pinned"
    optimizer_bytes: int = 12
    cpu_optimizer: float = 0.0
    cpu_optimizer_rate: float = 2e11
    sequence_parallel: bool = False
    logits: Logits = "bf16"
    context_parallel: ContextParallel = "ring"
    attention: AttentionKernel = "cudnn"
    looped_experts: bool = False
    fused_rope: bool = True

    def __post_init__(self) -> None:
        for key in _FROM_ONE:
            if (value := getattr(self, key)) is not None and value < 1:
                raise ConfigError(f"training strategy: {key} must be at least 1, got {value}")
        if (self.shards * self.tp) % self.expert_cut:
            raise ConfigError(
                f"training strategy: ep × expert_tp = {self.expert_cut} does not divide the {self.shards * self.tp} "
                f"GPUs of a pipeline stage (tp {self.tp} × cp {self.cp} × dp {self.dp}): less pp or ep, or more GPUs"
            )
        if self.experts_apart and self.shard_gpus is not None:
            raise ConfigError("training strategy: shard_gpus (HSDP) does not go with experts apart (ep, expert_tp)")
        if self.shards % self.sharded_over:
            raise ConfigError(f"training strategy: shard_gpus {self.shard_gpus} does not divide {self.shards} ranks")
        if self.zero_stage >= 2 and self.pp > 1:
            raise ConfigError("training strategy: ZeRO stages 2 and 3 do not go with pipeline parallelism")

    @property
    def shown(self) -> str:
        """The degrees, for people: CP and EP where there are any."""
        degrees = {"DP": self.dp, "TP": self.tp, "PP": self.pp, "CP": self.cp, "EP": self.ep}
        named = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name not in ("CP", "EP")]
        return f"{', '.join(named)}, ZeRO {self.zero_stage}"

    @property
    def gpus(self) -> int:
        """GPUs that the call occupies."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that hold the same layers and tensor-parallel piece, but for ZeRO: Megatron's DP × CP group."""
        return self.dp * self.cp

    @property
    def expert_tp_degree(self) -> int:
        """GPUs over which every single expert is cut."""
        return self.expert_tp or (self.tp if self.ep == 1 else 1)

    @property
    def expert_cut(self) -> int:
        """Neighbouring GPUs that hold the experts of a layer once."""
        return self.ep * self.expert_tp_degree

    @property
    def experts_apart(self) -> bool:
        """Whether experts are cut otherwise than the rest of a layer."""
        return self.ep > 1 or self.expert_tp_degree != self.tp

    @property
    def experts(self) -> TrainStrategy:
        """How the experts' weights and their states are spread: as tensors under TP of degree `expert_cut` are."""
        if not self.experts_apart:
            return self
        dp = self.shards * self.tp // self.expert_cut
        return replace(self, dp=dp, tp=self.expert_cut, cp=1, ep=1, expert_tp=None)

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient."""
        return 4 if self.gradients == "fp32" else 2

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded as FSDP does it: in `weights`, of Hugging Face's modules, by torch's AdamW."""
        return self.zero_stage == 3

    @property
    def shard_bytes(self) -> int:
        """Of a parameter that training keeps: FSDP's own, as its gradients and moments have, too; else of bf16."""
        return 4 if self.fsdp and self.weights == "fp32" else 2

    @property
    def states_bytes(self) -> int:
        """Of one parameter's optimizer states beside its weight, which under FSDP is the master."""
        return (self.optimizer_bytes - 4) * self.shard_bytes // 4 if self.fsdp else self.optimizer_bytes

    @property
    def sharded_over(self) -> int:
        """GPUs over which ZeRO shards: `shards`, or fewer under HSDP, which is for stage 3."""
        return min(self.shard_gpus or self.shards, self.shards) if self.zero_stage == 3 else self.shards

    def budget(self, *, backward: bool) -> int:
        """Tokens of a micro-batch of a training call, or of one without gradient."""
        return self.micro_batch_tokens if backward else self.log_prob_micro_batch_tokens or self.micro_batch_tokens

    def sequences(self, *, backward: bool) -> int | None:
        """Sequences of such a micro-batch, where these are counted instead of tokens."""
        if self.micro_batches is not None:
            return None
        own = self.log_prob_micro_batch_tokens or self.log_prob_micro_batch_sequences
        return self.micro_batch_sequences if backward or not own else self.log_prob_micro_batch_sequences

    def check_model(self, model: Model) -> None:
        """Raises `ConfigError` if `model` cannot be cut that way."""
        model.check_tp(self.tp)
        mixtures = [layer.mlp for layer in model.groups if isinstance(layer.mlp, Experts)]
        refuse("strategy of a model", strategy=self, model=model, mixtures=mixtures)


# Efficiency -----------------------------------------------------------------------------------------------------------

# What share of a GPU's peaks a training framework's kernels reach, and what its host takes to launch them.

#: The host's seconds to launch the forward pass of a layer with experts; the backward pass takes twice that. Megatron
#: Core's dispatcher waits for the number of every expert's tokens, so that the host cannot launch ahead. Fitted to one
#: published iteration of pre-training on H800 (an input of `rlsim validate steps`).
EXPERT_LAUNCH_S = 4.15e-3
#: The host's seconds for the forward pass of one expert where a layer's experts run one by one; the backward pass takes
#: twice that. Fitted to one update of veRL's Qwen3-30B-A3B under FSDP (an input of `rlsim validate steps`).
LOOPED_EXPERT_S = 0.42e-3
#: `TrainStrategy.expert_imbalance` of a trainer whose router sends tokens where it will. Fitted to log-probs and
#: updates of 14 runs of veRL with Qwen3-30B-A3B on H100 (`scripts/fit_calibrations.py training`), so that it holds all
#: that experts take longer than in pre-training on H800 whose load was forced to be balanced, which comes out at 1.
EXPERT_IMBALANCE = 1.70
#: Bytes that a training framework moves for each FLOP of its linear layers, at the data sheet's bandwidth: kernels that
#: are not fused, and gaps between kernels. Fitted to runs of veRL and NeMo-RL (`scripts/fit_calibrations.py training`).
TRAFFIC = {"fsdp": 2.40e-3, "megatron": 1.51e-3}
#: Elements that the layers' element-wise kernels would move for each of these FLOPs if they were fused, in the models
#: of those runs (LLaMA-3.1-8B and Qwen2.5-7B, 0.2% apart).
MOVED = 2.16e-4


def traffic_of(framework: str) -> float:
    """`TRAFFIC` of a framework; torch's own modules are those that FSDP wraps."""
    return TRAFFIC["megatron" if framework == "megatron" else "fsdp"]


def efficiency_of(gemm_share: float, flops_per_byte: float, traffic: float) -> float:
    """Share of the peak that linear layers reach, with `traffic` bytes moved for each of their FLOPs.

    `gemm_share`: what large products alone reach; `flops_per_byte`: the GPU's peak over its memory bandwidth.
    """
    return 1.0 / (1.0 / gemm_share + traffic * flops_per_byte)


def unfused_of(model: Model, framework: str, flops_per_byte: float) -> float:
    """`TrainEfficiency.unfused` of a model: what is moved beside products grows with the width of what these pass on,
    not with their FLOPs.

    A model of half the width moves as many bytes for half of the FLOPs, and `TRAFFIC` is that of models as wide as
    those it is fitted to. Wider ones are not taken to be faster: MPT of 7B, 13B, 30B and 70B reach 0.57, 0.59, 0.59 and
    0.57 of an H100's peak under FSDP (mosaicml/llm-foundry@061f2c7, scripts/train/benchmarking, the best rows with
    recomputation).
    """
    moved = sum(count * sum(moved_elements(layer)) for layer, count in model.groups.items())
    flops = sum(count * 2.0 * layer.active_weights for layer, count in model.groups.items())
    return traffic_of(framework) * max(round(moved / flops / MOVED, 2) - 1.0, 0.0) * flops_per_byte


#: What FlashAttention-2 reaches of an SM with Ampere's matrix instructions, however fast Hopper's and later ones are:
#: 35% of the peak on an H100 SXM5 of 132 SMs (Shah et al. 2024, FlashAttention-3, arXiv 2407.08608).
FLASH_ATTENTION_2_FLOP_PER_S = 0.35 * 989.4e12 / 132

#: What flash-linear-attention's kernels of a gated delta net reach of an SM, by the FLOPs of `attention_work`: 8,192
#: tokens of 32 heads of 128 in 0.472 ms on an H200 (QwenLM/FlashQLA@6e5d2ea, benchmark; 8 heads there half as much, a
#: GB200 with 64 a tenth more, an H20 a quarter less). Mamba-2's are taken as equally fast.
CHUNKED_FLOP_PER_S = 8192 * 32 * 180_224 / 0.472e-3 / 132


@dataclass(frozen=True, kw_only=True)
class TrainEfficiency:
    """What share of the data-sheet peaks the kernels of a training framework reach.

    `flop` is that of the linear layers and absorbs what the model leaves out (gaps between kernels, unfused
    element-wise kernels); `forward` the same of calls without gradient, if a run showed another one. `attention` is
    flash attention's on long sequences, and `overhead_tokens` the length at which half of that is reached: measured
    A100 0.66 and 290, H100 0.62 and 600 tokens (aiconfigurator commit 095f58a, context_attention, SGLang 0.5.10,
    forward). `memory` is that of memory-bound kernels: measured norms 0.3, activations 0.5, additions 0.9 of peak
    bandwidth on A100 and H100 (Vidur commit 7d47513, 4,096 tokens), weighted by their bytes in a llama layer.
    `fp8_saved`: seconds that FP8 products of the layers save of each second that they would take at the bf16 peak;
    `unfused`: those that moving activations takes longer than in the models that `flop` is fitted to (`unfused_of`).
    `expert_launch_s`: the host's to launch a forward pass of a layer with experts, which takes no less;
    `looped_expert_s`: of one expert where they run one by one. `recurrent`: how many times that linear attention
    and state-space mixers take.
    """

    flop: float
    forward: float | None = None
    fp8_saved: float = 0.0
    unfused: float = 0.0
    attention: float = 0.62
    overhead_tokens: float = 400.0
    memory: float = 0.55
    expert_launch_s: float = 0.0
    looped_expert_s: float = 0.0
    recurrent: float = 1.0

    def __post_init__(self) -> None:
        shares = {key: getattr(self, key) for key in ("flop", "forward", "attention", "memory")}
        refuse("training efficiency", shares={key: share for key, share in shares.items() if share is not None})

    def attention_on(self, gpu: Gpu, kernel: AttentionKernel) -> float:
        """The share of that GPU's bf16 peak that an attention kernel reaches on long sequences."""
        if kernel != "flash_attention_2":
            return self.attention
        return min(self.attention, FLASH_ATTENTION_2_FLOP_PER_S * gpu.sm_count / gpu.bf16_flop_per_s)

    @property
    def layers(self) -> float:
        """The share of the bf16 peak that the layers' products reach; in FP8 it may be above 1."""
        if not (self.fp8_saved or self.unfused):
            return self.flop
        return 1.0 / (max(1.0 / self.flop + self.unfused, 1.0) - self.fp8_saved)
