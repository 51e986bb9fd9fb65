"""From measurements to a calibration: everything measured is fitted, everything else is somebody's and says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from rlsim.calibrate.fit.common import percent, rounded
from rlsim.calibrate.kernels import (
    KernelFit,
    kernel_collectives,
    kernel_decode_attention,
    kernel_gemm,
    kernel_memory_bound,
    kernel_prefill_attention,
)
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.points import join
from rlsim.calibrate.runtime import copy_notes, fit_runtime, fit_training
from rlsim.calibrate.steps import NO_HOST, fit_host, fit_profiles
from rlsim.cost.calibration import (
    Calibration,
    CollectiveFits,
    Engine,
    OperatorFits,
    Provenance,
    Reference,
    Residual,
    Source,
    TrainingFit,
    calibration_names,
)
from rlsim.errors import CalibrationError, RlsimError
from rlsim.models import Model, load_model
from rlsim.schema import Schema

KERNELS = ("gemm", "decode_attention", "prefill_attention", "memory_bound")
CORRECTED = ("gemm", "decode_attention", "prefill_attention")
ASSUMED = (
    "a mixture's grouped GEMM is approximated from plain GEMMs, not measured",
    "collectives across nodes follow a hierarchical ring at an assumed 80% of the link; nothing inter-node is measured",
    "broadcast and send/receive are derived from all-gather",
)
COLD = "weights and KV are taken as cold: bandwidths are fitted on footprints beyond L2 and used for every size"


@dataclass(frozen=True)
class Built:
    """A calibration and its points: operator, label, measured_s, fitted_s, error (fitted / measured - 1), held_out."""

    calibration: Calibration
    points: pd.DataFrame

    def report_rows(self) -> list[tuple[str, int, str, str, str, str]]:
        """One row of a table for every residual: operator, rows, median, 90th percentile, bias, note."""
        return [
            (name, item.count, percent(item.median), percent(item.p90), percent(item.bias), item.note)
            for name, item in self.calibration.residuals.items()
        ]


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
) -> Built:
    """The calibration that `measured` gives, and how far it is off on rows that it has not seen.

    What was not measured is taken from `base` and noted. `cold`: the kernels' operands came from memory, as rlsim's own
    benchmarks take care of; False for tables of one kernel launched over and over, whose small rows found them in
    L2. `models` are shapes of models that the catalogue does not know, by the name in the tables; without a shape a
    whole step cannot be compared with its operators.

    Raises `CalibrationError` if a table has too few rows, if nothing is in it, or if something is neither measured nor
    in `base`; the message lists all that is missing.
    """
    if not any(operator in measured for operator in measured.tables):
        raise CalibrationError(f"{name}: nothing was measured, every table is empty")
    shape = _shapes(models or {})
    notes: list[str] = [*measured.notes, *ASSUMED, *(() if cold else (COLD,)), *copy_notes(measured, reference)]
    residuals: dict[str, Residual] = {}
    points: list[pd.DataFrame] = []
    missing: list[str] = []
    borrowed: list[str] = []
    operators: dict[str, object] = {}

    fitters: dict[str, Callable[[pd.DataFrame], KernelFit[Schema]]] = {
        "gemm": lambda table: kernel_gemm(table, reference, cold),
        "decode_attention": lambda table: kernel_decode_attention(table, reference, engine, cold),
        "prefill_attention": lambda table: kernel_prefill_attention(table, reference),
        "memory_bound": lambda table: kernel_memory_bound(table, reference),
    }
    for operator in KERNELS:
        if operator in measured:
            fitted = fitters[operator](measured.table(operator))
            operators[operator] = fitted.fit
            residuals.update(fitted.residuals)
            points.append(fitted.points)
            notes.extend(fitted.notes)
        elif base is not None:
            operators[operator] = _from_base(base, operator, gpu)
            residuals.update(_base_residuals(base, operator))
            borrowed.append(operator)
        else:
            missing.append(operator)

    collectives, found, whence = _collectives(measured, reference, gpu, base)
    if collectives is None:
        missing.append("collective")
    else:
        borrowed.extend(whence)
        if found is not None:
            residuals.update(found.residuals)
            points.append(found.points)
            notes.extend(found.notes)
        elif base is not None:
            for key in ("nccl", "custom_all_reduce"):
                residuals.update(_base_residuals(base, key))
        else:
            notes.append("one device was measured: no collectives, so no TP beyond 1")

    runtime = fit_runtime(measured, base.runtime if base else None, base.name if base else "")
    training = fit_training(measured, reference, gpu, shape, base.training if base else None)
    missing.extend(runtime.missing)
    training_fit = training.training
    if training_fit is None and base is not None:
        training_fit = _training_from(base, gpu)
        borrowed.append("training efficiency")
    elif training_fit is None:
        missing.extend(training.missing)
    has_steps = "decode_step" in measured
    if not has_steps and base is None:
        missing.append("decode_step (host time)")
    if missing:
        raise CalibrationError(_missing(name, gpu, engine, missing))
    assert collectives is not None
    assert runtime.runtime is not None
    assert training_fit is not None

    draft = Calibration(
        name=name,
        gpu=gpu,
        engine=engine,
        provenance=Provenance(date=date, script=script, sources=_sources(measured, base, [*borrowed, *runtime.notes])),
        reference=reference,
        operators=OperatorFits.model_validate(operators),
        collectives=collectives,
        host=NO_HOST,
        runtime=runtime.runtime,
        training=training_fit,
        residuals=residuals,
    )
    steps = fit_host(measured, draft, shape)
    host = steps.host
    if host is None and base is not None:
        host = base.host.model_copy(update={"source": f"not measured, from {base.name}: {base.host.source}"})
        borrowed.append("host time")
    if host is None:
        raise CalibrationError(_missing(name, gpu, engine, [_why_no_host(measured, shape)]))
    draft = draft.model_copy(update={"host": host})
    profiles = fit_profiles(measured, draft, shape)
    for part in (steps, profiles, runtime, training):
        residuals.update(part.residuals)
        points.append(part.points)
        notes.extend(part.notes)
    if borrowed and base is not None:
        notes.append(f"not measured, from {base.name}: {', '.join(borrowed)}")
    provenance = Provenance(
        date=date,
        script=script,
        sources=_sources(measured, base, [*borrowed, *runtime.notes]),
        notes=tuple(dict.fromkeys(notes)),
    )
    calibration = draft.model_copy(
        update={"provenance": provenance, "residuals": residuals, "decode_profile": profiles.profiles}
    )
    return Built(Calibration.model_validate(rounded(calibration.model_dump())), join(points))


def _shapes(models: Mapping[str, Model]) -> Callable[[str], Model | None]:
    """A model's shape by its name in the tables: one of `models`, else the catalogue's; None if neither knows it."""
    known: dict[str, Model | None] = dict(models)

    def shape(name: str) -> Model | None:
        if name not in known:
            try:
                known[name] = load_model(name)
            except RlsimError:
                known[name] = None
        return known[name]

    return shape


def _from_base(base: Calibration, operator: str, gpu: str) -> object:
    """`base`'s fit; without its correction on another GPU, which has other SMs."""
    fit = getattr(base.operators, operator)
    if base.gpu != gpu and operator in CORRECTED:
        fit = fit.model_copy(update={"correction": None})
    return fit.model_dump()


