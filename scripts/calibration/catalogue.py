"""Every calibration by name, made on demand: what it needs of others is made first, and nothing twice.

`catalogue.yaml` has the GPUs that calibrations are made for, and which measured tables go into theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from evidence.validate.kernels import elementwise_table
from evidence.validate.transfer import shipped_fits
from rlsim.base.reading import plain, read_yaml
from rlsim.base.schema import Schema
from rlsim.calibrate.build import COLD, INTER, MIXTURE, PAIR, PUBLISHED
from rlsim.calibrate.fit.attention import attention_kernels, with_windows
from rlsim.calibrate.fit.collectives import FITTED, kernel_collectives
from rlsim.calibrate.fit.common import as_written, compared, predict
from rlsim.calibrate.fit.experts import Experts, kernel_exchange, kernel_experts, other_experts
from rlsim.calibrate.fit.gemm import gemm_rows, kernel_gemm, kernel_of, quantised_products
from rlsim.calibrate.fit.kernel import fit_elementwise
from rlsim.calibrate.fit.latent import kernel_latent_attention
from rlsim.calibrate.importers import aiconfigurator
from rlsim.calibrate.importers.reading import imported
from rlsim.calibrate.measurements import Fitted, Measurements, measured_node, residual_of
from rlsim.calibrate.steps import NO_HOST
from rlsim.cost.calibration import Calibration, Engine, Provenance, Reference, Residual, Source, TrainingFit
from rlsim.cost.fits import ExpertsFit, OperatorFits, ProductFit
from rlsim.cost.operators import Operators
from rlsim.cost.strategy import TRAFFIC, efficiency_of
from rlsim.models.hardware import load_cluster
from rlsim.models.precision import KvPrecision, Precision

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
DATE = "2026-11-24"
SCRIPT = "scripts/fit_calibrations.py"
NOTES: dict[str, str] = plain(read_yaml(Path(__file__).with_name("notes.yaml")))
COMMON = (COLD, NOTES["skew"], INTER, PAIR)
LARGEST_GRAPH = {"sglang": 160, "vllm": 256, "trtllm": 128}  # of the engine's defaults
ENGINES: tuple[Engine, ...] = ("sglang", "vllm", "trtllm")


@dataclass(frozen=True)
class Gpu:
    """One measured GPU: a row of `catalogue.yaml`, which says what is what."""

    name: str
    folder: str
    cluster: str
    versions: Mapping[Engine, str]
    vidur: tuple[str, ...]
    training: str = "0.5.10"
    deepgemm: str = "0.5.10"

    @property
    def elementwise_donor(self) -> str:
        """Vidur's name of the GPU that the elementwise kernels were measured on."""
        return self.vidur[0].split("/")[0]

    def gemm(self, engine: Engine, release: str = "") -> str:
        """Path of the GEMM table of an engine, by default of the release fitted."""
        return f"{self.folder}/gemm/{engine}/{release or self.versions[engine]}/gemm_perf.parquet"

    @property
    def training_gemm(self) -> str:
        """Path of the GEMM table that the share of the peak in training is from."""
        return self.gemm("sglang", self.training)


_ROWS = plain(read_yaml(Path(__file__).with_suffix(".yaml")))
GPUS = {row["name"]: Gpu(**row) for row in _ROWS["gpus"]}
OLDER: dict[str, tuple[str, Engine, str]] = {name: tuple(row) for name, row in _ROWS["older"].items()}
KEPT: list[str] = _ROWS["kept"]


def operator_tables(data: Path, gpu: Gpu, engine: Engine) -> Measurements:
    """What aiconfigurator measured of an engine on a GPU."""
    folder = data / "kernels/aiconfigurator" / gpu.folder
    measured = aiconfigurator.read(folder, engine, gpu.versions[engine])
    (source,) = measured.sources
    return Measurements(measured.tables, (source.model_copy(update={"commit": "095f58a"}),))


def all_gemms(data: Path, table: str, precision: Precision = "bf16") -> pd.DataFrame:
    """Products of every size in a table of aiconfigurator's: m, n, k, seconds."""
    return aiconfigurator.gemms(data / "kernels/aiconfigurator" / table, precision=precision)


def latent_tables(
    data: Path, gpu: Gpu, engine: str, kv: KvPrecision
) -> tuple[pd.DataFrame, pd.DataFrame, bool, Source] | None:
    """Latent attention on a KV cache of `kv` as aiconfigurator measured it, of decode and of prompts, whether its
    kernels are made for blocks of heads, and where from; None if it did not."""
    folder = data / "kernels/aiconfigurator" / gpu.folder
    paths = aiconfigurator.latent_tables(folder, engine)
    if paths is None:
        return None
    decode, prompts = (aiconfigurator.latent(path, kv) for path in paths)
    release = f"{engine} {paths[0].parent.name}"
    files = (str(path.relative_to(folder.parent)) for path in paths)
    source = imported("NVIDIA aiconfigurator", "Apache-2.0", files, release)
    return decode, prompts, aiconfigurator.in_blocks(paths[0]), source.model_copy(update={"commit": "095f58a"})


