"""The fitted constants of one GPU under one engine: `calibration/<gpu>-<engine>.yaml`, or another GPU's carried over.

A calibration holds few numbers, most of them fitted to measured kernels (defaults are published figures), and says
where the measurements are from and how far off the fit is on shapes it has not seen. Efficiencies are relative to the
data-sheet figures in `reference`, which travel with them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, PrivateAttr

from rlsim.base import catalogue
from rlsim.base.reading import shipped
from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema, load
from rlsim.cost.assumed import PLAIN_COSTS, AssumedCosts, Draw
from rlsim.cost.engine_memory import EngineMemory, engine_memory_of
from rlsim.cost.fits import (
    CollectiveFits,
    Correction,
    Count,
    Derived,
    Factor,
    KernelSeconds,
    OperatorFits,
    Share,
    carried_operators,
)
from rlsim.cost.strategy import efficiency_of, traffic_of
from rlsim.cost.tables import csv_of, read_calibration
from rlsim.errors import CalibrationError, CatalogueError, ConfigError, shown, unknown_name
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.precision import KvPrecision, Precision, peak_flop_per_s
from rlsim.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds

if TYPE_CHECKING:
    from rlsim.models.model import Model

FUSED: Mapping[str, Sequence[Mapping[str, Any]]] = shipped("fused.yaml")
Engine = Literal["sglang", "vllm", "trtllm", "torch"]
Range = tuple[float, float]
LongSeconds = Annotated[Seconds, Field(ge=0, le=3600)]
Rate = Annotated[BytesPerSecond, Field(ge=1e3, le=1e16)]
PeakRate = Annotated[FlopPerSecond, Field(ge=1e6, le=1e20)]


class Source(Schema):
    """One set of measurements that a calibration is fitted to."""

    project: str  # who measured
    commit: str  # version of the measured tables
    licence: str
    files: tuple[str, ...]  # tables used, by their path in that project
    engine_version: str = ""  # engine release that was measured


class Provenance(Schema):
    """Where the numbers come from."""

    date: str  # day of the fit, ISO 8601
    script: str  # script that made the file
    sources: tuple[Source, ...] = Field(min_length=1)
    notes: tuple[str, ...] = ()  # what is derived or assumed rather than measured


class Reference(Schema):
    """Data-sheet figures that the efficiencies are relative to."""

    bf16_flop_per_s: PeakRate  # peak dense bf16 rate
    fp8_flop_per_s: PeakRate | None = None  # peak dense FP8 rate, where there is one
    fp4_flop_per_s: PeakRate | None = None  # peak dense FP4 rate, where there is one
    memory_bytes_per_s: Rate  # peak device-memory bandwidth
    sm_count: Count  # streaming multiprocessors
    l2_bytes: Bytes = Field(gt=0, le=1e15)  # L2 cache
    link_bytes_per_s: Rate  # GPU-to-GPU rate one way, in the measured node

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The reference rates of a cluster's GPUs and links."""
        figures = {name: getattr(cluster.gpu, name, None) for name in cls.model_fields}
        return cls(**{**figures, "link_bytes_per_s": cluster.intra.bytes_per_s})

    @property
    def flops_per_byte(self) -> float:
        """The peak bf16 rate over the memory bandwidth."""
        return self.bf16_flop_per_s / self.memory_bytes_per_s


class HostFit(Schema):
    """The host's time per engine step, and whatever else a step takes that is in no kernel of the tables."""

    step_s: KernelSeconds  # per step
    sequence_s: KernelSeconds  # per running sequence and step
    prefill_s: KernelSeconds = 0.0  # per prefill iteration, on top of step_s
    overlapped: bool = False  # the host prepares a step while the GPU works: the longer of the two, not their sum
    # fitted behind a server, so that what is said of sequences and prefills holds its work: a rollout has neither
    behind_server: bool = False
    source: str  # what it is fitted to

    @property
    def in_rollouts(self) -> HostFit:
        """That of an engine without a server."""
        if not self.behind_server:
            return self
        said = f"offline batches, which show none; behind a server: {self.source}"
        return self.model_copy(update={"sequence_s": 0.0, "prefill_s": 0.0, "behind_server": False, "source": said})


