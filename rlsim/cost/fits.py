"""What a calibration says of kernels and collectives: the formulas' constants, each a record.

The formulas themselves are in `cost.roofline` and its neighbours. A number that cannot be meant is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rlsim.precision import KvPrecision, Precision
from rlsim.schema import Schema
from rlsim.units import Bytes, Seconds

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
# Beyond these bounds a number cannot be meant, and what is priced with it would be infinite, negative or no number.
KernelSeconds = Annotated[Seconds, Field(ge=0, le=10)]
StepSeconds = Annotated[Seconds, Field(ge=1e-9, le=3600)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
#: Of a peak that caches may hide: on a CPU it can be above 1.
Efficiency = Annotated[float, Field(ge=1e-6, le=100)]
Factor = Annotated[float, Field(ge=1e-4, le=1e4)]
Amount = Annotated[float, Field(gt=0, le=1e15)]
Blend = Annotated[float, Field(ge=1, le=50)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class Fitted(Schema):
    """A record of finite numbers."""

    model_config = ConfigDict(allow_inf_nan=False)


def ascend(knots: Sequence[float], what: str) -> None:
    """Raises `ValueError` unless the knots ascend."""
    if any(high <= low for low, high in pairwise(knots)):
        raise ValueError(f"{what} must ascend")


def _check_knots(fit: Fitted, knots: str, values: str) -> None:
    """Raises `ValueError` unless these fields of a fit are ascending knots and a value at each."""
    if len(getattr(fit, knots)) != len(getattr(fit, values)):
        raise ValueError(f"{knots} and {values} must have the same length")
    ascend(getattr(fit, knots), knots)


class Axis(Fitted):
    """One axis of a correction."""

    name: str
    knots: tuple[Amount, ...] = Field(min_length=1, description="positive, ascending")

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        ascend(self.knots, f"the knots of {self.name}")
        return self


class Correction(Fitted):
    """A factor on a formula: multilinear in the logarithms of the axes and the factor, constant beyond them.

    What the formula's few constants leave over, smoothed on a coarse grid. Between and beyond the knots the formula
    keeps its shape.
    """

    axes: tuple[Axis, ...] = Field(min_length=1)
    factor: tuple[Factor, ...] = Field(description="measured / formula at every knot, the last axis running fastest")

    @model_validator(mode="after")
    def _grid(self) -> Self:
        size = math.prod(len(axis.knots) for axis in self.axes)
        if len(self.factor) != size:
            raise ValueError(f"factor must hold {size} positive numbers, one for each combination of knots")
        return self

    @cached_property
    def logarithms(self) -> tuple[list[list[float]], list[Any]]:
        """Those of the knots by axis, and of the factor as lists within lists, one level for each axis."""
        axes = [[math.log(knot) for knot in axis.knots] for axis in self.axes]
        values: list[Any] = [math.log(factor) for factor in self.factor]
        for knots in reversed(axes[1:]):
            values = [values[i : i + len(knots)] for i in range(0, len(values), len(knots))]
        return axes, values

    @classmethod
    def over(cls, axes: Mapping[str, Sequence[float]], factor: Sequence[float]) -> Correction:
        """The correction over these knots by axis."""
        return cls(
            axes=tuple(Axis(name=name, knots=tuple(knots)) for name, knots in axes.items()), factor=tuple(factor)
        )

    def knots(self, name: str) -> tuple[float, ...]:
        """The knots of one axis; raises `KeyError` if it has no such axis."""
        return {axis.name: axis.knots for axis in self.axes}[name]


class Tile(Fitted):
    """One block shape that a GEMM kernel may use."""

    m: Count
    n: Count
    efficiency: Share = Field(description="share of an SM's peak while inside the main loop")
    from_rows: Count = Field(default=1, description="of a product: with fewer, another block is taken")


class GemmFit(Fitted):
    """`launch + quantise + (compute^p + memory^p)^(1/p)`; compute = waves of the best tile shape and split of k.

    `quantise` is the traffic of turning bf16 activations into the precision's own, which the engines do just before.
    """

    precision: Precision = Field(default="bf16", description="of the weights")
    launch_s: KernelSeconds = Field(description="time of an empty kernel, with that which quantises activations")
    memory_efficiency: Share = Field(description="share of peak bandwidth, weights cold")
    k_overhead: float = Field(ge=0, le=1e6, description="start and end of a tile, as extra depth in elements of k")
    split_s: KernelSeconds = Field(description="cost of splitting k over blocks")
    blend: Blend = Field(description="p: how sharply the slower of compute and memory hides the other")
    wave_rounding: float = Field(ge=0, le=1, description="1: a started wave costs a whole one; 0: only its share")
    tiles: tuple[Tile, ...] = Field(
        min_length=1, description="block shapes: of those with the largest from_rows that is reached, the fastest"
    )
    splits: tuple[Count, ...] = Field(min_length=1, description="numbers of blocks that k may be split over")
    correction: Correction | None = Field(default=None, description="over m, n, k")


class DeepGemmFit(Fitted):
    """`launch + quantise + (compute^p + memory^p)^(1/p)` of DeepGEMM on Hopper: compute = waves of the block that it
    chooses (`cost.deepgemm`), each `k / 128 · step + ends`."""

    precision: Literal["fp8_block"] = "fp8_block"
    launch_s: KernelSeconds = Field(description="time of an empty kernel, with that which quantises activations")
    quantise_block_s: KernelSeconds = Field(description="least time for each thread block of the kernel that quantises")
    memory_efficiency: Share = Field(description="share of peak bandwidth, weights cold")
    blend: Blend = Field(description="p: how sharply the slower of compute and memory hides the other")
    step_s: KernelSeconds = Field(description="of 128 elements of k: what goes beside the products themselves")
    efficiency: tuple[Efficiency, Efficiency, Efficiency] = Field(
        description="share of an SM's peak beside step_s, in blocks of up to 64, of 128 and of 256 rows; above 1 where "
        "two groups of warps hide a part of it"
    )
    uneven: Factor = Field(description="how much longer the products of a block take whose columns two scales share")
    spilled_s: tuple[KernelSeconds, KernelSeconds] = Field(
        description="of 128 elements of k more, in blocks that want more registers than there are: without multicast "
        "of 128 x 160, and of 128 x 192 or 256 x 128"
    )
    end_s: KernelSeconds = Field(description="start and end of a block of 128 x 128; as its area for others")
    correction: Correction | None = Field(default=None, description="over m, n, k")


ProductFit = GemmFit | DeepGemmFit


class DecodeAttentionFit(Fitted):
    """`max(floor, stream)`: both grow with sequences and KV heads, stream also with the KV bytes."""

    kv_precision: KvPrecision = "bf16"
    floor_s: KernelSeconds = Field(description="shortest kernel")
    floor_tile_s: KernelSeconds = Field(description="per sequence and KV head, tiny contexts")
    floor_sequence_s: KernelSeconds = Field(description="per sequence, tiny contexts")
    stream_s: KernelSeconds = Field(description="fixed cost once the KV is split over blocks")
    stream_tile_s: KernelSeconds = Field(description="per sequence and KV head")
    stream_sequence_s: KernelSeconds = Field(description="per sequence")
    parallelism: tuple[float, ...] = Field(min_length=1, description="ascending knots: log2(sequences * KV heads)")
    efficiency: tuple[Efficiency, ...] = Field(description="share of peak bandwidth at the knots, KV cold")
    skew: float = Field(ge=0, le=1, description="share of the padding of unequal contexts that is paid for (derived)")
    correction: Correction | None = Field(default=None, description="over batch, context, kv_heads")
    head_dims: dict[Count, DecodeAttentionFit] = Field(
        default={}, description="head size -> the kernel for it, where it was measured; others: as for heads of 128"
    )

    @model_validator(mode="after")
    def _knots(self) -> Self:
        _check_knots(self, "parallelism", "efficiency")
        return self


class PrefillAttentionFit(Fitted):
    """`launch + (total^p + longest^p)^(1/p)`: all work over all SMs, and the longest block on one SM."""

    kv_precision: KvPrecision = "bf16"
    launch_s: KernelSeconds
    block_tokens: Count = Field(description="queries per block")
    packed: bool = Field(default=False, description="a block holds queries of all heads that share a KV head")
    overhead_tokens: float = Field(ge=0, le=1e6, description="start and end of a block, as extra keys")
    blend: Blend
    keys: tuple[Amount, ...] = Field(min_length=1, description="ascending knots: mean keys per query")
    efficiency: tuple[Efficiency, ...] = Field(description="share of peak FLOP/s at the knots, all SMs busy")
    single_efficiency: Share = Field(description="share of an SM's peak that one lone block reaches")
    memory_efficiency: Share = Field(description="share of peak bandwidth for q, k, v and output")
    correction: Correction | None = Field(default=None, description="over sequences, new, q_heads, group")
    head_dims: dict[Count, PrefillAttentionFit] = Field(
        default={}, description="head size -> the kernel for it, where it was measured; others: as for heads of 128"
    )

    @model_validator(mode="after")
    def _knots(self) -> Self:
        _check_knots(self, "keys", "efficiency")
        return self


class LatentAttentionFit(Fitted):
    """Latent attention (MLA) beside its products with the model's weights.

    Decode works in the latent: a launch, and for each cached token the blend of its bytes and of the FLOPs of all
    heads. A prompt's attention is that of grouped queries over keys and values made of the latent;
    prompts of few tokens may work in the latent as decode does.
    """

    kv_precision: KvPrecision = "bf16"
    launch_s: KernelSeconds = Field(description="all small kernels of a layer")
    sequence_s: KernelSeconds = Field(description="per sequence")
    head_s: KernelSeconds = Field(description="per sequence and head")
    parallelism: tuple[float, ...] = Field(min_length=1, description="ascending knots: log2(sequences)")
    efficiency: tuple[Efficiency, ...] = Field(description="share of peak bandwidth at the knots")
    flop_efficiency: Share = Field(description="share of peak FLOP/s of attention in the latent")
    correction: Correction | None = Field(default=None, description="over batch, context, heads")
    prompt_launch_s: KernelSeconds = Field(description="all small kernels of a layer in a prefill")
    prompt_head_s: KernelSeconds = Field(description="of copies and elementwise kernels, per new token and head")
    prompt_keys: tuple[float, ...] = Field(min_length=1, description="ascending knots: log2(mean keys per query)")
    prompt_speed: tuple[Annotated[float, Field(ge=0.1, le=10)], ...] = Field(
        description="prompt attention at the knots, times as fast as with grouped queries"
    )
    latent_prompt_tokens: int = Field(ge=0, le=1_000_000, description="longest prompt that works in the latent")

    @model_validator(mode="after")
    def _knots(self) -> Self:
        _check_knots(self, "parallelism", "efficiency")
        _check_knots(self, "prompt_keys", "prompt_speed")
        return self


class MemoryOpFit(Fitted):
    """`launch + bytes / (bandwidth * efficiency)`: norms, rotary embedding, activation."""

    launch_s: KernelSeconds
    efficiency: Share
    correction: Correction | None = Field(default=None, description="over tokens, bytes (of one kernel)")


class ExpertsFit(Fitted):
    """`launch + (compute^p + memory^p)^(1/p) + activations`: all that stands in an MLP's place (`cost.experts`)."""

    kernel: str = Field(description="the kernel that was measured, which the engine chooses by itself")
    multiplied_in: Precision | None = Field(
        default=None,
        description="whose peak rate the products have, if not that of the weights' precision: MXFP4 weights are "
        "multiplied in bf16, or in fp8 where the kernel turns activations into MXFP8",
    )
    launch_s: KernelSeconds = Field(description="routing and the launches of an empty call")
    parallel_s: KernelSeconds = Field(description="added where experts lie on several GPUs")
    memory_efficiency: Share = Field(description="share of peak bandwidth, weights cold")
    k_overhead: float = Field(ge=0, le=1e6, description="start and end of a block, as extra depth in elements of k")
    blend: Blend = Field(description="p: how sharply the slower of compute and memory hides the other")
    wave_rounding: float = Field(ge=0, le=1, description="1: a started wave costs a whole one; 0: only its share")
    tiles: tuple[Tile, ...] = Field(min_length=1, description="block shapes, of which the fastest is taken")
    tile_by_mean: bool = Field(
        default=False,
        description="instead of the fastest: the first whose doubled rows hold the mean of selections for an expert "
        "here, those of experts elsewhere among them (FlashInfer's `selectDefaultTileN`)",
    )
    default_tiles: tuple[Tile, Tile] | None = Field(
        default=None,
        description="blocks that the engine takes where it has none tuned: for no more tokens than experts, and beyond",
    )
    tuned: tuple[tuple[Count, Count], ...] = Field(
        default=(), description="beside default_tiles: (experts on a GPU, their width there) that have tuned blocks"
    )
    row_hidden_bytes: float = Field(ge=0, le=1e6, description="moved for each row, per element of the hidden state")
    row_width_bytes: float = Field(ge=0, le=1e6, description="moved for each row, per element of an expert's width")
    selection_hidden_bytes: float = Field(
        ge=0, le=1e6, description="the same for every selection, also of experts on other GPUs"
    )
    selection_width_bytes: float = Field(ge=0, le=1e6, description="and per element of the width")
    token_hidden_bytes: float = Field(default=0.0, ge=0, le=1e6, description="the same for every token")
    correction: Correction | None = Field(default=None, description="over rows, width, bytes (of the experts hit)")