def large_gemm_share(table: pd.DataFrame, peak_flop_per_s: float) -> float:
    """Median share of the peak rate of measured products with at least 4,096 tokens and weights of 3,584 or more.

    `table`: m (tokens), n and k (weights), seconds. Products wider than 60,000 are LM heads and left out.
    """
    big = table[(table.m >= 4096) & table.n.between(3584, 60000) & (table.k >= 3584)]
    return float((2.0 * big.m * big.n * big.k / big.seconds).median() / peak_flop_per_s)


def training_fit(gemm_share: float, reference: Reference, table: str) -> TrainingFit:
    """Share of peak by framework on a GPU whose large GEMMs in `table` reach `gemm_share` of it."""
    said = {"share": gemm_share, "large": NOTES["large gemms"], "table": table}
    said |= {framework: traffic * 1e3 for framework, traffic in TRAFFIC.items()}
    shares = {
        name: round(efficiency_of(gemm_share, reference.flops_per_byte, each), 3) for name, each in TRAFFIC.items()
    }
    return TrainingFit(flop_efficiency=shares, source=NOTES["training"].format_map(said))


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


MXFP8_KERNEL = "flashinfer_trtllm_mxfp8"  # as `engine.moe_backend` names it
SHORT_PRODUCT_S = 20e-6  # of a GPU's time: launched from Python, such a product takes as long as the launch
LATENT: Mapping[KvPrecision, str] = {"bf16": "latent_attention", "fp8": "latent_attention_fp8"}


def fit_measured(data: Path, gpu: Gpu, engine: Engine) -> Calibration:
    """The calibration of one GPU and engine, host time still zero."""
    ref = Reference.of(load_cluster(gpu.cluster))
    measured = operator_tables(data, gpu, engine)
    files = tuple(f"data/profiling/compute/{name}/mlp.csv" for name in gpu.vidur)
    vidurs = Source(project="Microsoft Vidur", commit="7d47513", licence="MIT", files=files)
    layers = elementwise_table(data / "kernels/vidur/head" / file for file in files)
    donor = Reference.of(load_cluster(f"8x{gpu.elementwise_donor}"))  # fitted on the figures of what was measured
    kernels: dict[str, Fitted[Schema]] = {
        "gemm": kernel_gemm(measured.table("gemm"), ref, cold=False),
        **attention_kernels(measured, ref, engine, cold=False),
        "memory_bound": fit_elementwise(layers, donor, NOTES["elementwise"]),
    }
    quantised = list(quantised_products(measured, ref, cold=False))
    mixtures = kernel_experts(measured.table("experts"), ref) if "experts" in measured else Fitted(({}, {}))
    exchange = kernel_exchange(measured.table("exchange")) if "exchange" in measured else Fitted({})
    sources = [*measured.sources, vidurs]
    one, several = mixtures.fit
    lent_to_ask: dict[str, dict[Precision, ExpertsFit]] = {}
    if lent := _lent_mixtures(data, gpu, engine, mixtures.fit, ref):
        found_there, source = lent
        if engine == "sglang":
            one = {**one, **found_there.fit}
        else:
            lent_to_ask = {MXFP8_KERNEL: found_there.fit}
        mixtures = replace(mixtures, residuals={**mixtures.residuals, **found_there.residuals}, notes=found_there.notes)
        sources.append(source)
    notes = [*COMMON, *(measured.notes if mixtures.residuals else (MIXTURE,))]
    if borrowed := _block_products(data, gpu, engine, ref):
        quantised.append(borrowed)
        notes.append(NOTES["borrowed"])
    notes.extend(mixtures.notes)
    fits = OperatorFits.model_validate({name: part.fit for name, part in kernels.items()})
    others, blocks = Operators(fits, ref), False
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
        fit, residuals = with_windows(part.fit, ref, operator, table, engine)
        kernels[operator] = replace(part, fit=fit)
        in_windows |= residuals
    node = measured_node(gpu.name, ref)
    collectives = kernel_collectives(measured.table("collective"), ref, node, one_by_one=True)
    if engine == "trtllm":
        notes.append(NOTES["grouped"])
    notes.extend(note for name, part in kernels.items() if name in LATENT.values() for note in part.notes)
    if engine == "sglang" and "latent_attention_fp8" in kernels and not blocks:
        notes.append(NOTES["slow latents"])
    if not gpu.name.startswith(whose := gpu.elementwise_donor):
        notes.append(f"norms, rotary embedding and activation: launch and efficiency measured on {whose}")
    nccl = {op: collectives.fit.nccl[op] for op in FITTED}
    sizes = {"nccl": "; all operations", "custom_all_reduce": ""}
    communication = {
        name: item.model_copy(update={"note": f"each message size by a fit through the others{sizes[name]}"})
        for name, item in collectives.residuals.items()
    }
    large = all_gemms(data, gpu.training_gemm)
    on_hopper = ref.fp4_flop_per_s is None  # elsewhere nobody asks for other kernels of MXFP4
    told = other_experts(measured.table("other_experts").iloc[: None if on_hopper else 0], ref)
    told.fit.update(lent_to_ask)
    if engine == "vllm" and gpu.name.startswith("h"):  # Hopper
        launch_s = one["fp8_block"].launch_s
        told.fit["deep_gemm"] = {"fp8_block": ExpertsFit(**{**_ROWS["deep_gemm"], "launch_s": launch_s})}
        notes.append(NOTES["deep gemm"])
    parts = (*kernels.values(), *quantised, mixtures, told, exchange)
    residuals = {name: item for part in parts for name, item in part.residuals.items()}
    more = {"experts": one, "parallel_experts": several, "other_experts": told.fit}
    fits = OperatorFits(
        **{name: part.fit for name, part in kernels.items()},
        **more,
        quantised_gemm=tuple(part.fit for part in quantised),
    )
    return Calibration(
        name=f"{gpu.name}-{engine}",
        gpu=gpu.name,
        engine=engine,
        provenance=Provenance(
            date=DATE, script=SCRIPT, sources=tuple(dict.fromkeys(sources)), notes=tuple(dict.fromkeys(notes))
        ),
        reference=ref,
        operators=_in_an_engine(fits, engine),
        collectives=collectives.fit.model_copy(update={"nccl": nccl, "deepep": exchange.fit}),
        host=NO_HOST,
        runtime=PUBLISHED.model_copy(update={"graph_batch_sizes": (1, 2, 4, *range(8, LARGEST_GRAPH[engine] + 1, 8))}),
        # The same for every engine: the large GEMMs come from SGLang's tables.
        training=training_fit(large_gemm_share(large, ref.bf16_flop_per_s), ref, gpu.training_gemm),
        residuals={**residuals, **in_windows, **communication},
    )