def _base_residuals(base: Calibration, operator: str) -> dict[str, Residual]:
    """`base`'s residuals of an operator, marked as not this calibration's own."""
    return {
        key: item.model_copy(update={"note": f"of {base.name}, not measured here. {item.note}".strip()})
        for key, item in base.residuals.items()
        if key == operator or key.startswith(f"{operator}_")
    }


def _collectives(
    measured: Measurements, ref: Reference, gpu: str, base: Calibration | None
) -> tuple[CollectiveFits | None, KernelFit[CollectiveFits] | None, list[str]]:
    """All collectives, those fitted here, and what is `base`'s: whatever operation and number of GPUs was not measured.

    Whole steps on single devices only need none; without them and without `base` there are no collectives at all.
    """
    if "collective" not in measured:
        if base is not None:
            return base.collectives, None, ["collectives"]
        steps = measured.table("decode_step")
        alone = len(steps) > 0 and bool((steps.tp == 1).all())
        return (CollectiveFits(nccl={}, inter_efficiency=0.8) if alone else None), None, []
    found = kernel_collectives(measured.table("collective"), ref, measured_node(gpu, ref))
    fits = found.fit
    if base is None:
        if "all_reduce" in fits.nccl:
            fits = _with_ring(fits)
        return fits, found, []
    borrowed = []
    nccl = {op: dict(curves) for op, curves in fits.nccl.items()}
    for op, curves in base.collectives.nccl.items():
        added = {gpus: curve for gpus, curve in curves.items() if gpus not in nccl.get(op, {})}
        if added:
            nccl[op] = dict(sorted({**nccl.get(op, {}), **added}.items()))
            borrowed.append(f"{op} on {', '.join(map(str, added))} GPUs")
    custom = dict(fits.custom_all_reduce)
    added = {gpus: curve for gpus, curve in base.collectives.custom_all_reduce.items() if gpus not in custom}
    if added:
        custom = dict(sorted({**custom, **added}.items()))
        borrowed.append(f"custom all-reduce on {', '.join(map(str, added))} GPUs")
    return fits.model_copy(update={"nccl": nccl, "custom_all_reduce": custom}), found, borrowed