class OperatorFits(Fitted):
    """One record per kind of kernel. The LM head is a GEMM.

    `experts` are measured mixtures, by precision; where there are none a mixture is approximated from plain GEMMs.
    """

    gemm: GemmFit
    decode_attention: DecodeAttentionFit
    prefill_attention: PrefillAttentionFit
    memory_bound: MemoryOpFit
    quantised_gemm: tuple[ProductFit, ...] = Field(
        default=(), description="one for each other precision that was measured"
    )
    decode_attention_fp8: DecodeAttentionFit | None = Field(default=None, description="on an FP8 KV cache")
    prefill_attention_fp8: PrefillAttentionFit | None = Field(default=None, description="on an FP8 KV cache")
    decode_windows: dict[Count, Correction] = Field(
        default={},
        description="head size -> time of attention in a window over that of as many tokens: tiles (KV heads of the "
        "batch), window",
    )
    prefill_windows: dict[Count, Correction] = Field(
        default={}, description="the same of prompts, over sequences, tokens (of each), kv_heads, group"
    )
    masked_prefill: dict[Count, PrefillAttentionFit] = Field(
        default={},
        description="head size -> the kernel for prompts beyond their window, where it goes through all keys before a "
        "query and masks those out of the window",
    )
    latent_attention: LatentAttentionFit | None = Field(default=None, description="none: not measured on this GPU")
    latent_attention_fp8: LatentAttentionFit | None = Field(default=None, description="on an FP8 KV cache")
    experts: dict[Precision, ExpertsFit] = Field(default={}, description="mixtures of experts, by precision")
    parallel_experts: dict[Precision, ExpertsFit] = Field(
        default={}, description="the same where experts lie on several GPUs, if the engine takes another kernel there"
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.gemm.precision != "bf16" or len(self.gemms) <= len(self.quantised_gemm):
            raise ValueError("gemm must be of bf16, and quantised_gemm have one fit for each other precision")
        caches = [fit.kv_precision for fit in (self.decode_attention, self.prefill_attention)]
        fp8 = [fit and fit.kv_precision for fit in (self.decode_attention_fp8, self.prefill_attention_fp8)]
        if caches != ["bf16", "bf16"] or fp8 not in ([None, None], ["fp8", "fp8"]):
            raise ValueError("attention must be of a bf16 KV cache, …_attention_fp8 both of an fp8 one, or missing")
        latent = {"bf16": self.latent_attention, "fp8": self.latent_attention_fp8}
        if any(fit is not None and fit.kv_precision != kv for kv, fit in latent.items()):
            raise ValueError("latent_attention must be of a bf16 KV cache, latent_attention_fp8 of an fp8 one")
        return self

    @property
    def gemms(self) -> dict[Precision, ProductFit]:
        """Matrix products by precision."""
        return {fit.precision: fit for fit in (self.gemm, *self.quantised_gemm)}

    @property
    def kv_precisions(self) -> tuple[KvPrecision, ...]:
        """The precisions of KV caches that attention was measured on."""
        return ("bf16", "fp8") if self.decode_attention_fp8 else ("bf16",)

    @property
    def latent_kv_precisions(self) -> tuple[KvPrecision, ...]:
        """The same of latent attention."""
        return ("bf16", "fp8") if self.latent_attention_fp8 else ("bf16",)

    def without_corrections(self) -> Self:
        """The formulas alone: what they leave over on one GPU says little about another with other SMs. An elementwise
        kernel keeps its correction, which is about bytes."""

        def bare(fit: Any) -> Any:
            if isinstance(fit, tuple):
                return tuple(map(bare, fit))
            if isinstance(fit, dict):
                return {name: bare(one) for name, one in fit.items() if not isinstance(one, Correction)}
            if fit is None or isinstance(fit, MemoryOpFit):
                return fit
            heads: dict[str, Any] = {"head_dims": {}} if hasattr(fit, "head_dims") else {}
            return fit.model_copy(update={"correction": None, **heads})

        return self.model_copy(update={name: bare(fit) for name, fit in self})


class CollectiveFit(Fitted):
    """Time of one collective, linear in log-log between knots; flat below, proportional to the bytes above."""

    message_bytes: tuple[Annotated[Bytes, Field(gt=0, le=1e15)], ...] = Field(min_length=2, description="ascending")
    time_s: tuple[StepSeconds, ...] = Field(description="not falling")

    @model_validator(mode="after")
    def _knots(self) -> Self:
        _check_knots(self, "message_bytes", "time_s")
        if list(self.time_s) != sorted(self.time_s):
            raise ValueError("time_s must not fall")
        return self


Gpus = Annotated[int, Field(ge=2, le=1_000_000)]


class ExchangeFit(Fitted):
    """DeepEP's dispatch and combine together, by the bytes (bf16) that a GPU's tokens make, once for each copy."""

    low_latency: CollectiveFit = Field(description="kernels of decode steps; a copy for each expert of a token")
    normal: CollectiveFit = Field(description="kernels of prefills; a copy for each GPU that a token reaches")


class AcrossFit(Fitted):
    """Collectives across nodes: `L (1 + x + ramp x^power)`, where `L` is the time of an empty message and `x` that of
    the bytes at full rate over `L`. A hop takes the link's latency and what is said here (`cost.collectives`)."""

    base_s: KernelSeconds = Field(description="launch and synchronisation")
    step_s: KernelSeconds = Field(description="from GPU to GPU of a node, in a tree")
    tree_hop_s: KernelSeconds = Field(description="beyond the link's latency, each time a tree goes to another node")
    message_s: KernelSeconds = Field(
        description="for the network's proxy to post one message, in rings and all-to-alls"
    )
    efficiency: Share = Field(description="share of the link that the largest messages reach")
    ramp: float = Field(ge=0, le=100, description="how much chunks and protocols of middling messages cost")
    power: Share = Field(description="how that grows with the bytes")
    source: str = Field(description="what it is from")


#: Of NCCL and networks, not of a GPU: every calibration has it that says nothing else (`scripts/fit_across.py`).
ACROSS = AcrossFit(
    base_s=6.8e-6,
    step_s=0.6e-6,
    tree_hop_s=2.3e-6,
    message_s=1.0e-6,
    efficiency=0.86,
    ramp=1.9,
    power=0.35,
    source="latencies of NCCL 2.21's tuning model; the last three fitted to published nccl-tests of eleven clusters",
)


class CollectiveFits(Fitted):
    """Collectives inside a node by operation and GPUs, and how they go on across nodes."""

    nccl: dict[Operation, dict[Gpus, CollectiveFit]] = Field(description="operation -> GPUs -> fit")
    custom_all_reduce: dict[Gpus, CollectiveFit] = Field(
        default={}, description="the engine's own all-reduce under CUDA graphs, by GPUs; taken where it is faster"
    )
    deepep: dict[Gpus, ExchangeFit] = Field(default={}, description="tokens to experts and back, by GPUs of a node")
    across: AcrossFit = Field(default=ACROSS, description="across nodes")