class EagerFit(Schema):
    """The host's time to launch what an iteration runs, where no CUDA graph was captured."""

    layer_s: KernelSeconds  # per transformer layer
    collective_s: KernelSeconds  # per tensor-parallel collective
    source: str  # what it is fitted to

    def iteration_s(self, layers: float, tp: int) -> float:
        """Seconds to launch an iteration of so many layers of attention and feed-forward; under tensor parallelism with
        two collectives each."""
        return layers * (self.layer_s + 2 * self.collective_s * (tp > 1))


#: Of the host, not of the GPU: every calibration has it that says nothing else. Fitted as of commit 1d2595c8.
EAGER = EagerFit(
    layer_s=0.785e-3,
    collective_s=0.270e-3,
    source="measured PPO steps of ReaLHF on A800 (LLaMA-2 7B, heuristic and searched plans)",
)


class FrontEndFit(Schema):
    """What stands between the client of a serving benchmark and the engine; a rollout has neither.

    One thread does the server's work outside the engine. Tokens are handed on as they come; new requests wait until the
    thread has done the work that tokens leave behind (detokenizing, streaming).
    """

    delay_s: KernelSeconds = 0.0  # added to every request, however busy the server is
    prompt_token_s: KernelSeconds = 0.0  # the thread's time for each token of a prompt
    token_s: KernelSeconds = 0.0  # the thread's time for each generated token
    client_s: KernelSeconds = 0.0  # from a response's end to the client's next request
    # prefills that start before the first tokens of one are handed out
    held_prefills: int = Field(default=0, ge=0, le=1000)
    source: str = "none"  # what it is fitted to


class RuntimeFit(Schema):
    """What changing the parallel layout costs besides moving bytes."""

    graph_capture_s: LongSeconds  # capture of one batch size's CUDA graph
    graph_batch_sizes: tuple[Count, ...]  # batch sizes the engine captures
    switch_control_s: LongSeconds  # pause, free, collect, resume at each switch
    group_create_s: LongSeconds  # first use of a communication group
    # per rank, one way, while weights are resharded; none: from the collectives
    reshard_bytes_per_s: Rate | None = None
    migrate_bytes_per_s: Rate | None = None  # per rank, one way, while KV migrates; none: from the collectives
    # end and start of an engine without weights, KV and graphs; default: as published of A40 at TP8
    restart_s: LongSeconds = 28.91
    # of all weights, loaded by an engine; default: a published 7.47 s of LLaMA-3.1-8B
    reload_bytes_per_s: Rate = 2.150e9
    source: str


class TrainingFit(Schema):
    """Training efficiency, fitted elsewhere (see its source)."""

    flop_efficiency: dict[str, Share]  # framework -> share of peak bf16 FLOP/s in linear layers
    # framework -> the same of calls without gradient, where it is another one
    forward_efficiency: dict[str, Share] = Field(default={})
    attention: Share = 0.62  # of flash attention on long sequences, see `TrainEfficiency`
    # framework -> time of each call that neither tokens nor GPUs change; default: none
    call_s: dict[str, LongSeconds] = Field(default={})
    source: str


class Residual(Schema):
    """How far a fit is off on shapes it has not seen: absolute relative errors, and the shapes' ranges."""

    count: int = Field(ge=0)
    median: float = Field(ge=0)
    p90: float = Field(ge=0)
    bias: float  # median signed relative error, positive = predicted too slow
    ranges: dict[str, Range]  # smallest and largest measured value of each variable
    note: str = ""


#: Axes of a table of iterations: sequences and tokens of each that decode; tokens of an iteration that prefills, those
#: of the sequences that decode in it among them.
DECODE_AXES, PREFILL_AXES = ("batch", "context"), ("tokens",)


class EngineFit(Schema):
    """A whole engine's iterations of one model at one TP: how many times as long as this calibration says they take
    by kernels and host time.

    Without a table of iterations that prefill these take the level, too.
    """

    model: str
    model_type: str  # its family, whose other members take the level
    precision: Precision = "bf16"  # of the weights
    kv_precision: KvPrecision = "bf16"
    tp: Count
    overlapped: bool = False  # the host works beside the GPU in what the factors are on
    level: Factor  # geometric mean of the factors of iterations that only decode
    decode: Correction  # over DECODE_AXES, of iterations that only decode
    prefill: Correction | None = None  # over PREFILL_AXES, of the others
    source: str  # what it is fitted to

    def of(self, model: Model) -> bool:
        """Whether it is this model's, in these precisions."""
        own = self.model, self.precision, self.kv_precision
        return own == (model.name, model.precision, model.kv_precision)


