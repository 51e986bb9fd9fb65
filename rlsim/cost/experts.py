"""A mixture of experts on one GPU: which tokens reach its experts, and the seconds of the fused kernel that they share.

The kernel is what engines run in place of an MLP: choose experts, sort tokens by expert, two grouped products with the
activation between them, and the weighted sum over a token's experts. Its formula is that of a product
(`Operators.gemm_s`) with one addition: rows are written and read again between the four parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlsim.cost.calibration import Reference
from rlsim.cost.fits import ExpertsFit, Tile
from rlsim.cost.surface import Surface
from rlsim.precision import WEIGHT_BYTES, Precision, peak_flop_per_s

Array = npt.NDArray[np.float64]
Numbers = float | Array

#: Rows of a block of the grouped products: every expert's rows are filled up to whole blocks.
BLOCK_ROWS = (8, 16, 32, 64, 128)
MXFP8 = "_mxfp8"  # ends the name of a kernel that turns activations into it
#: Axes of the correction: rows for each expert that has any, width on this GPU, bytes of the weights that are read.
EXPERT_AXES = ("rows", "width", "bytes")

#: How many times as popular the most popular expert is as the least, where popularity follows a power law: the range
#: that aiconfigurator's collector draws few tokens from, taken for any number (its own grows with the tokens).
POPULARITY_SPAN = 200.0
_DEALS = 16  # random dealings of experts to GPUs that the busiest GPU is averaged over


class ExpertLoad(NamedTuple):
    """What one call brings to the experts of one GPU; each field a number, or an array with one for every call."""

    selections: Numbers  # pairs of a token and an expert of its choice, over all GPUs
    tokens: Numbers  # over all GPUs
    rows: Numbers  # selections of experts on this GPU
    hit: Numbers  # experts on this GPU that some token chose
    experts: Numbers  # experts on this GPU
    parallel: Numbers  # 1 if experts lie on several GPUs, else 0
    blocks: tuple[Numbers, ...]  # for each of BLOCK_ROWS: blocks of so many rows, over the experts that are hit


def expert_load(tokens: float, experts: int, per_token: int, ep: int = 1, exponent: float = 0.0) -> ExpertLoad:
    """The expected load of the busiest of `ep` GPUs, each with `experts` / `ep` experts.

    Every token picks `per_token` experts. Their popularity, in a random order, is a power law's with this `exponent`
    over a range of 1 to `POPULARITY_SPAN`; below an exponent of 1 the range shrinks with it, until at 0 all are as
    popular and all GPUs alike. The busiest GPU is the one with the most rows; what chance adds to its share is left
    out.
    """
    if exponent == 0.0:
        chosen = np.full((1, experts // ep), per_token / experts)
    else:
        chosen = _busiest(experts, per_token, exponent, ep)
    some = 1.0 - (1.0 - chosen) ** tokens
    rows = chosen * tokens
    each = rows / some
    # A block is filled by half on average, but an expert that is hit has one.
    blocks = tuple(float((some * np.maximum(1.0, each / size + 0.5)).sum(axis=1).mean()) for size in BLOCK_ROWS)
    return ExpertLoad(
        selections=tokens * per_token,
        tokens=tokens,
        rows=float(rows.sum(axis=1).mean()),
        hit=float(some.sum(axis=1).mean()),
        experts=experts // ep,
        parallel=float(ep > 1),
        blocks=blocks,
    )


def _popularity(experts: int, per_token: int, exponent: float) -> Array:
    """The chance of each expert to be among a token's choices; they add up to `per_token`."""
    quantiles = (np.arange(experts) + 0.5) / experts
    span, power = POPULARITY_SPAN ** min(exponent, 1.0), 1.0 - exponent
    weight = (1.0 + quantiles * (span**power - 1.0)) ** (1.0 / power) if power else span**quantiles
    chance = np.zeros(experts)
    free = np.ones(experts, dtype=bool)
    while free.any():  # an expert is chosen once at most: what is beyond goes to the others
        chance[free] = weight[free] * (per_token - (~free).sum()) / weight[free].sum()
        beyond = free & (chance > 1.0)
        if not beyond.any():
            break
        chance[beyond] = 1.0
        free &= ~beyond
    return chance


@lru_cache(maxsize=64)
def _busiest(experts: int, per_token: int, exponent: float, ep: int) -> Array:
    """Chances of the experts of the busiest GPU, one row for each of a few dealings of the experts to `ep` GPUs."""
    chance = _popularity(experts, per_token, exponent)
    if ep == 1:
        return chance[None, :]
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_DEALS):
        dealt = rng.permutation(chance).reshape(ep, -1)
        found.append(dealt[dealt.sum(axis=1).argmax()])
    return np.array(found)


