"""The calibration of a GPU without tables: another one's efficiencies on its own data-sheet figures."""

from __future__ import annotations

from calibration.gpus import DERIVED
from calibration.training import carried_over
from rlsim.cost.calibration import Calibration, Reference
from rlsim.cost.fits import GemmFit, OperatorFits, ProductFit
from rlsim.hardware import load_cluster

#: The fewest rows that a block of a product is padded to: matrix instructions take tokens by 8 (PTX ISA, `wgmma` and
#: `mma.m16n8k16`), in the other operand's place where they are few. Where tables are from, the weights' way from memory
#: hides how few rows a block has, so the fits' smallest is 64. On a GPU with few FLOPs for its bandwidth it would not.
FEWEST_ROWS = 16


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
    """The kernels' fits for a GPU with these figures: where its SMs are as many, as they are; else formulas alone."""
    operators = source.operators
    if reference.sm_count == source.reference.sm_count:
        return operators
    plain = operators.without_corrections()
    quantised: tuple[ProductFit, ...] = tuple(
        _with_few_rows(fit) if isinstance(fit, GemmFit) else fit for fit in plain.quantised_gemm
    )
    return plain.model_copy(update={"gemm": _with_few_rows(plain.gemm), "quantised_gemm": quantised})


def _with_few_rows(fit: GemmFit) -> GemmFit:
    """With blocks of few rows too, at the efficiency of the smallest ones fitted."""
    least = min(tile.m for tile in fit.tiles)
    few = (tile.model_copy(update={"m": FEWEST_ROWS}) for tile in fit.tiles if tile.m == least)
    return fit.model_copy(update={"tiles": (*few, *fit.tiles)})
