"""Every calibration by name, made on demand: what it needs of others is made first, and nothing twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.tables import (
    COMMON,
    ENGINES,
    GPUS,
    NOTES,
    OLDER,
    Gpu,
    all_gemms,
    all_precisions,
    latent_tables,
    operator_tables,
    provenance,
    runtime_of,
    vidur_layers,
    vidur_source,
)
from calibration.training import large_gemm_share, training_fit
from evidence.validate.transfer import shipped_fits
from rlsim.base.schema import Schema
from rlsim.calibrate.build import MIXTURE
from rlsim.calibrate.fit.attention import attention_kernels, with_windows
from rlsim.calibrate.fit.collectives import FITTED, kernel_collectives
from rlsim.calibrate.fit.common import as_written, compared, operators_with, predict
from rlsim.calibrate.fit.elementwise import fit_elementwise
from rlsim.calibrate.fit.experts import Experts, kernel_exchange, kernel_experts
from rlsim.calibrate.fit.gemm import gemm_rows, kernel_gemm, kernel_of, quantised_products
from rlsim.calibrate.fit.latent import kernel_latent_attention
from rlsim.calibrate.importers import aiconfigurator, vidur
from rlsim.calibrate.measurements import Measurements, measured_node
from rlsim.calibrate.parts import Fitted, residual_of
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, Engine, Reference, Residual, Source, TrainingFit
from rlsim.cost.fits import CollectiveFits, ExchangeFit, ExpertsFit, KernelFit, OperatorFits, ProductFit
from rlsim.models.hardware import load_cluster
from rlsim.models.precision import KvPrecision, Precision

#: Since this release vLLM schedules an iteration while the one before runs, unless it is told not to.
ASYNC_SCHEDULING = (0, 14)
SERVED_ON = "h100-sxm"  # the GPU of the serving runs


class Catalogue:
    """The calibrations that the tables in `data` give."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.kernels = cache(self._kernels)
        self.calibration = cache(self._calibration)

    @staticmethod
    def names() -> list[str]:
        """Every calibration that is fitted."""
        return sorted([f"{name}-{engine}" for name, gpu in GPUS.items() for engine in gpu.versions] + [*OLDER])

    def _kernels(self, gpu: str, engine: Engine, release: str = "") -> Calibration:
        about = GPUS[gpu]
        about = replace(about, versions={**about.versions, engine: release}) if release else about
        return fit_measured(self.data, about, engine)

    def _calibration(self, name: str) -> Calibration:
        """With the host time and front end that the serving runs of its engine give."""
        gpu, _, suffix = name.rpartition("-")
        own = OLDER.get(name) or (gpu, next(engine for engine in ENGINES if engine == suffix))
        kernels = self.kernels(*own)
        fit = shipped_fits().of(kernels.engine)
        reused = "" if kernels.gpu == SERVED_ON else "; reused from H100, host CPUs may differ"
        ahead = kernels.engine == "vllm" and tuple(map(int, kernels.release.split(".")[:2])) >= ASYNC_SCHEDULING
        update = {
            part: record.model_copy(update={"source": record.source + reused})
            for part, record in (("host", fit.host), ("front_end", fit.front_end))
        }
        return kernels.model_copy(update={**update, "name": name}).scheduled(True if ahead else None)


SHORT_PRODUCT_S = 20e-6  # of a GPU's time: launched from Python, such a product takes as long as the launch
LATENT: Mapping[KvPrecision, str] = {"bf16": "latent_attention", "fp8": "latent_attention_fp8"}


