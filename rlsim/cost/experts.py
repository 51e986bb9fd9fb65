"""A mixture of experts on one GPU: which tokens reach its experts, and the seconds of the fused kernel that they share.

The kernel is what engines run in place of an MLP: choose experts, sort tokens by expert, two grouped products with the
activation between them, and the weighted sum over a token's experts: rows are written and read again between the four
parts.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlsim.cost.calibration import Reference
from rlsim.cost.fits import ExpertsFit
from rlsim.cost.kernel import Kernel, Work
from rlsim.models.precision import WEIGHT_BYTES, Precision, peak_flop_per_s

Array = npt.NDArray[np.float64]

BF16_BYTES = 2.0
TILE_COLUMNS = 128

#: Rows of a block of the grouped products: every expert's rows are filled up to whole blocks.
BLOCK_ROWS = (8, 16, 32, 64, 128)
MXFP8 = "_mxfp8"  # ends the name of a kernel that turns activations into it
#: Axes of the table: rows for each expert that has any, width on this GPU, bytes of the weights that are read, and one
#: more than the exponent of the power law that popularity follows.
EXPERT_AXES = ("rows", "width", "bytes", "popularity")

#: How many times as popular the most popular expert is as the least, where popularity follows a power law: the range
#: that aiconfigurator's collector draws few tokens from, taken for any number (its own grows with the tokens).
POPULARITY_SPAN = 200.0
_DEALS = 16  # random dealings of experts to GPUs that the busiest GPU is averaged over


class ExpertLoad(NamedTuple):
    """What one call brings to the experts of one GPU."""

    selections: float  # pairs of a token and an expert of its choice, over all GPUs
    tokens: float  # over all GPUs
    rows: float  # selections of experts on this GPU
    hit: float  # experts on this GPU that some token chose
    experts: float  # experts on this GPU
    parallel: float  # 1 if experts lie on several GPUs, else 0
    exponent: float  # of the power law of popularity; 0: all are as popular
    blocks: tuple[float, ...]  # for each of BLOCK_ROWS: blocks of so many rows, over the experts that are hit

    def with_shared(self) -> ExpertLoad:
        """The same with one more expert, which every token picks."""
        more = {name: getattr(self, name) + self.tokens for name in ("selections", "rows")}
        blocks = tuple(n + max(1.0, self.tokens / size + 0.5) for n, size in zip(self.blocks, BLOCK_ROWS, strict=True))
        return self._replace(**more, hit=self.hit + 1, experts=self.experts + 1, blocks=blocks)

    def filled(self, size: int) -> ExpertLoad:
        """With a block of `size` rows for every expert: as many as DeepGEMM's contiguous rows may need at most, which
        is how many vLLM launches where nobody counts them (`compute_aligned_M`)."""
        rows = self.rows + self.experts * (size - 1)
        return self._replace(rows=rows, blocks=tuple(rows / one for one in BLOCK_ROWS))


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
        exponent=exponent,
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
        self._kernel, self._tuned = Kernel(fit, EXPERT_AXES), frozenset(fit.tuned)
        defaults = [f"default_{rows}" for rows, _ in fit.default_blocks or ()]
        self._kinds = [*(f"rows_{rows}" for rows in fit.block_rows), *defaults]

    def __call__(self, load: ExpertLoad, hidden: float, width: float, projections: int = 2) -> float:
        """Seconds of one call; never less than the data sheet allows."""
        work = self.work(load, hidden, width, projections)
        size = self.weight_bytes(load, hidden, width, projections)
        time = self._kernel.time_s(work, load.rows / load.hit, width, size, 1.0 + load.exponent)
        flops = 2.0 * (projections + 1) * load.rows * hidden * width
        return max(time, flops / self._peak, size / self._reference.memory_bytes_per_s)

    def weight_bytes(self, load: ExpertLoad, hidden: float, width: float, projections: int = 2) -> float:
        """Bytes of the weights that are read: gate, up and down of every expert that is hit."""
        return (projections + 1.0) * hidden * width * load.hit * WEIGHT_BYTES[self._precision]

    def work(self, load: ExpertLoad, hidden: float, width: float, projections: int = 2) -> Work:
        """Blocks of both products, each kind at a share of the peak of its own, and the weights of the experts that are
        hit, cold. On top: what is done for each row of this GPU, selection, token and expert, and the bytes (at the
        memory's rate) that are written and read again for them."""
        fit, bandwidth = self._fit, self._reference.memory_bytes_per_s
        resources = dict.fromkeys(self._kinds, 0.0)
        load = load.filled(fit.block_rows[0]) if fit.filled else load
        if fit.default_blocks is not None and (load.experts, width) not in self._tuned:
            rows, columns = fit.default_blocks[load.tokens > load.experts]
            kind = f"default_{rows}"
        else:
            mean, columns = load.selections / load.experts, TILE_COLUMNS
            rows = next((one for one in fit.block_rows if mean <= fit.block_fill * one), fit.block_rows[-1])
            kind = f"rows_{rows}"
        blocks, sms = load.blocks[BLOCK_ROWS.index(rows)], self._reference.sm_count
        for n_out, k_in in ((projections * width, hidden), (hidden, width)):
            waves = max(1.0, blocks * ceil(n_out / columns) / sms)
            resources[kind] += waves * 2.0 * rows * columns * k_in * sms / self._peak
        resources["memory"] = self.weight_bytes(load, hidden, width, projections) / bandwidth
        of_hidden, of_width = hidden * BF16_BYTES / bandwidth, width * BF16_BYTES / bandwidth
        return Work(
            resources,
            {
                "rows": load.rows,
                "rows_hidden": load.rows * of_hidden,
                "rows_width": load.rows * of_width,
                "selections": load.selections,
                "selections_hidden": load.selections * of_hidden,
                "selections_width": load.selections * of_width,
                "tokens_hidden": load.tokens * of_hidden,
                "experts": load.experts,
                "parallel": load.parallel,
            },
        )
