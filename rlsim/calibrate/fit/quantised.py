"""Products in other precisions than bf16."""

from __future__ import annotations

from collections.abc import Iterator

from rlsim.calibrate.fit.gemm import kernel_gemm
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.points import Fitted
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import ProductFit
from rlsim.cost.operators import gemm_of
from rlsim.precision import PRECISIONS


def quantised_products(measured: Measurements, ref: Reference, cold: bool) -> Iterator[Fitted[ProductFit]]:
    """A fit of every table of products in `measured` that is not of bf16."""
    for precision in PRECISIONS[1:]:
        if gemm_of(precision) in measured:
            yield kernel_gemm(measured.table(gemm_of(precision)), ref, cold, precision)