def _with_ring(fits: CollectiveFits) -> CollectiveFits:
    """A ring all-reduce is a reduce-scatter and an all-gather of the same bytes: where only it was measured, those
    and an all-to-all take half of it."""
    halves = {
        gpus: curve.model_copy(update={"time_s": tuple(0.5 * t for t in curve.time_s)})
        for gpus, curve in fits.nccl["all_reduce"].items()
    }
    derived = {op: halves for op in ("all_gather", "reduce_scatter", "all_to_all") if op not in fits.nccl}
    return fits.model_copy(update={"nccl": {**fits.nccl, **derived}})


def _training_from(base: Calibration, gpu: str) -> TrainingFit:
    about = f"not measured, from {base.name}" + ("" if base.gpu == gpu else ", shares of another GPU's peak")
    return base.training.model_copy(update={"source": f"{about}: {base.training.source}"})


def _sources(measured: Measurements, base: Calibration | None, borrowed: list[str]) -> tuple[Source, ...]:
    """Where the numbers are from: the measurements, and `base`'s sources if anything is taken from it."""
    sources = list(measured.sources) or [
        Source(project="own measurements", commit="as measured", licence="own", files=())
    ]
    if base is not None and borrowed:
        sources.extend(base.provenance.sources)
    distinct = []
    for source in sources:
        if source not in distinct:
            distinct.append(source)
    return tuple(distinct)


def _why_no_host(measured: Measurements, shape: Callable[[str], Model | None]) -> str:
    unknown = sorted({str(model) for model in measured.table("decode_step").model if shape(str(model)) is None})
    if unknown:
        return f"host time (the shape of {', '.join(unknown)} is not known, so its steps have no operators' sum)"
    return f"host time (fewer than 4 decode steps: {len(measured.table('decode_step'))})"


def _missing(name: str, gpu: str, engine: str, missing: list[str]) -> str:
    """What nothing gives, and the nearest calibration that could."""
    known = calibration_names()
    same = [one for one in known if one.startswith(f"{gpu}-")] or [one for one in known if one.endswith(f"-{engine}")]
    near = f"{gpu}-{engine}" if f"{gpu}-{engine}" in known else next(iter(same), next(iter(known), "NAME"))
    return f"{name}: not measured: {', '.join(missing)}; measure it, or take it from another calibration: --base {near}"
