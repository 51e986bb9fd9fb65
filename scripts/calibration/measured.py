"""The calibration of a GPU that has operator tables."""

from __future__ import annotations

from pathlib import Path

from calibration.gpus import Gpu
from calibration.host import NO_HOST
from calibration.provenance import COMMON, GROUPED, aiconfigurator_source, provenance, vidur_source
from calibration.runtime import runtime_of
from calibration.tables import (
    aiconfigurator,
    all_gemms,
    custom_all_reduce_tables,
    decode_attention_table,
    elementwise_table,
    gemm_table,
    nccl_tables,
    prefill_attention_table,
    vidur_layers,
)
from calibration.training import large_gemm_share, training_fit
from rlsim.calibrate.fit.attention import fit_decode_attention, fit_prefill_attention
from rlsim.calibrate.fit.collectives import fit_collectives
from rlsim.calibrate.fit.common import Fitted
from rlsim.calibrate.fit.elementwise import fit_elementwise
from rlsim.calibrate.fit.gemm import fit_gemm
from rlsim.calibrate.fit.skew import derived_skew
from rlsim.cost.calibration import (
    Calibration,
    DecodeAttentionFit,
    Engine,
    GemmFit,
    MemoryOpFit,
    OperatorFits,
    Reference,
    Residual,
    TrainingFit,
)
from rlsim.hardware import load_cluster


def fit_measured(data: Path, gpu: Gpu, engine: Engine) -> tuple[Calibration, dict[str, Residual]]:
    """The calibration of one GPU and engine, host time still zero, and its comparisons with L2-hot rows."""
    ref = Reference.of(load_cluster(gpu.cluster))
    gemm = _gemm(data, gpu, engine, ref)
    decode = _decode(data, gpu, engine, ref, skew=derived_skew(ref, uniform=engine == "trtllm"))
    prefill = fit_prefill_attention(prefill_attention_table(aiconfigurator(data, gpu.prefill_attention(engine))), ref)
    memory = _elementwise(data, gpu)
    collectives, collective_residuals = fit_collectives(
        nccl_tables(aiconfigurator(data, gpu.collectives())),
        custom_all_reduce_tables(aiconfigurator(data, gpu.all_reduce(engine))),
    )
    notes = list(COMMON)
    if engine == "trtllm":
        notes.append(GROUPED)
    donor = gpu.elementwise_donor()
    if not gpu.name.startswith(donor):
        notes.append(f"norms, rotary embedding and activation: launch and efficiency measured on {donor}")
    files = (
        gpu.gemm(engine),
        gpu.decode_attention(engine),
        gpu.prefill_attention(engine),
        gpu.all_reduce(engine),
        gpu.collectives(),
    )
    release = f"{engine} {gpu.versions[engine]}, NCCL {gpu.nccl}"
    calibration = Calibration(
        name=f"{gpu.name}-{engine}",
        gpu=gpu.name,
        engine=engine,
        provenance=provenance((aiconfigurator_source(files, release), vidur_source(gpu.vidur)), notes),
        reference=ref,
        operators=OperatorFits(
            gemm=gemm.fit, decode_attention=decode.fit, prefill_attention=prefill.fit, memory_bound=memory.fit
        ),
        collectives=collectives,
        host=NO_HOST,
        runtime=runtime_of(engine),
        training=_training(data, gpu, ref),
        residuals={
            "gemm": gemm.residual,
            "decode_attention": decode.residual,
            "prefill_attention": prefill.residual,
            **({"prefill_attention_long": prefill.long} if prefill.long else {}),
            "memory_bound": memory.residual,
            **collective_residuals,
        },
    )
    hot = {"gemm": gemm.hot, "decode_attention": decode.hot}
    return calibration, {name: item for name, item in hot.items() if item is not None}


def with_hot_rows(data: Path, gpu: Gpu, cold: Calibration) -> Calibration:
    """`cold` with kernels fitted to all rows, L2-hot ones included: the treatment that rlsim does not use."""
    update = {
        "gemm": _gemm(data, gpu, cold.engine, cold.reference, include_hot=True).fit,
        "decode_attention": _decode(data, gpu, cold.engine, cold.reference, skew=0.0, include_hot=True).fit,
    }
    return cold.model_copy(update={"operators": cold.operators.model_copy(update=update)})


def _gemm(data: Path, gpu: Gpu, engine: str, ref: Reference, include_hot: bool = False) -> Fitted[GemmFit]:
    return fit_gemm(gemm_table(aiconfigurator(data, gpu.gemm(engine))), ref, include_hot)


def _decode(
    data: Path, gpu: Gpu, engine: str, ref: Reference, skew: float, include_hot: bool = False
) -> Fitted[DecodeAttentionFit]:
    table = decode_attention_table(aiconfigurator(data, gpu.decode_attention(engine)))
    if engine == "trtllm":
        table = table[table.q_heads == table.kv_heads]  # its grouped-query rows outrun the memory (GROUPED)
    return fit_decode_attention(table, ref, skew, include_hot)


def _elementwise(data: Path, gpu: Gpu) -> Fitted[MemoryOpFit]:
    """Fitted on the data-sheet figures of the GPU that was measured."""
    cluster = load_cluster({"h100": "8xh100", "a100": "8xa100", "a40": "8xa40"}[gpu.elementwise_donor()])
    return fit_elementwise(elementwise_table(vidur_layers(data, gpu.vidur)), Reference.of(cluster))


def _training(data: Path, gpu: Gpu, ref: Reference) -> TrainingFit:
    """The same for every engine: the large GEMMs come from SGLang's tables."""
    table = gpu.gemm("sglang")
    return training_fit(large_gemm_share(all_gemms(aiconfigurator(data, table)), ref.bf16_flop_per_s), table)
