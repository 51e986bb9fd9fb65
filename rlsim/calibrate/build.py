"""From measurements to a calibration: everything measured is fitted, everything else is somebody's and says so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import pandas as pd

from rlsim.calibrate.fit.attention import attention_kernels
from rlsim.calibrate.fit.collectives import kernel_collectives
from rlsim.calibrate.fit.common import as_written, percent, rounded
from rlsim.calibrate.fit.experts import Experts, kernel_exchange, kernel_experts, other_experts
from rlsim.calibrate.fit.gemm import kernel_gemm, quantised_products
from rlsim.calibrate.fit.kernel import kernel_memory_bound
from rlsim.calibrate.measurements import Fitted, Measurements, Parts, join, measured_node
from rlsim.calibrate.steps import NO_HOST, fit_host, fit_tables
from rlsim.cost.calibration import (
    Calibration,
    Engine,
    Provenance,
    Reference,
    RuntimeFit,
    TrainingFit,
)
from rlsim.cost.fits import CollectiveFit, CollectiveFits, OperatorFits, carried_operators
from rlsim.cost.operators import gemm_of
from rlsim.cost.strategy import efficiency_of, traffic_of
from rlsim.errors import RlsimError
from rlsim.models.model import Model, load_model

COLD = "weights and KV are taken as cold: bandwidths are fitted on footprints beyond L2 and used for every size"
MIXTURE = "mixtures of experts were not measured and reach the efficiencies of vLLM's on this GPU, or else on H100"
INTER = "collectives across nodes follow NCCL's latencies and published measurements on other clusters"
NEEDED = ("gemm", "decode_attention", "prefill_attention", "memory_bound")  # operators of every calibration
PAIR = "broadcast and send/receive are derived from all-gather"


def build_calibration(
    measured: Measurements,
    *,
    name: str,
    gpu: str,
    engine: Engine,
    reference: Reference,
    base: Calibration | None = None,
    date: str,
    script: str,
    cold: bool = True,
    models: Mapping[str, Model] | None = None,
) -> Fitted[Calibration]:
    """The calibration that `measured` gives, and how far it is off on rows that it has not seen.

    What was not measured is taken from `base` and noted. `cold`: the kernels' operands came from memory, as rlsim's own
    benchmarks take care of; False for tables of one kernel launched over and over, whose small rows found them in
    L2. `models` are shapes of models that the catalogue does not know, by the name in the tables; without a shape a
    whole step cannot be compared with its operators.

    Raises `CalibrationError` if tables have too few rows or none, or listing all that neither they nor `base` give.
    """

    @cache
    def shape(model: str) -> Model | None:
        with suppress(RlsimError):
            return (models or {}).get(model) or load_model(model)
        return None

    notes = [*measured.notes, INTER, PAIR, *(() if cold else (COLD,)), *copy_notes(measured, reference)]
    parts = Parts(measured, name, gpu, engine, reference, base, notes)
    fits = {
        "operators": _operators(parts, cold),
        "collectives": _collectives(parts),
        "runtime": _runtime(parts),
        "training": training_of(measured.table("gemm"), reference, base),
    }
    if base is not None:
        parts.borrowed.append("training efficiency")
    if "decode_step" not in measured and base is None:
        parts.missing.append("decode_step (host time)")
    parts.check()
    provenance = Provenance(date=date, script=script, sources=parts.sources())
    about = {"name": name, "gpu": gpu, "engine": engine, "provenance": provenance, "reference": reference}
    draft = Calibration.model_validate({**about, **fits, "host": NO_HOST, "residuals": parts.residuals})
    steps = measured.table("decode_step")
    unknown = sorted({str(model) for model in steps.model if shape(str(model)) is None})
    why_not = f"host time (fewer than 4 decode steps: {len(steps)})"
    if unknown:
        why_not = f"host time (the shape of {', '.join(unknown)} is not known, so its steps have no operators' sum)"
    said = f"not measured, from {base.name}: {base.host.source}" if base else ""
    lent_host = base.host.model_copy(update={"source": said}) if base else None
    host = parts.take("host time", fit_host(measured, draft, shape), lent_host, why_not)
    parts.check()
    draft = draft.model_copy(update={"host": host})
    tables = parts.add(fit_tables(measured, draft, shape))
    if parts.borrowed and base is not None:
        parts.notes.append(f"not measured, from {base.name}: {', '.join(parts.borrowed)}")
    whence = {"sources": parts.sources(), "notes": tuple(dict.fromkeys(parts.notes))}
    provenance = provenance.model_copy(update=whence)
    update = {"provenance": provenance, "residuals": parts.residuals, "iterations": tables}
    return Fitted(as_written(draft.model_copy(update=update)), parts.residuals, join(parts.points))


def _operators(parts: Parts, cold: bool) -> OperatorFits | None:
    """The kernels' fits, None if any is missing."""
    measured, reference = parts.measured, parts.reference
    fits: dict[str, Fitted[Any]] = dict(attention_kernels(measured, reference, parts.engine, cold))
    if "gemm" in measured:
        fits["gemm"] = kernel_gemm(measured.table("gemm"), reference, cold)
    if "memory_bound" in measured:
        fits["memory_bound"] = kernel_memory_bound(measured.table("memory_bound"), reference)
    base, found = parts.base, dict[str, Any]()
    carried = carried_operators(base.operators, base.reference, reference) if base else None
    for operator in (*NEEDED, "decode_attention_fp8", "prefill_attention_fp8"):
        missing = operator if operator in NEEDED else ""
        found[operator] = parts.take(operator, fits.get(operator), getattr(carried, operator, None), missing)
    if base is not None and base.gpu == parts.gpu:
        for operator in ("latent_attention", "latent_attention_fp8"):
            found[operator] = parts.take(operator, None, getattr(base.operators, operator))
        for operator in ("decode_attention", "prefill_attention"):
            if operator in fits and (windows := getattr(base.operators, operator).windows):
                own = found[operator].model_copy(update={"windows": windows})
                found[operator] = parts.take(f"{operator}_windows", None, own)
    found["experts"], found["parallel_experts"] = _experts(parts)
    if "other_experts" in measured:
        found["other_experts"] = parts.add(other_experts(measured.table("other_experts"), reference))
    elif base is not None and base.gpu == parts.gpu:
        found["other_experts"] = base.operators.other_experts
    quantised = [parts.add(part) for part in quantised_products(measured, reference, cold)]
    for fit in carried.quantised_gemm if carried else ():
        if (name := gemm_of(fit.precision)) not in measured:
            parts.take(name, None, fit)
            quantised.append(fit)
    found["quantised_gemm"] = tuple(quantised)
    return None if parts.missing else OperatorFits.model_validate(found)


