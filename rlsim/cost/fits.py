"""What a calibration says of kernels and collectives: the formulas' constants, each a record.

The formulas themselves are in `cost.roofline` and its neighbours. A number that cannot be meant is refused here, and
a record that contradicts itself by a row of `rlsim/data/refusals.yaml`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from rlsim.base.schema import Schema
from rlsim.cost.tables import IN_CSV
from rlsim.models.precision import KvPrecision, Precision, Rates
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
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class Correction(Schema):
    """A factor on a formula: multilinear in the logarithms of the axes and the factor, constant beyond them.

    What the formula's few constants leave over, smoothed on a coarse grid. Between and beyond the knots the formula
    keeps its shape.
    """

    axes: dict[str, tuple[Amount, ...]] = Field(min_length=1)  # knots of each: positive, ascending
    factor: tuple[Factor, ...]  # measured / formula at every knot, the last axis running fastest

    @model_validator(mode="before")
    @classmethod
    def _in_csv(cls, data: Any) -> Any:
        if data == IN_CSV:
            raise ValueError("the CSV file beside has no such table")
        return data

    @cached_property
    def logarithms(self) -> tuple[list[list[float]], list[Any]]:
        """Those of the knots by axis, and of the factor as lists within lists, one level for each axis."""
        axes = [[math.log(knot) for knot in knots] for knots in self.axes.values()]
        values: list[Any] = [math.log(factor) for factor in self.factor]
        for knots in reversed(axes[1:]):
            values = [values[i : i + len(knots)] for i in range(0, len(values), len(knots))]
        return axes, values


class KernelFit(Schema):
    """`launch + roofline(work) · table(shape)` (`cost.kernel`): the one form of all kernels."""

    kernel: str = ""  # the kernel that was measured, where an engine has several
    launch_s: KernelSeconds  # time of an empty kernel
    efficiency: dict[str, Efficiency]  # share of each of the data sheet's rates that is reached
    blend: Annotated[float, Field(ge=1, le=10)] = 3.0  # p: how sharply the slowest of the rates hides the others
    added_s: dict[str, KernelSeconds] = Field(default={})  # for each unit of work beside the roofline
    table: Correction | None = None  # measured over roofline, by shape


class Tile(Schema):
    """One block shape that a GEMM kernel may use: the tile of the output that a thread block works on."""

    m: Count
    n: Count
    efficiency: Share  # share of an SM's peak while inside the main loop
    from_rows: Count = 1  # of a product: with fewer, another block is taken


class ProductFit(KernelFit):
    """Matrix products in one precision (`cost.products`), over m, n, k; quantising the activations is among them."""

    precision: Precision = "bf16"  # of the weights
    blocks: Literal["deepgemm"] | None = None  # the library whose choice of blocks is known
    # block shapes where the kernel's choice is fitted: of those with the largest from_rows that is reached, the
    # fastest; none: the FLOPs alone count
    tiles: tuple[Tile, ...] = ()
    splits: tuple[Count, ...] = (1,)  # numbers of blocks that k may be split over
    split_s: KernelSeconds = 0.0  # cost of splitting k over blocks
    k_overhead: float = Field(default=0.0, ge=0, le=1e6)  # start and end of a tile, in elements of k
    wave_rounding: float = Field(default=1.0, ge=0, le=1)  # 1: a started wave costs a whole one; 0: its share


class AttentionFit(Schema):
    """Attention with grouped queries, of decode or of prompts, on one kind of KV cache (`cost.operators`)."""

    kv_precision: KvPrecision = "bf16"
    # size of a head -> its kernel; heads of a size that is not here: as the first
    heads: dict[Count, KernelFit] = Field(min_length=1)
    # the same of sequences beyond a sliding window; a size that is not here: as without
    windows: dict[Count, KernelFit] = Field(default={})
    skew: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the padding of unequal contexts that decode pays for


class LatentAttentionFit(Schema):
    """Latent attention (MLA) beside its products with the model's weights (`cost.attention`)."""

    kv_precision: KvPrecision = "bf16"
    decode: KernelFit
    prompts: KernelFit | None = None  # none: as that of grouped queries, over keys and values made of the latents


class ExpertsFit(KernelFit):
    """All that stands in an MLP's place (`cost.experts`), over rows, width, bytes (of the weights that are read)."""

    # whose peak rate the products have, if not that of the weights' precision: MXFP4 weights are multiplied in bf16, or
    # in fp8 where the kernel turns activations into MXFP8
    multiplied_in: Precision | None = None
    # of the blocks: the first is taken whose rows, times `block_fill`, hold the mean of selections for an expert here,
    # those of experts elsewhere among them (FlashInfer's `selectDefaultTileN`)
    block_rows: tuple[Count, ...] = Field(min_length=1)
    block_fill: float = Field(default=2.0, gt=0, le=2)  # 2, or 0.9 of Marlin's (`fused_marlin_moe` of vLLM)
    filled: bool = False  # each expert here has a whole block, whether any token chose it or not
    # rows and columns of the blocks that the engine takes where it has none tuned: for no more tokens than experts, and
    # beyond
    default_blocks: tuple[tuple[Count, Count], tuple[Count, Count]] | None = None
    # beside default_blocks: (experts on a GPU, their width there) that have tuned blocks
    tuned: tuple[tuple[Count, Count], ...] = ()