def _block_products(data: Path, gpu: Gpu, engine: Engine, ref: Reference) -> Fitted[ProductFit] | None:
    """Products in fp8_block of vLLM, where its own table times the host: those of a release of SGLang that runs as old
    a DeepGEMM, at the rate of vLLM's rows long enough for the host not to matter, and judged by such rows of weights
    that the fit has not seen. None if either engine has no such table."""
    precision: Precision = "fp8_block"
    both = [data / "kernels/aiconfigurator" / gpu.gemm(name) for name in ENGINES[:2]]
    if engine != "vllm" or not all(precision in aiconfigurator.precisions(path) for path in both):
        return None
    table = aiconfigurator.used_sizes(all_gemms(data, gpu.gemm("sglang", gpu.deepgemm), precision))
    fit = kernel_gemm(table, ref, False, precision).fit
    kernel, rows = kernel_of(precision), aiconfigurator.used_sizes(all_gemms(data, gpu.gemm("vllm"), precision))
    predicted_s = predict(kernel, fit, ref, rows)
    host_s = float(rows.seconds[predicted_s < SHORT_PRODUCT_S].median())
    unseen = pd.MultiIndex.from_frame(table[gemm_rows(table, ref, precision).test][["n", "k"]])
    test, long = pd.MultiIndex.from_frame(rows[["n", "k"]]).isin(unseen), predicted_s > 3 * host_s
    factor = float(np.median((predicted_s / rows.seconds)[long & ~test]))
    rates = {name: share if name == "memory" else share * factor for name, share in fit.efficiency.items()}
    fit = as_written(fit.model_copy(update={"efficiency": rates}))
    points = compared(kernel, fit, ref, rows[long & test], True)
    note = (
        f"fit to SGLang {gpu.deepgemm} against vLLM's products of over {3 * host_s * 1e3:.2f} ms, three times what "
        "launching one takes; shapes (n, k) not fitted"
    )
    return Fitted(fit, {"gemm_fp8_block": residual_of(points, table[["m", "n", "k"]], note)}, points)


def _windows(data: Path, source: Source) -> dict[str, pd.DataFrame]:
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
    SGLang on Hopper OpenAI's `triton_kernels`, vLLM on Blackwell, when told to, FlashInfer's on activations turned into
    MXFP8."""
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
    asked = f"_{MXFP8_KERNEL}" if engine == "vllm" else ""
    residuals = {
        name + asked: item.model_copy(update={"note": f"{about}: {item.note}"}) for name, item in lent.residuals.items()
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
