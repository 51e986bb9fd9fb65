"""The calibration of a GPU that has operator tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.gpus import Gpu
from calibration.provenance import BORROWED, COMMON, GROUPED, provenance, vidur_source
from calibration.runtime import runtime_of
from calibration.tables import all_gemms, all_precisions, latent_tables, operator_tables, vidur_layers
from calibration.training import large_gemm_share, training_fit
from rlsim.calibrate.build import MIXTURE
from rlsim.calibrate.fit import decode, gemm
from rlsim.calibrate.fit.collectives import FITTED, kernel_collectives
from rlsim.calibrate.fit.common import as_written
from rlsim.calibrate.fit.decode import decode_rows, kernel_decode_attention
from rlsim.calibrate.fit.elementwise import fit_elementwise
from rlsim.calibrate.fit.experts import Experts, kernel_exchange, kernel_experts
from rlsim.calibrate.fit.gemm import gemm_rows, kernel_gemm, kernel_of
from rlsim.calibrate.fit.heads import HEAD_DIM, usual_groups
from rlsim.calibrate.fit.kernels import compared, operators_with, predict
from rlsim.calibrate.fit.latent import kernel_latent_attention
from rlsim.calibrate.fit.prefill import kernel_prefill_attention
from rlsim.calibrate.fit.quantised import quantised_kernels, with_quantised
from rlsim.calibrate.fit.windows import with_windows
from rlsim.calibrate.importers import aiconfigurator, latent, vidur
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.points import Fitted, residual, residual_of
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, Engine, Reference, Residual, Source, TrainingFit
from rlsim.cost.fits import CollectiveFits, DeepGemmFit, ExchangeFit, MemoryOpFit, OperatorFits, ProductFit
from rlsim.hardware import load_cluster
from rlsim.precision import Precision
from rlsim.schema import Schema

SHORT_PRODUCT_S = 20e-6  # of a GPU's time: launched from Python, such a product takes as long as the launch
ELEMENTWISE_NOTE = "sum over a layer's kernels, token counts not fitted; kernels timed to 1 us"


def fit_measured(data: Path, gpu: Gpu, engine: Engine) -> Calibration:
    """The calibration of one GPU and engine, host time still zero."""
    ref = Reference.of(load_cluster(gpu.cluster))
    measured = operator_tables(data, gpu, engine)
    kernels: dict[str, Fitted[Schema]] = {
        "gemm": kernel_gemm(measured.table("gemm"), ref, cold=False),
        "decode_attention": kernel_decode_attention(measured.table("decode_attention"), ref, engine, cold=False),
        "prefill_attention": kernel_prefill_attention(measured.table("prefill_attention"), ref),
        "memory_bound": _elementwise(data, gpu),
    }
    quantised = list(quantised_kernels(measured, ref, engine, cold=False))
    mixtures, exchange = _mixtures(measured, ref)
    notes = [*COMMON, *(measured.notes if mixtures.residuals else (MIXTURE,))]
    if borrowed := _block_products(data, gpu, engine, ref):
        quantised.append(borrowed)
        notes.append(BORROWED)
    sources = [*measured.sources, vidur_source(gpu.vidur)]
    found = latent_tables(data, gpu, engine)
    if found is not None:
        *tables, source = found
        others = operators_with(ref, **{name: part.fit for name, part in kernels.items()})
        kernels["latent_attention"] = kernel_latent_attention(*tables, others, module=latent.TABLES[engine][2])
        sources.append(source)
    fits = OperatorFits.model_validate({name: part.fit for name, part in kernels.items()})
    node = measured_node(gpu.name, ref)
    collectives = kernel_collectives(measured.table("collective"), ref, node, one_by_one=True)
    if engine == "trtllm":
        notes.append(GROUPED)
    notes.extend(note for name, part in kernels.items() if name == "latent_attention" for note in part.notes)
    if not gpu.name.startswith(gpu.elementwise_donor):
        donor = gpu.elementwise_donor
        notes.append(f"norms, rotary embedding and activation: launch and efficiency measured on {donor}")
    parts = (*kernels.values(), *quantised, mixtures, exchange)
    residuals = {name: item for part in parts for name, item in part.residuals.items()}
    one, several = mixtures.fit
    fits = fits.model_copy(update={"experts": one, "parallel_experts": several})
    fits, in_windows = with_windows(fits, ref, _windows(data, measured.sources[0]))
    return Calibration(
        name=f"{gpu.name}-{engine}",
        gpu=gpu.name,
        engine=engine,
        provenance=provenance(sources, notes),
        reference=ref,
        operators=with_quantised(fits, [part.fit for part in quantised]),
        collectives=_in_order(collectives.fit).model_copy(update={"deepep": exchange.fit}),
        host=NO_HOST,
        runtime=runtime_of(engine),
        training=_training(data, gpu, ref),
        residuals={**residuals, **in_windows, **_described(collectives.residuals)},
    )


def _block_products(data: Path, gpu: Gpu, engine: Engine, ref: Reference) -> Fitted[ProductFit] | None:
    """Products in fp8_block of vLLM, where its own table times the host: those of a release of SGLang that runs as old
    a DeepGEMM, at the rate of vLLM's rows long enough for the host not to matter, and judged by such rows of weights
    that the fit has not seen. None if either engine has no such table."""
    if engine != "vllm" or not all("fp8_block" in all_precisions(data, gpu, name) for name in ("vllm", "sglang")):
        return None
    precision: Precision = "fp8_block"
    table = aiconfigurator.used_sizes(all_gemms(data, gpu.gemm("sglang", gpu.deepgemm), precision))
    fit = kernel_gemm(table, ref, False, precision).fit
    kernel, rows = kernel_of(precision), aiconfigurator.used_sizes(all_gemms(data, gpu.gemm("vllm"), precision))
    predicted_s = predict(kernel, fit, ref, rows)
    host_s = float(rows.seconds[predicted_s < SHORT_PRODUCT_S].median())
    unseen = pd.MultiIndex.from_frame(table[gemm_rows(table, ref, precision).test][["n", "k"]])
    test, long = pd.MultiIndex.from_frame(rows[["n", "k"]]).isin(unseen), predicted_s > 3 * host_s
    fit = _at_rate(fit, float(np.median((predicted_s / rows.seconds)[long & ~test])))
    points = compared(kernel, fit, ref, rows[long & test], True)
    note = (
        f"fit to SGLang {gpu.deepgemm} against vLLM's products of over {3 * host_s * 1e3:.2f} ms, three times what "
        "launching one takes; shapes (n, k) not fitted"
    )
    return Fitted(fit, {"gemm_fp8_block": residual_of(points, table[["m", "n", "k"]], note)}, points)


def _at_rate(fit: ProductFit, factor: float) -> ProductFit:
    """`fit` with the blocks' share of the peak times `factor`."""
    if isinstance(fit, DeepGemmFit):
        return as_written(fit.model_copy(update={"efficiency": tuple(one * factor for one in fit.efficiency)}))
    tiles = tuple(tile.model_copy(update={"efficiency": min(tile.efficiency * factor, 1.0)}) for tile in fit.tiles)
    return as_written(fit.model_copy(update={"tiles": tiles}))