class OperatorFits(Schema):
    """One record per kind of kernel. The LM head is a GEMM.

    `experts` are measured mixtures, by precision; where there are none others are lent (`Calibration.lent`).
    """

    gemm: ProductFit
    decode_attention: AttentionFit
    prefill_attention: AttentionFit
    memory_bound: KernelFit  # norms, rotary embedding, activation: over bytes (of one), tokens
    quantised_gemm: tuple[ProductFit, ...] = ()  # one for each other precision that was measured
    decode_attention_fp8: AttentionFit | None = None  # on an FP8 KV cache
    prefill_attention_fp8: AttentionFit | None = None  # on an FP8 KV cache
    latent_attention: LatentAttentionFit | None = None  # none: not measured on this GPU
    latent_attention_fp8: LatentAttentionFit | None = None  # on an FP8 KV cache
    experts: dict[Precision, ExpertsFit] = Field(default={})  # mixtures of experts, by precision
    # the same where experts lie on several GPUs, if the engine takes another kernel there
    parallel_experts: dict[Precision, ExpertsFit] = Field(default={})
    # by kernels that the engine takes when it is told to (`engine.moe_backend`)
    other_experts: dict[str, dict[Precision, ExpertsFit]] = Field(default={})

    @property
    def gemms(self) -> dict[Precision, ProductFit]:
        """Matrix products by precision."""
        return {fit.precision: fit for fit in (self.gemm, *self.quantised_gemm)}


class CollectiveFit(Schema):
    """Time of one collective, linear in log-log between knots; flat below, proportional to the bytes above."""

    message_bytes: tuple[Annotated[Bytes, Field(gt=0, le=1e15)], ...] = Field(min_length=2)  # ascending
    time_s: tuple[StepSeconds, ...]  # not falling


Gpus = Annotated[int, Field(ge=2, le=1_000_000)]


class ExchangeFit(Schema):
    """DeepEP's dispatch and combine together, by the bytes (bf16) that a GPU's tokens make, once for each copy."""

    low_latency: CollectiveFit  # kernels of decode steps; a copy for each expert of a token
    normal: CollectiveFit  # kernels of prefills; a copy for each GPU that a token reaches


class AcrossFit(Schema):
    """Collectives across nodes: `L (1 + x + ramp x^power)`, where `L` is the time of an empty message and `x` that of
    the bytes at full rate over `L`. A hop takes the link's latency and what is said here (`cost.collectives`)."""

    base_s: KernelSeconds  # launch and synchronisation
    step_s: KernelSeconds  # from GPU to GPU of a node, in a tree
    tree_hop_s: KernelSeconds  # beyond the link's latency, each time a tree goes to another node
    # for the network's proxy to post one message, in all-to-alls; a ring across nodes waits for it at each hop inside
    # them, too (NCCL's model)
    message_s: KernelSeconds
    efficiency: Share  # share of the link that the largest messages reach
    ramp: float = Field(ge=0, le=100)  # how much chunks and protocols of middling messages cost
    power: Share  # how that grows with the bytes
    source: str  # what it is from


#: Of NCCL and networks, not of a GPU, where a calibration says nothing else; fitted as of commit 8f206fb2.
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


class CollectiveFits(Schema):
    """Collectives inside a node by operation and GPUs, and how they go on across nodes."""

    nccl: dict[Operation, dict[Gpus, CollectiveFit]]  # operation -> GPUs -> fit
    # the engine's own all-reduce under CUDA graphs, by GPUs; taken where it is faster
    custom_all_reduce: dict[Gpus, CollectiveFit] = Field(default={})
    deepep: dict[Gpus, ExchangeFit] = Field(default={})  # tokens to experts and back, by GPUs of a node
    across: AcrossFit = ACROSS  # across nodes


# GPUs without tables --------------------------------------------------------------------------------------------------

# Another one's efficiencies on its own data-sheet figures. Each such GPU is a row, `calibration/derived/<gpu>.yaml`.


#: The fewest rows that a block of a product is padded to: matrix instructions take tokens by 8 (PTX ISA, `wgmma` and
#: `mma.m16n8k16`), in the other operand's place where they are few. Where tables are from, the weights' way from memory
#: hides how few rows a block has, so the fits' smallest is 64. On a GPU with few FLOPs for its bandwidth it would not.
FEWEST_ROWS = 16
N = TypeVar("N")
K = TypeVar("K", bound=KernelFit)