class Known(NamedTuple):
    """What measured iterations tell of a model at a TP: their table (`fit`) if they are of both; else their mean factor
    (`level`), of the model at other TPs (`own`) or of its family.
    """

    fit: EngineFit | None = None
    level: float = 1.0
    own: bool = False


#: Kernels of one engine that stand for those of another, and the records that hold them.
LENT = {
    "experts": ("experts", "parallel_experts"),
    "latent_attention": ("latent_attention", "latent_attention_fp8"),
}


class Calibration(Schema):
    """Everything that is fitted for one GPU under one engine."""

    name: str
    gpu: str  # GPU of the catalogue that was measured
    engine: Engine
    provenance: Provenance
    reference: Reference
    operators: OperatorFits
    collectives: CollectiveFits
    host: HostFit
    eager: EagerFit = EAGER  # without CUDA graphs
    front_end: FrontEndFit = FrontEndFit()
    runtime: RuntimeFit
    training: TrainingFit
    residuals: dict[str, Residual]  # by operator, on held-out shapes
    iterations: tuple[EngineFit, ...] = ()  # of whole engines, by model and TP
    _draw: Draw = PrivateAttr(default=Draw())
    _costs: AssumedCosts = PrivateAttr(default=PLAIN_COSTS)

    @property
    def release(self) -> str:
        """The release of the engine that was measured, as `0.24.0`; empty if the sources do not say."""
        found = re.match(rf"{self.engine} (\S+?),?(?: |$)", self.provenance.sources[0].engine_version)
        return found[1] if found else ""

    @property
    def prefix_hits(self) -> Literal["scheduled", "prefilled"]:
        """When this engine lets responses share what one of them prefills: see `EngineConfig.prefix_hits`."""
        return "prefilled" if self.engine == "sglang" else "scheduled"

    @property
    def memory_rule(self) -> EngineMemory:
        """How this release of the engine sizes its KV cache."""
        return engine_memory_of(self.engine, self.release)

    def window_share(self, model_type: str) -> float | None:
        """Room in this engine's KV cache for each token of a sequence in layers with a window, over that in others.

        None: for no more tokens than the window has (vLLM's hybrid manager). SGLang keeps all tokens, but of the
        families in its `is_hybrid_swa_model` in a pool of their own, `swa_full_tokens_ratio` times as large.
        """
        if self.engine != "sglang":
            return None
        return 0.8 if model_type in ("gpt_oss", "llama4") else 1.0

    @property
    def draw(self) -> Draw:
        """The world that costs are for: not as fitted, but as far off as `Draw` says."""
        return self._draw

    @property
    def costs(self) -> AssumedCosts:
        """What the experiment says of costs that were not measured."""
        return self._costs

    @property
    def skew(self) -> float:
        """What unequal contexts add to decode attention, as a share of the padding to the longest."""
        return self.operators.decode_attention.skew if self._costs.skew is None else self._costs.skew

    def fused(self, what: str, model: Model) -> list[Mapping[str, Any]]:
        """The rows of `rlsim/data/fused.yaml` by which this engine may run that in one kernel."""
        return [row for row in FUSED[what] if row["engine"] == self.engine and model.model_type in row["families"]]

    def drawn(self, number: int, costs: AssumedCosts = PLAIN_COSTS) -> Calibration:
        """This calibration in the world of a number, with costs as they are stated; 0 is as it was fitted."""
        each = costs.host_per_sequence
        found = self.model_copy(
            update={} if each is None else {"host": self.host.in_rollouts.model_copy(update={"sequence_s": each})}
        )
        found._draw, found._costs = Draw(number), costs
        return found

    def scheduled(self, ahead: bool | None) -> Calibration:
        """The same with the host's work beside the GPU's (`ahead`) or between its iterations; None: as it is."""
        if ahead is None or ahead == self.host.overlapped:
            return self
        return self.model_copy(update={"host": self.host.model_copy(update={"overlapped": ahead})})

    def with_experts(self, backend: str | None) -> Calibration:
        """The same with mixtures of experts by the kernel of that name; None: by the engine's own choice.

        Raises `CalibrationError` if that kernel was not measured.
        """
        if backend is None:
            return self
        fits, known = self.operators, self.operators.other_experts
        refuse("experts' kernel", CalibrationError, backend=backend, calibration=self.name, known=known)
        update = {name: {**getattr(fits, name), **known[backend]} for name in ("experts", "parallel_experts")}
        return self.model_copy(update={"operators": fits.model_copy(update=update)})

    def lent(self, what: Literal["experts", "latent_attention"]) -> Calibration:
        """The same with vLLM's experts, of this GPU or else of H100, or with its latent attention on this GPU, where
        the engine's own were not measured."""
        slots = LENT[what]
        lender = None if any(getattr(self.operators, name) for name in slots) else _lender(self.gpu)
        if lender is None or (what == "latent_attention" and lender.gpu != self.gpu):
            return self
        lent = {name: getattr(lender.operators, name) for name in slots}
        return self.model_copy(update={"operators": self.operators.model_copy(update=lent)})

    def on_kv(self, precision: KvPrecision, *, latent: bool) -> Calibration:
        """The same with attention on a KV cache of that precision, which `check_precision` takes.

        `latent`: that of latent attention, whose prompts attend to keys and values in bf16 that are made of the cache.
        """
        if precision == "bf16":
            return self
        names = ("latent_attention",) if latent else ("decode_attention", "prefill_attention")
        fits = {name: getattr(self.operators, f"{name}_{precision}") for name in names}
        known = {
            name: self.residuals[f"{name}_{precision}"] for name in names if f"{name}_{precision}" in self.residuals
        }
        if not latent:  # windows were measured on bf16 alone
            fits = {
                name: fit.model_copy(update={"windows": fit.windows or getattr(self.operators, name).windows})
                for name, fit in fits.items()
            }
        update = {"operators": self.operators.model_copy(update=fits), "residuals": {**self.residuals, **known}}
        return self.model_copy(update=update)

    def check_precision(
        self, precision: Precision, kv_precision: KvPrecision = "bf16", *, latent: bool = False
    ) -> None:
        """Raises `CalibrationError` for a precision that the GPU has no tensor cores for, or that was not measured."""
        known = [one for one in self.operators.gemms if peak_flop_per_s(self.reference, one)]
        cores, fits = bool(peak_flop_per_s(self.reference, precision)), self.operators
        on_fp8 = fits.latent_attention_fp8 if latent else fits.decode_attention_fp8
        lacks_kv, own = kv_precision == "fp8" and on_fp8 is None, {"calibration": self, "known": known, "cores": cores}
        refuse("precision", CalibrationError, precision=precision, latent=latent, lacks_kv=lacks_kv, **own)

    def known(self, model: Model, tp: int | None = None) -> Known:
        """What whole iterations tell of `model` at `tp`; None: at a degree that none was measured at."""
        family = [fit for fit in self.iterations if fit.model_type == model.model_type]
        own = [fit for fit in family if fit.of(model)]
        exact = next((fit for fit in own if fit.tp == tp), None)
        levels = [fit.level for fit in own or family]
        return Known(exact, math.prod(levels) ** (1 / max(len(levels), 1)), bool(own))