def _windows(data: Path, source: Source) -> dict[str, pd.DataFrame]:
    """Attention in windows as it was measured, by the slot of its fit."""
    slots = {"generation": "decode_windows", "context": "prefill_windows"}
    found = {}
    for file in source.files:
        slot = slots.get(Path(file).stem.partition("_attention_perf")[0])
        if slot is not None:
            found[slot] = aiconfigurator.windows(data / "kernels/aiconfigurator" / file)
    return found


def _mixtures(measured: Measurements, ref: Reference) -> tuple[Fitted[Experts], Fitted[dict[int, ExchangeFit]]]:
    """Mixtures of experts and their all-to-all, as far as they were measured."""
    mixtures = kernel_experts(measured.table("experts"), ref) if "experts" in measured else Fitted(({}, {}))
    exchange = kernel_exchange(measured.table("exchange")) if "exchange" in measured else Fitted({})
    return mixtures, exchange


def against_hot_rows(data: Path, gpu: Gpu, calibration: Calibration) -> dict[str, Residual]:
    """How its kernels compare with held-out rows whose operands were in L2, by operator."""
    measured, ref = operator_tables(data, gpu, calibration.engine), calibration.reference
    gemms, attention = measured.table("gemm"), _usual_heads(measured.table("decode_attention"))
    products, steps = gemm_rows(gemms, ref), decode_rows(attention, ref)
    in_l2 = ~steps.beyond & (attention.context >= 128) & steps.test & (attention.batch <= 512)
    hot = {gemm.KERNEL: gemms[products.hot & products.test], decode.KERNEL: attention[in_l2]}
    return {
        kernel.operator: residual(
            predict(kernel, getattr(calibration.operators, kernel.operator), ref, rows), rows.seconds, {}
        )
        for kernel, rows in hot.items()
        if len(rows)
    }


def _usual_heads(table: pd.DataFrame) -> pd.DataFrame:
    return usual_groups(table[table.head_dim == HEAD_DIM], "decode_attention")


def _elementwise(data: Path, gpu: Gpu) -> Fitted[MemoryOpFit]:
    """Fitted on the data-sheet figures of the GPU that was measured."""
    table = vidur.elementwise_table(vidur_layers(data, gpu.vidur))
    return fit_elementwise(table, Reference.of(load_cluster(f"8x{gpu.elementwise_donor}")), ELEMENTWISE_NOTE)


def _in_order(fits: CollectiveFits) -> CollectiveFits:
    return fits.model_copy(update={"nccl": {op: fits.nccl[op] for op in FITTED}})


def _described(residuals: Mapping[str, Residual]) -> dict[str, Residual]:
    note = "each message size by a fit through the others"
    notes = {"nccl": f"{note}; all operations", "custom_all_reduce": note}
    return {name: item.model_copy(update={"note": notes[name]}) for name, item in residuals.items()}


def _training(data: Path, gpu: Gpu, ref: Reference) -> TrainingFit:
    """The same for every engine: the large GEMMs come from SGLang's tables."""
    share = large_gemm_share(all_gemms(data, gpu.training_gemm), ref.bf16_flop_per_s)
    return training_fit(share, ref, gpu.training_gemm)