class Derived(Schema):
    """A GPU without tables: everything relative is another one's, the data-sheet figures are its own."""

    source: str  # the other GPU
    cluster: str  # of the catalogue: a node as sold
    engines: tuple[str, ...]  # of the source's calibrations, those that are carried over
    note: str  # what is carried over, and what is not known
    # share of its peak that large products and long attention reach, where that is measured; default: as on the source
    reached: Share | None = None


def carried_operators(
    operators: OperatorFits, source: Rates, reference: Rates, reached: float | None = None
) -> OperatorFits:
    """Kernels' fits of `source` for a GPU with these figures: as they are where its SMs are as many.

    Elsewhere products and experts have tables of few rows alone, where the memory decides, which serves a size as well:
    what a roofline leaves over of FLOPs on one GPU says little about another.

    A block that reaches little of an SM's peak is not bound by the products but by what is moved and issued for them.
    On SMs with fewer FLOP/s that takes as long: the block reaches as much more of their peak, up to what the best block
    does, or to what large products and long attention were measured to reach there (`reached`).
    """
    if reference.sm_count == source.sm_count:
        return operators
    per_sm = [ref.bf16_flop_per_s / ref.sm_count for ref in (source, reference)]
    slower, most = max(1.0, per_sm[0] / per_sm[1]), reached or 0.0
    ridge = reference.bf16_flop_per_s / reference.memory_bytes_per_s  # rows; of fewer bytes there are more FLOP/s

    def carried(fits: Mapping[N, K], rows: float = ridge) -> dict[N, K]:
        return {name: _by_block(fit, slower, most, rows) for name, fit in fits.items()}

    update = {
        "gemm": _of_products(operators.gemm, slower, most, ridge),
        "quantised_gemm": tuple(_of_products(fit, slower, most, ridge) for fit in operators.quantised_gemm),
        "experts": carried(operators.experts),
        "parallel_experts": carried(operators.parallel_experts),
        "other_experts": {kernel: carried(fits) for kernel, fits in operators.other_experts.items()},
    }
    if reached:
        for kind in ("prefill_attention", "prefill_attention_fp8"):
            if fit := getattr(operators, kind):
                both = {"heads": carried(fit.heads, 0.0), "windows": carried(fit.windows, 0.0)}
                update[kind] = fit.model_copy(update=both)
    return operators.model_copy(update=update)


def _of_products(fit: ProductFit, slower: float, most: float, ridge: float) -> ProductFit:
    """With blocks of few rows too, at the efficiency of the smallest ones, where any block may have any rows."""
    fit = _by_block(fit, slower, most, ridge)
    if not fit.tiles:  # registers are moved while the products run, which takes as much longer
        hidden = {name: 0.0 if "spilled" in name and slower > 1 else each for name, each in fit.added_s.items()}
        return fit.model_copy(update={"added_s": hidden})
    if len({tile.from_rows for tile in fit.tiles}) == 1:
        least = min(tile.m for tile in fit.tiles)
        few = (tile.model_copy(update={"m": FEWEST_ROWS}) for tile in fit.tiles if tile.m == least)
        fit = fit.model_copy(update={"tiles": (*few, *fit.tiles)})
    best = max(most, *(tile.efficiency for tile in fit.tiles))
    tiles = (tile.model_copy(update={"efficiency": _share(tile.efficiency, slower, best)}) for tile in fit.tiles)
    return fit.model_copy(update={"tiles": tuple(tiles)})


def _by_block(fit: K, slower: float, most: float, ridge: float) -> K:
    """On SMs whose peak is so many times lower, with a share of it for each kind of block, none above the peak (a block
    that was bound by other things has any share); the `masked` pairs' is one over their time."""
    best = min(1.0, max(most, *(share for name, share in fit.efficiency.items() if name != "memory")))
    shares = {name: one if name == "memory" else _share(one, slower, best) for name, one in fit.efficiency.items()}
    added, table = dict(fit.added_s), fit.table and _of_few_rows(fit.table, ridge)
    if "masked" in added:
        added["masked"] = min(added["masked"], 1.0 / _share(1.0 / added["masked"], slower, best))
    return fit.model_copy(update={"efficiency": shares, "added_s": added, "table": table})


def _of_few_rows(table: Correction, ridge: float) -> Correction:
    """What a table says of fewer rows, its first axis, than FLOPs would count with."""
    rows = next(iter(table.axes.values()))
    few = bisect_left(rows, ridge) * len(table.factor) // len(rows)
    return Correction(axes=table.axes, factor=(*table.factor[:few], *[1.0] * (len(table.factor) - few)))


def _share(efficiency: float, slower: float, best: float) -> float:
    """To four digits, as shares are written."""
    return float(f"{min(efficiency * slower, best):.4g}")