def derive(source: Calibration, gpu: str, note: str, reference: Reference, reached: float | None = None) -> Calibration:
    """`source`'s efficiencies on `gpu`, whose figures are `reference`; the link stays that of the measured node.

    `reached`: what large products and long attention were measured to reach of its peak.
    """
    residuals = {
        key: value.model_copy(update={"note": f"of {source.gpu}; not measured on {gpu}. {value.note}".strip()})
        for key, value in source.residuals.items()
    }
    notes = (f"derived from {source.name}: {note}", *source.provenance.notes)
    update = {
        "operators": carried_operators(source.operators, source.reference, reference, reached),
        "name": source.name.replace(source.gpu, gpu, 1),
        "gpu": gpu,
        "reference": reference.model_copy(update={"link_bytes_per_s": source.reference.link_bytes_per_s}),
        "provenance": source.provenance.model_copy(update={"notes": notes}),
        "residuals": residuals,
        "training": _carried_training(source, gpu, reference, reached),
    }
    return source.model_copy(update=update)


def _carried_training(source: Calibration, gpu: str, reference: Reference, reached: float | None) -> TrainingFit:
    """The source's shares in linear layers, at the GPU's own ratio of peak and memory bandwidth; its products reach
    their share there, or what was measured."""
    fit, here, there = source.training, reference.flops_per_byte, source.reference.flops_per_byte

    def share(framework: str) -> float:
        traffic = traffic_of(framework)
        products = efficiency_of(fit.flop_efficiency[framework], -there, traffic)
        return round(efficiency_of(reached or products, here, traffic), 3)

    products = f"reach {reached} of its peak" if reached else "are taken to reach the same share of its peak"
    about = f"nothing of training is measured on {gpu}: large GEMMs {products}"
    return fit.model_copy(
        update={
            "flop_efficiency": {framework: share(framework) for framework in fit.flop_efficiency},
            "attention": reached or fit.attention,
            "source": f"{about}; there: {fit.source}",
        }
    )


