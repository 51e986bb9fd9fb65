"""Products in other precisions than bf16, and attention on an FP8 KV cache: the formulas of bf16 with fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import pandas as pd

from rlsim.calibrate.fit.decode import kernel_decode_attention
from rlsim.calibrate.fit.gemm import kernel_gemm
from rlsim.calibrate.fit.heads import HEAD_DIM
from rlsim.calibrate.fit.prefill import kernel_prefill_attention
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.points import Fitted
from rlsim.cost.calibration import Engine, Reference
from rlsim.cost.fits import DecodeAttentionFit, OperatorFits, PrefillAttentionFit, ProductFit
from rlsim.cost.operators import gemm_of
from rlsim.precision import PRECISIONS

F = TypeVar("F", DecodeAttentionFit, PrefillAttentionFit)

#: Coarser than those of bf16, and enough.
DECODE_KNOTS = {
    "batch": [4.0**e for e in range(6)],
    "context": [2.0, *(4.0**e for e in range(2, 9))],
    "kv_heads": [1.0, 4.0, 16.0],
}


def quantised_kernels(measured: Measurements, ref: Reference, engine: Engine, cold: bool) -> Iterator[Fitted[Any]]:
    """A fit of every table in `measured` that is not of bf16; attention on FP8 only if decode and prefill both are."""
    for precision in PRECISIONS[1:]:
        if gemm_of(precision) in measured:
            yield kernel_gemm(measured.table(gemm_of(precision)), ref, cold, precision)
    decode, prefill = (measured.table(f"{name}_attention_fp8") for name in ("decode", "prefill"))
    decode, prefill = (table[table.head_dim == HEAD_DIM] for table in (decode, prefill))  # one fit, for files' size
    if len(decode) and len(prefill):
        yield kernel_decode_attention_fp8(decode, ref, engine, cold)
        yield kernel_prefill_attention_fp8(prefill, ref)


def quantised_of(operators: OperatorFits) -> Iterator[tuple[str, Any]]:
    """What `operators` has of other precisions than bf16, by the name of its table."""
    for fit in operators.quantised_gemm:
        yield gemm_of(fit.precision), fit
    for name in ("decode_attention_fp8", "prefill_attention_fp8"):
        if (attention := getattr(operators, name)) is not None:
            yield name, attention


def with_quantised(operators: OperatorFits, fits: list[Any]) -> OperatorFits:
    """`operators` with what `quantised_kernels` gives."""
    update: dict[str, Any] = {"quantised_gemm": tuple(fit for fit in fits if isinstance(fit, ProductFit))}
    for slot, kind in (("decode_attention_fp8", DecodeAttentionFit), ("prefill_attention_fp8", PrefillAttentionFit)):
        update[slot] = next((fit for fit in fits if isinstance(fit, kind)), None)
    return operators.model_copy(update=update)


def kernel_decode_attention_fp8(
    table: pd.DataFrame, ref: Reference, engine: Engine, cold: bool
) -> Fitted[DecodeAttentionFit]:
    """As `kernel_decode_attention`: half the bytes are a bf16 cache under twice the bandwidth and L2."""
    twice = {name: 2 * getattr(ref, name) for name in ("memory_bytes_per_s", "l2_bytes")}
    fitted = kernel_decode_attention(table, ref.model_copy(update=twice), engine, cold, DECODE_KNOTS)
    return _on_fp8(fitted, "decode_attention")


def kernel_prefill_attention_fp8(table: pd.DataFrame, ref: Reference) -> Fitted[PrefillAttentionFit]:
    """As `kernel_prefill_attention`; the FLOPs, which decide, are those of bf16."""
    return _on_fp8(kernel_prefill_attention(table, ref), "prefill_attention")


def _on_fp8(fitted: Fitted[F], operator: str) -> Fitted[F]:
    """The same under the operator's name on an FP8 cache."""
    named = f"{operator}_fp8"
    residuals = {name.replace(operator, named): item for name, item in fitted.residuals.items()}
    points = fitted.points.assign(operator=fitted.points.operator.str.replace(operator, named))
    return Fitted(fitted.fit.model_copy(update={"kv_precision": "fp8"}), residuals, points, fitted.notes)
