"""The kernels of a GPU without tables: another one's efficiencies on its own data-sheet figures.

Each such GPU is a row, `calibration/derived/<gpu>.yaml`; `load_calibration` makes the calibration of it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from rlsim.base.schema import Schema
from rlsim.cost.fits import KernelFit, OperatorFits, ProductFit

#: The fewest rows that a block of a product is padded to: matrix instructions take tokens by 8 (PTX ISA, `wgmma` and
#: `mma.m16n8k16`), in the other operand's place where they are few. Where tables are from, the weights' way from memory
#: hides how few rows a block has, so the fits' smallest is 64. On a GPU with few FLOPs for its bandwidth it would not.
FEWEST_ROWS = 16
K = TypeVar("K", bound=KernelFit)


class Rates(Protocol):
    """The figures of a GPU that decide how its kernels carry over."""

    @property
    def bf16_flop_per_s(self) -> float: ...

    @property
    def sm_count(self) -> int: ...


class Derived(Schema):
    """A GPU without tables: everything relative is another one's, the data-sheet figures are its own."""

    source: str  # the other GPU
    cluster: str  # of the catalogue: a node as sold
    engines: tuple[str, ...]  # of the source's calibrations, those that are carried over
    note: str  # what is carried over, and what is not known


def carried_operators(operators: OperatorFits, source: Rates, reference: Rates) -> OperatorFits:
    """Kernels' fits of `source` for a GPU with these figures: as they are where its SMs are as many.

    Elsewhere products and experts have no tables: what a roofline leaves over on one GPU says little about another.

    A block of few rows that reaches little of an SM's peak is not bound by the products but by what is moved and issued
    for them. On SMs with fewer FLOP/s that takes as long: the block reaches as much more of their peak, up to what the
    best block does.
    """
    if reference.sm_count == source.sm_count:
        return operators
    per_sm = [ref.bf16_flop_per_s / ref.sm_count for ref in (source, reference)]
    slower = max(1.0, per_sm[0] / per_sm[1])
    update = {
        "gemm": _of_products(operators.gemm, slower),
        "quantised_gemm": tuple(_of_products(fit, slower) for fit in operators.quantised_gemm),
        "experts": {name: _by_block(fit, slower) for name, fit in operators.experts.items()},
        "parallel_experts": {name: _by_block(fit, slower) for name, fit in operators.parallel_experts.items()},
        "other_experts": {
            kernel: {name: _by_block(fit, slower) for name, fit in fits.items()}
            for kernel, fits in operators.other_experts.items()
        },
    }
    return operators.model_copy(update=update)


def _of_products(fit: ProductFit, slower: float) -> ProductFit:
    """With blocks of few rows too, at the efficiency of the smallest ones, where any block may have any rows."""
    fit = _by_block(fit, slower)
    if not fit.tiles:  # registers are moved while the products run, which takes as much longer
        hidden = {name: 0.0 if "spilled" in name and slower > 1 else each for name, each in fit.added_s.items()}
        return fit.model_copy(update={"added_s": hidden})
    if len({tile.from_rows for tile in fit.tiles}) == 1:
        least = min(tile.m for tile in fit.tiles)
        few = (tile.model_copy(update={"m": FEWEST_ROWS}) for tile in fit.tiles if tile.m == least)
        return fit.model_copy(update={"tiles": (*few, *fit.tiles)})
    best = max(tile.efficiency for tile in fit.tiles)
    tiles = (tile.model_copy(update={"efficiency": _share(tile.efficiency, slower, best)}) for tile in fit.tiles)
    return fit.model_copy(update={"tiles": tuple(tiles)})


def _by_block(fit: K, slower: float) -> K:
    """On SMs whose peak is so many times lower, with a share of it for each kind of block."""
    best = max(share for name, share in fit.efficiency.items() if name != "memory")
    shares = {name: one if name == "memory" else _share(one, slower, best) for name, one in fit.efficiency.items()}
    return fit.model_copy(update={"efficiency": shares, "table": None})


def _share(efficiency: float, slower: float, best: float) -> float:
    """To four digits, as shares are written."""
    return float(f"{max(efficiency, min(efficiency * slower, best)):.4g}")
