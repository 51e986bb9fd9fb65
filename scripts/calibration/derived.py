"""The calibration of a GPU without tables: another one's efficiencies on its own data-sheet figures."""

from __future__ import annotations

from collections.abc import Sequence

from calibration.gpus import DERIVED
from calibration.training import carried_over
from rlsim.calibrate.fit.common import rounded
from rlsim.cost.calibration import Calibration, Reference
from rlsim.cost.fits import DeepGemmFit, ExpertsFit, OperatorFits, ProductFit, Tile
from rlsim.hardware import load_cluster

#: The fewest rows that a block of a product is padded to: matrix instructions take tokens by 8 (PTX ISA, `wgmma` and
#: `mma.m16n8k16`), in the other operand's place where they are few. Where tables are from, the weights' way from memory
#: hides how few rows a block has, so the fits' smallest is 64. On a GPU with few FLOPs for its bandwidth it would not.
FEWEST_ROWS = 16
MANY_ROWS = 64  # of blocks that the products themselves bound


def derive(source: Calibration, gpu: str) -> Calibration:
    """`source`'s efficiencies on `gpu`; the link stays that of the measured node."""
    about = DERIVED[gpu]
    reference = Reference.of(load_cluster(about.cluster))
    notes = (f"derived: {about.note}", *source.provenance.notes)
    residuals = {
        key: value.model_copy(update={"note": f"of {source.gpu}; not measured on {gpu}. {value.note}".strip()})
        for key, value in source.residuals.items()
    }
    update = {
        "operators": carried_operators(source, reference),
        "name": f"{gpu}-{source.engine}",
        "gpu": gpu,
        "reference": reference.model_copy(update={"link_bytes_per_s": source.reference.link_bytes_per_s}),
        "provenance": source.provenance.model_copy(update={"notes": notes}),
        "residuals": residuals,
        "training": carried_over(source.training, source.reference, gpu, reference),
    }
    return source.model_copy(update=update)


def carried_operators(source: Calibration, reference: Reference) -> OperatorFits:
    """The kernels' fits for a GPU with these figures: where its SMs are as many, as they are; else formulas alone.

    A block of few rows that reaches little of an SM's peak is not bound by the products but by what is moved and issued
    for them. On SMs with fewer FLOP/s that takes as long: the block reaches as much more of their peak, up to what the
    best block of many rows does.
    """
    operators = source.operators
    if reference.sm_count == source.reference.sm_count:
        return operators
    plain = operators.without_corrections()
    per_sm = [ref.bf16_flop_per_s / ref.sm_count for ref in (source.reference, reference)]
    slower = max(1.0, per_sm[0] / per_sm[1])
    update = {
        "gemm": _of_products(plain.gemm, slower),
        "quantised_gemm": tuple(_of_products(fit, slower) for fit in plain.quantised_gemm),
        "experts": {name: _of_experts(fit, slower) for name, fit in plain.experts.items()},
        "parallel_experts": {name: _of_experts(fit, slower) for name, fit in plain.parallel_experts.items()},
    }
    return plain.model_copy(update=update)


def _of_products(fit: ProductFit, slower: float) -> ProductFit:
    """With blocks of few rows too, at the efficiency of the smallest ones for as many rows of a product; DeepGEMM has a
    rule of its own for its blocks."""
    if isinstance(fit, DeepGemmFit):
        shares = (_share(one, slower, fit.efficiency[-1]) for one in fit.efficiency)
        return fit.model_copy(update={"efficiency": tuple(shares)})
    least: dict[int, int] = {}
    for tile in fit.tiles:
        least[tile.from_rows] = min(tile.m, least.get(tile.from_rows, tile.m))
    few = [tile.model_copy(update={"m": FEWEST_ROWS}) for tile in fit.tiles if tile.m == least[tile.from_rows]]
    best, last = _best(fit.tiles), max(least)
    slow = [tile if tile.from_rows == last else _on_slower(tile, slower, best) for tile in (*few, *fit.tiles)]
    return fit.model_copy(update={"tiles": tuple(slow)})


def _of_experts(fit: ExpertsFit, slower: float) -> ExpertsFit:
    best = _best(fit.tiles)
    tiles = (_on_slower(tile, slower, best) if tile.m < MANY_ROWS else tile for tile in fit.tiles)
    default = fit.default_tiles and tuple(_on_slower(tile, slower, best) for tile in fit.default_tiles)
    return fit.model_copy(update={"tiles": tuple(tiles), "default_tiles": default})


def _best(tiles: Sequence[Tile]) -> float:
    """What the products themselves reach: the best share of the blocks of many rows, for the most rows of a product."""
    last = [tile for tile in tiles if tile.from_rows == max(tile.from_rows for tile in tiles)]
    most = max(tile.m for tile in last)
    return max(tile.efficiency for tile in last if tile.m >= min(MANY_ROWS, most))


def _on_slower(tile: Tile, slower: float, best: float) -> Tile:
    """On SMs whose peak is so many times lower."""
    return tile.model_copy(update={"efficiency": _share(tile.efficiency, slower, best)})


def _share(efficiency: float, slower: float, best: float) -> float:
    return float(rounded(max(efficiency, min(efficiency * slower, best))))