def _experts(parts: Parts) -> Experts:
    """Mixtures of experts as measured, or the base's for this GPU; without either a note says what stands for them."""
    base, own, lent = parts.base, None, None
    if "experts" in parts.measured:
        own = kernel_experts(parts.measured.table("experts"), parts.reference)
    elif base is not None and base.gpu == parts.gpu and base.operators.experts:
        lent = base.operators.experts, base.operators.parallel_experts
    found = parts.take("mixtures of experts", own, lent, "", "experts")
    if found is None:
        parts.notes.append(MIXTURE)
    return found or ({}, {})


def _collectives(parts: Parts) -> CollectiveFits | None:
    """All collectives; whatever operation and number of GPUs was not measured is the base's.

    Whole steps on single devices only need none; without them and without a base there are no collectives at all.
    """
    measured, base = parts.measured, parts.base
    if "collective" not in measured:
        if base is None and "decode_step" in measured and (measured.table("decode_step").tp == 1).all():
            parts.notes.append("one device was measured: no collectives, so no TP beyond 1")
            return CollectiveFits(nccl={})
        lent = base.collectives if base else None
        return parts.take("collectives", None, lent, "collective", "nccl", "custom_all_reduce")
    node = measured_node(parts.gpu, parts.reference)
    fits = parts.add(kernel_collectives(measured.table("collective"), parts.reference, node))
    if "exchange" in measured:
        fits = fits.model_copy(update={"deepep": parts.add(kernel_exchange(measured.table("exchange")))})
    if base is None:
        return with_ring(fits) if "all_reduce" in fits.nccl else fits
    nccl = dict(fits.nccl)
    for op, curves in base.collectives.nccl.items():
        if curves:
            nccl[op] = _with_others(parts, op, nccl.get(op, {}), curves)
    custom = _with_others(parts, "custom all-reduce", fits.custom_all_reduce, base.collectives.custom_all_reduce)
    deepep = {**base.collectives.deepep, **fits.deepep}
    return fits.model_copy(update={"nccl": nccl, "custom_all_reduce": custom, "deepep": deepep})