def carried_to(calibration: Calibration, cluster: Cluster) -> Calibration:
    """The calibration, or what is derived of it, where the cluster's GPU says that it is `like` the measured one."""
    gpu = cluster.gpu
    if gpu.like is None or gpu.like != calibration.gpu:
        return calibration
    note = f"{gpu.like} efficiencies on the figures that are given of {gpu.name}; nothing is measured on it"
    return derive(calibration, gpu.name, note, Reference.of(cluster))


def derived_gpus() -> dict[str, Derived]:
    """The GPUs without tables, by name."""
    return {gpu: load(path, Derived) for gpu, path in catalogue.names("calibration/derived").items()}


def calibration_names() -> list[str]:
    """Every calibration of the catalogue, by full name."""
    return sorted([*catalogue.names("calibration"), *_derived_names()])


def _derived_names() -> dict[str, tuple[str, str]]:
    """The full names of derived calibrations: which GPU's, and the name of the one it is made of."""
    rows = derived_gpus().items()
    return {f"{gpu}-{engine}": (gpu, f"{row.source}-{engine}") for gpu, row in rows for engine in row.engines}


_NAME = re.compile(rf"(?P<gpu>.+)-(?P<engine>{'|'.join(get_args(Engine))})(?:-(?P<release>\d[\w.]*))?")


def _full(name: str) -> str:
    """The full name of a full or short one.

    `h100-sglang` is `h100-sxm-sglang` if only one GPU begins that way; `h100-sglang-0.5` is the release of the engine
    that begins so, if it is one.
    """
    known = calibration_names()
    if name.lower() in known:
        return name.lower()
    wanted = _NAME.fullmatch(name.lower())
    if wanted is None:
        raise unknown_name("calibration", name, known)
    gpu, engine, release = wanted.groups()
    same = [full for full in known if full.startswith(f"{gpu}-") and f"-{engine}" in full]
    if release is None:
        near = [full for full in same if (named := _NAME.fullmatch(full)) and named["release"] is None]
    else:
        near = [full for full in same if f"{_of_catalogue(full).release}.".startswith(f"{release}.")]
    if len(near) == 1:
        return near[0]
    if release is not None and same:
        shipped = ", ".join(f"{_of_catalogue(full).release} ({full})" for full in same)
        raise CatalogueError(f"unknown calibration {shown(name)}; releases of {engine} that ship: {shipped}")
    fitting = [one for one in catalogue.names("gpus") if f"{one}-".startswith(f"{gpu}-")]
    if fitting and not any(full.startswith(f"{gpu}-") for full in known):
        raise CatalogueError(
            f"no calibration of {fitting[0]} ships: no open table has its kernels; `rlsim calibrate` measures one on "
            "such a machine, and an experiment takes the path of its file"
        )
    raise unknown_name("calibration", name, known)


def _of_catalogue(full: str) -> Calibration:
    if path := catalogue.names("calibration").get(full):
        return _load(path)
    gpu, source = _derived_names()[full]
    row = derived_gpus()[gpu]
    return derive(_of_catalogue(source), gpu, row.note, Reference.of(load_cluster(row.cluster)), row.reached)


def _load(path: Path) -> Calibration:
    try:
        return load(path, Calibration, read_calibration, csv_of(path))
    except ConfigError as error:
        raise CalibrationError(str(error)) from None


@cache
def _lender(gpu: str) -> Calibration:
    names = [name for name in (f"{gpu}-vllm", "h100-sxm-vllm") if name in calibration_names()]
    return next(found for found in map(_of_catalogue, names) if found.operators.experts)


def load_calibration(name_or_path: str | Path) -> Calibration:
    """The calibration of that name (`h100-sxm-sglang`, or short `h100-sglang`), or of a `.yaml` path.

    Without a release of the engine it is the newest one that was measured; `h100-sglang-0.5.10` is an older one.

    Raises `CatalogueError` if no calibration has the name, `CalibrationError` with all mistakes of a damaged file.
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        return _load(Path(name_or_path))
    return _of_catalogue(_full(name_or_path))