def fit_measured(data: Path, gpu: Gpu, engine: Engine) -> Calibration:
    """The calibration of one GPU and engine, host time still zero."""
    ref = Reference.of(load_cluster(gpu.cluster))
    measured = operator_tables(data, gpu, engine)
    kernels: dict[str, Fitted[Schema]] = {
        "gemm": kernel_gemm(measured.table("gemm"), ref, cold=False),
        **attention_kernels(measured, ref, engine, cold=False),
        "memory_bound": _elementwise(data, gpu),
    }
    quantised = list(quantised_products(measured, ref, cold=False))
    mixtures, exchange = _mixtures(measured, ref)
    sources = [*measured.sources, vidur_source(gpu.vidur)]
    if lent := _lent_mixtures(data, gpu, engine, mixtures.fit, ref):
        found_there, source = lent
        one, several = mixtures.fit
        residuals = {**mixtures.residuals, **found_there.residuals}
        mixtures = Fitted(({**one, **found_there.fit}, several), residuals, mixtures.points, found_there.notes)
        sources.append(source)
    notes = [*COMMON, *(measured.notes if mixtures.residuals else (MIXTURE,))]
    if borrowed := _block_products(data, gpu, engine, ref):
        quantised.append(borrowed)
        notes.append(NOTES["borrowed"])
    notes.extend(mixtures.notes)
    others, blocks = operators_with(ref, **{name: part.fit for name, part in kernels.items()}), False
    for kv, slot in LATENT.items():
        found = latent_tables(data, gpu, engine, kv)
        if found is not None:
            *tables, blocks, source = found
            module = aiconfigurator.LATENT[engine][2]
            kernels[slot] = kernel_latent_attention(*tables, others, module=module, blocks=blocks, kv=kv)
            sources.append(source)
    in_windows: dict[str, Residual] = {}
    for operator, table in _windows(data, measured.sources[0]).items():
        part = kernels[operator]
        fit, residuals = with_windows(part.fit, ref, operator, table)
        kernels[operator] = replace(part, fit=fit)
        in_windows |= residuals
    fits = OperatorFits.model_validate({name: part.fit for name, part in kernels.items()})
    node = measured_node(gpu.name, ref)
    collectives = kernel_collectives(measured.table("collective"), ref, node, one_by_one=True)
    if engine == "trtllm":
        notes.append(NOTES["grouped"])
    notes.extend(note for name, part in kernels.items() if name in LATENT.values() for note in part.notes)
    if engine == "sglang" and "latent_attention_fp8" in kernels and not blocks:
        notes.append(NOTES["slow latents"])
    if not gpu.name.startswith(gpu.elementwise_donor):
        donor = gpu.elementwise_donor
        notes.append(f"norms, rotary embedding and activation: launch and efficiency measured on {donor}")
    parts = (*kernels.values(), *quantised, mixtures, exchange)
    residuals = {name: item for part in parts for name, item in part.residuals.items()}
    one, several = mixtures.fit
    products = tuple(part.fit for part in quantised)
    fits = fits.model_copy(update={"experts": one, "parallel_experts": several, "quantised_gemm": products})
    return Calibration(
        name=f"{gpu.name}-{engine}",
        gpu=gpu.name,
        engine=engine,
        provenance=provenance(dict.fromkeys(sources), dict.fromkeys(notes)),
        reference=ref,
        operators=_in_an_engine(fits, engine),
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
    """`fit` with the share of the peak times `factor`."""
    rates = {name: share if name == "memory" else share * factor for name, share in fit.efficiency.items()}
    return as_written(fit.model_copy(update={"efficiency": rates}))


def _windows(data: Path, source: Source) -> dict[str, pd.DataFrame]:
    """Attention in windows as it was measured, by operator."""
    slots = {"generation": "decode_attention", "context": "prefill_attention"}
    found = {}
    for file in source.files:
        slot = slots.get(Path(file).stem.partition("_attention_perf")[0])
        if slot is not None:
            found[slot] = aiconfigurator.windows(data / "kernels/aiconfigurator" / file)
    return found


def _lent_mixtures(
    data: Path, gpu: Gpu, engine: Engine, own: Experts, ref: Reference
) -> tuple[Fitted[dict[Precision, ExpertsFit]], Source] | None:
    """The other engine's experts in MXFP4 on one GPU, where this one runs the same kernel and its own table lacks it:
    SGLang on Hopper OpenAI's `triton_kernels`, vLLM on Blackwell FlashInfer's on activations turned into MXFP8."""
    one, several = own
    if engine == "sglang" and "mxfp4" in several and "mxfp4" not in one:
        lender, note = "vllm", NOTES["lent"]
    elif engine == "vllm" and ref.fp4_flop_per_s and "mxfp4" in one:
        lender, note = "sglang", NOTES["lent mxfp8"]
    else:
        return None
    measured = operator_tables(data, gpu, lender)
    table = measured.table("experts")
    lent = kernel_experts(table[table.precision == "mxfp4"], ref)
    about = f"of {gpu.name}-{lender}, not measured here"
    residuals = {
        name: item.model_copy(update={"note": f"{about}: {item.note}"}) for name, item in lent.residuals.items()
    }
    files = tuple(file for file in measured.sources[0].files if file.endswith("moe_perf.parquet"))
    return Fitted(lent.fit[0], residuals, notes=(note,)), measured.sources[0].model_copy(update={"files": files})


def _in_an_engine(fits: OperatorFits, engine: Engine) -> OperatorFits:
    """Quantised products with the launch that they have in an engine's graph: that of the product in bf16 and of the
    elementwise kernel that quantises activations, which TensorRT-LLM fuses with the norm or activation before. Tiny
    ones were measured as long as Python takes to launch them: 14.5 us in FP8 of TensorRT-LLM, in blocks of Blackwell.
    """
    most = fits.gemm.launch_s + (0.0 if engine == "trtllm" else fits.memory_bound.added_s["launches"])
    quantised = [fit.model_copy(update={"launch_s": min(fit.launch_s, most)}) for fit in fits.quantised_gemm]
    return as_written(fits.model_copy(update={"quantised_gemm": tuple(quantised)}))


def _mixtures(measured: Measurements, ref: Reference) -> tuple[Fitted[Experts], Fitted[dict[int, ExchangeFit]]]:
    """Mixtures of experts and their all-to-all, as far as they were measured."""
    mixtures = kernel_experts(measured.table("experts"), ref) if "experts" in measured else Fitted(({}, {}))
    exchange = kernel_exchange(measured.table("exchange")) if "exchange" in measured else Fitted({})
    return mixtures, exchange


def _elementwise(data: Path, gpu: Gpu) -> Fitted[KernelFit]:
    """Fitted on the data-sheet figures of the GPU that was measured."""
    table = vidur.elementwise_table(vidur_layers(data, gpu.vidur))
    return fit_elementwise(table, Reference.of(load_cluster(f"8x{gpu.elementwise_donor}")), NOTES["elementwise"])


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