def _with_others(
    parts: Parts, what: str, own: dict[int, CollectiveFit], others: dict[int, CollectiveFit]
) -> dict[int, CollectiveFit]:
    """`own` curves by number of GPUs, and those of `others` for numbers that were not measured."""
    added = {gpus: curve for gpus, curve in others.items() if gpus not in own}
    if not added:
        return own
    parts.borrowed.append(f"{what} on {', '.join(map(str, added))} GPUs")
    return dict(sorted({**own, **added}.items()))


def with_ring(fits: CollectiveFits) -> CollectiveFits:
    """A ring all-reduce is a reduce-scatter and an all-gather of the same bytes: where only it was measured, those
    and an all-to-all take half of it."""
    halves = {
        gpus: curve.model_copy(update={"time_s": tuple(0.5 * t for t in curve.time_s)})
        for gpus, curve in fits.nccl["all_reduce"].items()
    }
    derived = {op: halves for op in ("all_gather", "reduce_scatter", "all_to_all") if op not in fits.nccl}
    return fits.model_copy(update={"nccl": {**fits.nccl, **derived}})


# Layout changes, training and copies ----------------------------------------------------------------------------------

FRAMEWORKS = ("fsdp", "megatron")  # what experiments train with
FRAMEWORK = "torch"  # name of the training efficiency that is of one's own products
LARGE = 0.9  # products with at least this quantile of FLOPs are large
#: What a change of the layout costs beside moving bytes, where no other calibration tells it.
PUBLISHED = RuntimeFit(
    graph_capture_s=3.59 / 23,
    graph_batch_sizes=(1, 2, 4, *range(8, 257, 8)),
    switch_control_s=5.52 - 1.03 - 2.36 - 0.73,
    group_create_s=1.0,
    source="PAT's figures on 8xA40 (naive recapture 3.59 s for SGLang's 23 default batch sizes; control = 5.52 s total "
    "less weights, KV and recapture), host-bound work and therefore reused for every GPU; group creation is an "
    "assumption, not measured; graph batch sizes are the engine's defaults",
)


def _runtime(parts: Parts) -> RuntimeFit:
    """The base's, or as published; what ran eagerly has no graphs."""
    if parts.base is not None:
        parts.borrowed.append("layout changes")
    found, steps = parts.base.runtime if parts.base else PUBLISHED, parts.measured.table("decode_step")
    eager = len(steps) and set(steps["mode"]) == {"eager"}
    return found.model_copy(update={"graph_capture_s": 0.0, "graph_batch_sizes": ()}) if eager else found


def training_of(gemm: pd.DataFrame, ref: Reference, base: Calibration | None) -> TrainingFit | None:
    """`FRAMEWORK` as the large products of `gemm` (m, n, k, seconds) and the traffic beside them give it, as they do in
    shipped calibrations; the others are `base`'s, or as much. None if neither is there."""
    said = f"not measured, from {base.name}: {base.training.source}" if base else ""
    if gemm.empty:
        return base.training.model_copy(update={"source": said}) if base else None
    flops = 2.0 * gemm.m * gemm.n * gemm.k
    large = flops >= flops.quantile(LARGE)
    share = min(float((flops / gemm.seconds)[large].median()) / ref.bf16_flop_per_s, 1.0)
    made = {name: rounded(efficiency_of(share, ref.flops_per_byte, traffic_of(name))) for name in FRAMEWORKS}
    others = base.training.flop_efficiency if base else made
    source = (
        f"{FRAMEWORK}: the largest {int(large.sum())} products reach {percent(share)} of peak, and "
        f"{traffic_of(FRAMEWORK) * 1e3:g} bytes are moved for every thousand of their FLOPs; the others: "
        f"{said or 'the same way'}"
    )
    found = {"flop_efficiency": {**others, FRAMEWORK: made["fsdp"]}, "source": source}
    return base.training.model_copy(update=found) if base else TrainingFit(**found)


def copy_notes(measured: Measurements, ref: Reference) -> tuple[str, ...]:
    """Measured bandwidths beside the data sheet's: the rate of the largest copies of each kind."""
    notes = []
    for kind, rows in measured.table("copy").groupby("kind"):
        largest = rows[rows.bytes == rows.bytes.max()]
        moved = 2.0 if kind == "device" else 1.0  # a copy inside the device reads and writes
        rate = moved * float((largest.bytes / largest.seconds).median())
        share = f" ({percent(rate / ref.memory_bytes_per_s)} of the reference)" if kind == "device" else ""
        notes.append(f"measured {str(kind).replace('_', ' ')} copy: {rate / 1e9:.4g} GB/s{share}")
    return tuple(notes)
