"""How far off a derived calibration is: one GPU's efficiencies on another GPU whose kernels are measured too."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from calibration.gpus import GPUS
from calibration.tables import operator_tables
from rlsim.calibrate.fit import gemm
from rlsim.calibrate.fit.attention import DECODE, GROUP, HEAD_DIM, PROMPTS, decode_rows, usual_groups
from rlsim.calibrate.fit.gemm import gemm_rows
from rlsim.calibrate.fit.kernels import predict
from rlsim.calibrate.points import residual
from rlsim.cost.calibration import Calibration, Reference, Residual
from rlsim.cost.carried import carried_operators
from rlsim.models.hardware import load_cluster

FEW_ROWS = 64  # of products that decode


def carried_errors(data: Path, source: Calibration, target: str) -> dict[str, Residual]:
    """Errors of `source`'s kernels on `target`'s data-sheet figures, by operator, on rows that L2 does not hold.

    Nothing of the target is fitted, so every such row counts.
    """
    gpu, engine = GPUS[target], source.engine
    ref = Reference.of(load_cluster(gpu.cluster))
    fits, measured = carried_operators(source.operators, source.reference, ref), operator_tables(data, gpu, engine)
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


def measured_there(data: Path, derived: Calibration) -> dict[str, Residual]:
    """Errors of a `derived` calibration of H20 or H800 on rows that InferSim measured there: products of DeepGEMM by
    rows, decode attention by query heads for each KV head."""
    table = pd.read_csv(data / "kernels/infersim/infersim_h20_h800.csv")
    table = table[table.gpu == derived.gpu.partition("-")[0]].assign(seconds=table.latency_us * 1e-6)
    products, fit = table[table.op == "gemm"], derived.operators.gemms["fp8_block"]
    decode = table[(table.op == "mha/decode") & (table.kv_dtype == "bf16")].rename(
        columns={"batch_size": "batch", "kv_len": "context"}
    )
    decode[["q_heads", "kv_heads", "head_dim"]] = decode["shape"].str.split("-", expand=True).astype(int)
    few, many = products.m <= FEW_ROWS, decode.q_heads > GROUP * decode.kv_heads
    block, kv = gemm.kernel_of("fp8_block"), derived.operators.decode_attention
    parts = {
        f"products in fp8_block, up to {FEW_ROWS} rows": (block, fit, products[few]),
        "products in fp8_block, more rows": (block, fit, products[~few]),
        f"decode attention, up to {GROUP} query heads for each KV head": (DECODE, kv, decode[~many]),
        "decode attention, more": (DECODE, kv, decode[many]),
    }
    return {
        name: residual(predict(kernel, own, derived.reference, rows), rows.seconds, {})
        for name, (kernel, own, rows) in parts.items()
    }


def _usual(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    return usual_groups(table[table.head_dim == HEAD_DIM], operator)