def peak_of(ref: Reference, precision: Precision) -> float:
    """The peak FLOP/s of experts in that precision; where there are no such tensor cores, those for bf16 are left."""
    return peak_flop_per_s(ref, precision) or ref.bf16_flop_per_s


class FusedExperts:
    """The kernel of one precision on one GPU.

    An expert has `width` on this GPU, and `projections` matrices from the hidden state to it: gate and up, or up alone.
    """

    def __init__(self, fit: ExpertsFit, reference: Reference, precision: Precision) -> None:
        self._fit, self._reference, self._precision = fit, reference, precision
        self._peak = peak_of(reference, fit.multiplied_in or precision)
        self._factor = None if fit.correction is None else Surface(fit.correction, EXPERT_AXES)

    def __call__(self, load: ExpertLoad, hidden: float, width: float, projections: int = 2) -> float:
        """Seconds of one call; never less than the data sheet allows where there is a correction."""
        time = float(self.formula_s(load, hidden, width, projections))
        if self._factor is None:
            return time
        size = float(self.weight_bytes(load, hidden, width, projections))
        factor = self._factor(float(load.rows / load.hit), width, size)
        return max(time * factor, float(self._fastest_s(load, hidden, width, projections)))

    def formula_s(self, load: ExpertLoad, hidden: Numbers, width: Numbers, projections: int = 2) -> Array:
        """Seconds without the correction.

        `launch + (compute^p + memory^p)^(1/p) + activations`: `compute` takes the fastest block shape (or the engine's
        default one) in both products, in waves of blocks over the SMs; `memory` reads the weights of the experts that
        are hit, cold; `activations` are the bytes written and read again for each row of this GPU, selection and token.
        """
        fit, bandwidth = self._fit, self._reference.memory_bytes_per_s
        tuned = np.isin(1e6 * load.experts + width, [1e6 * experts + own for experts, own in fit.tuned])
        compute = self._product_s(load, tuned, projections * width, hidden)
        compute = compute + self._product_s(load, tuned, hidden, width)
        memory = self.weight_bytes(load, hidden, width, projections) / (bandwidth * fit.memory_efficiency)
        high, low = np.maximum(compute, memory), np.minimum(compute, memory)
        moved = load.rows * (fit.row_hidden_bytes * hidden + fit.row_width_bytes * width)
        moved = moved + load.selections * (fit.selection_hidden_bytes * hidden + fit.selection_width_bytes * width)
        moved = moved + load.tokens * fit.token_hidden_bytes * hidden
        launch = fit.launch_s + fit.parallel_s * load.parallel
        core = high * (1.0 + (low / high) ** fit.blend) ** (1.0 / fit.blend)
        return np.asarray(launch + core + moved / bandwidth)

    def weight_bytes(self, load: ExpertLoad, hidden: Numbers, width: Numbers, projections: int = 2) -> Numbers:
        """Bytes of the weights that are read: gate, up and down of every expert that is hit."""
        return (projections + 1.0) * hidden * width * load.hit * WEIGHT_BYTES[self._precision]

    def _fastest_s(self, load: ExpertLoad, hidden: Numbers, width: Numbers, projections: int) -> Array:
        """Seconds that no kernel can beat: the data sheet's FLOP/s and bandwidth."""
        flops = 2.0 * (projections + 1) * load.rows * hidden * width
        size = self.weight_bytes(load, hidden, width, projections)
        return np.maximum(flops / self._peak, size / self._reference.memory_bytes_per_s)

    def _product_s(self, load: ExpertLoad, tuned: npt.NDArray[np.bool_], n_out: Numbers, k_in: Numbers) -> Array:
        """Seconds of one grouped product's blocks."""
        fit, sm_count = self._fit, self._reference.sm_count
        per_sm = self._peak / sm_count

        def waves_s(tile: Tile) -> Array:
            waves = load.blocks[BLOCK_ROWS.index(tile.m)] * np.ceil(n_out / tile.n) / sm_count
            waves = np.maximum(1.0, waves + fit.wave_rounding * (np.ceil(waves) - waves))
            return np.asarray(waves * 2.0 * tile.m * tile.n * (k_in + fit.k_overhead) / (per_sm * tile.efficiency))

        times = np.array([waves_s(tile) for tile in fit.tiles])
        if fit.tile_by_mean:
            mean = np.asarray(load.selections) / load.experts
            larger = [mean > 2 * tile.m for tile in fit.tiles[:-1]]  # the next block is taken beyond twice its rows
            return np.asarray(np.choose(np.count_nonzero(larger, axis=0), times))
        fastest = times.min(axis=0)
        if fit.default_tiles is None:
            return np.asarray(fastest)
        few, many = (waves_s(tile) for tile in fit.default_tiles)
        return np.where(tuned, fastest, np.where(load.tokens <= load.experts, few, many))
