"""How far off a derived calibration is: one GPU's efficiencies on another GPU whose kernels are measured too."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from calibration.derived import carried_operators
from calibration.gpus import GPUS
from calibration.tables import operator_tables
from rlsim.calibrate.fit import gemm
from rlsim.calibrate.fit.attention import DECODE, HEAD_DIM, PROMPTS, decode_rows, usual_groups
from rlsim.calibrate.fit.gemm import gemm_rows
from rlsim.calibrate.fit.kernels import predict
from rlsim.calibrate.points import residual
from rlsim.cost.calibration import Calibration, Reference, Residual
from rlsim.hardware import load_cluster

#: Source and target: the same chip with other memory, the next generation, the one before.
PAIRS = (("h100-sxm", "h200-sxm"), ("h100-sxm", "b200-sxm"), ("a100-sxm-80gb", "h100-sxm"), ("a100-sxm-80gb", "l40s"))


def carried_errors(data: Path, source: Calibration, target: str) -> dict[str, Residual]:
    """Errors of `source`'s kernels on `target`'s data-sheet figures, by operator, on rows that L2 does not hold.

    Nothing of the target is fitted, so every such row counts.
    """
    gpu, engine = GPUS[target], source.engine
    ref = Reference.of(load_cluster(gpu.cluster))
    fits, measured = carried_operators(source, ref), operator_tables(data, gpu, engine)
    gemms = measured.table("gemm")
    rows = {
        gemm.KERNEL: gemms[~gemm_rows(gemms, ref).hot],
        DECODE: _usual(measured.table("decode_attention"), "decode_attention"),
        PROMPTS: _usual(measured.table("prefill_attention"), "prefill_attention"),
    }
    rows[DECODE] = rows[DECODE][decode_rows(rows[DECODE], ref).streamed]
    return {
        kernel.operator: residual(predict(kernel, getattr(fits, kernel.operator), ref, some), some.seconds, {})
        for kernel, some in rows.items()
    }


def _usual(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    return usual_groups(table[table.head_dim == HEAD_DIM], operator)
