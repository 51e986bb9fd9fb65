"""What every source of measurements delivers: one table per operator, in SI units.

A microbenchmark run, an imported set of tables and a journal read back are all `Measurements`; the fits know no other
form. Times are medians of one launch (or one whole step) in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from rlsim.base.refusals import refuse
from rlsim.cost.calibration import Calibration, Engine, Reference, Residual, Source, calibration_names
from rlsim.cost.operators import gemm_of
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster, Gpu, Link, node_types
from rlsim.models.precision import PRECISIONS

#: Attention: mean and longest context of a decode step; new and cached tokens of a sequence that is prefilled.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "decode_attention": ("batch", "context", "longest", "q_heads", "kv_heads", "head_dim"),
    "prefill_attention": ("batch", "new", "prior", "q_heads", "kv_heads", "head_dim"),
}

EXPERTS = (
    *("precision", "kernel", "model", "routing", "tokens", "hidden", "width", "active", "experts", "ep", "tuned"),
    *("rows", "hit", *(f"blocks_{size}" for size in (8, 16, 32, 64, 128))),
)

#: Operators and the columns that identify a point. Every table has `seconds` besides, and may have `spread`: half the
#: interquartile range of the repeats over their median.
KEYS: Mapping[str, tuple[str, ...]] = {
    "copy": ("kind", "bytes"),  # device, host_to_device or device_to_host; bytes copied (read once, written once)
    "gemm": ("m", "n", "k"),  # tokens x (n, k) weight, after tensor-parallel sharding
    **{gemm_of(precision): ("m", "n", "k") for precision in PRECISIONS[1:]},  # the same, with activations quantised
    **ATTENTION,
    "decode_attention_fp8": ATTENTION["decode_attention"],  # on an FP8 KV cache
    "prefill_attention_fp8": ATTENTION["prefill_attention"],
    # a fused mixture on one GPU: tokens of all GPUs, width and experts of this one; the work as in `ExpertLoad`
    "experts": EXPERTS,
    "other_experts": EXPERTS,  # by kernels that the engine takes when it is told to
    "memory_bound": ("kernels", "tokens", "bytes"),  # launches in the row, bytes moved by all of them
    "collective": ("op", "gpus", "bytes"),  # full tensor; the engine's own all-reduce is `custom_all_reduce`
    "exchange": ("kind", "gpus", "tokens", "active", "hidden"),  # DeepEP's dispatch and combine; tokens of one GPU
    "decode_step": ("model", "tp", "mode", "batch", "context_tokens"),  # whole step; sum of contexts; graph or eager
    "prefill_step": ("model", "tp", "tokens", "length"),  # whole prefill: new tokens in all, tokens per sequence
}


@dataclass(frozen=True)
class Measurements:
    """Measured times by operator, and where they are from. Raises `CalibrationError` for tables of another form."""

    tables: Mapping[str, pd.DataFrame]
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for operator, table in self.tables.items():
            columns = (*KEYS.get(operator, ()), "seconds")
            refuse("measured table", CalibrationError, operator=operator, table=table, columns=columns, known=KEYS)

    def table(self, operator: str) -> pd.DataFrame:
        """The table of `operator`, empty if nothing of it was measured."""
        found = self.tables.get(operator)
        return pd.DataFrame(columns=[*KEYS[operator], "seconds"]) if found is None else found

    def __contains__(self, operator: str) -> bool:
        return len(self.table(operator)) > 0

    @staticmethod
    def merge(parts: Iterable[Measurements]) -> Measurements:
        """All rows of all parts; points measured more than once have the median of their times."""
        parts = list(parts)
        tables = {}
        for operator in KEYS:
            found = [part.tables[operator] for part in parts if operator in part]
            if found:
                rows = pd.concat(found, ignore_index=True)
                tables[operator] = rows.groupby(list(KEYS[operator]), as_index=False).median(numeric_only=True)
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        return Measurements(tables, tuple(source for part in parts for source in part.sources), notes)


# The node -------------------------------------------------------------------------------------------------------------

GPUS = 64  # in the node: more than any that is measured


def node_of(gpu: str) -> Cluster:
    """A node of the catalogue with such GPUs; raises `CalibrationError` if there is none."""
    for node in node_types().values():
        if node.gpu.name == gpu:
            return node
    raise CalibrationError(f"the catalogue has no node of {gpu}; spell its cluster out")


def measured_node(gpu: str, ref: Reference) -> Cluster:
    """A node of GPUs with the figures of `ref`. Memory size and latencies do not enter the time of a step."""
    return Cluster(
        name="measured",
        gpu=Gpu(
            name=gpu,
            title=gpu,
            memory_bytes=1e12,
            memory_bytes_per_s=ref.memory_bytes_per_s,
            bf16_flop_per_s=ref.bf16_flop_per_s,
            l2_bytes=ref.l2_bytes,
            sm_count=ref.sm_count,
            source="the calibration's reference",
        ),
        nodes=1,
        gpus_per_node=GPUS,
        intra=Link(name="measured", bytes_per_s=ref.link_bytes_per_s, latency_s=0.0),
        host=Link(name="measured", bytes_per_s=ref.link_bytes_per_s, latency_s=0.0),
    )


# Points ---------------------------------------------------------------------------------------------------------------

#: `error` = fitted / measured - 1; `held_out`: the fit has not seen the point.
COLUMNS = ("operator", "label", "measured_s", "fitted_s", "error", "held_out")
#: Values by variable, a table's columns among them: what was measured over which range.
Ranges = pd.DataFrame | Mapping[str, ArrayLike]
T_co = TypeVar("T_co", covariant=True)


def point_rows(
    operator: str,
    labels: Sequence[str],
    measured_s: Iterable[float],
    fitted_s: Iterable[float],
    held_out: NDArray[Any] | Sequence[bool] | bool,
) -> pd.DataFrame:
    """The points of one operator as a table with `COLUMNS`, one row for each label."""
    frame = pd.DataFrame(
        {
            "operator": [operator] * len(labels),
            "label": list(labels),
            "measured_s": np.fromiter(measured_s, float, len(labels)),
            "fitted_s": np.fromiter(fitted_s, float, len(labels)),
            "held_out": np.broadcast_to(np.asarray(held_out, dtype=bool), len(labels)),
        }
    )
    frame["error"] = frame.fitted_s / frame.measured_s - 1.0
    return frame[list(COLUMNS)]


def join(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """All points in one table; an empty one with the same columns if there are none."""
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else point_rows("", [], [], [], [])


def error_sizes(errors: NDArray[np.float64]) -> dict[str, float]:
    """Mean, median and 90th percentile of the size of relative errors, and their median (`bias`)."""
    size = np.abs(errors)
    found = {"mean": size.mean(), "median": np.median(size), "p90": np.quantile(size, 0.9), "bias": np.median(errors)}
    return {name: float(value) for name, value in found.items()}


def residual(predicted: Iterable[float], measured: Iterable[float], ranges: Ranges, note: str = "") -> Residual:
    """Error statistics of a prediction and the ranges it was measured over."""
    errors = np.fromiter(predicted, float) / np.fromiter(measured, float) - 1.0
    sizes = error_sizes(errors)
    return Residual(
        count=len(errors),
        median=sizes["median"],
        p90=sizes["p90"],
        bias=sizes["bias"],
        ranges={str(name): (float(np.min(values)), float(np.max(values))) for name, values in ranges.items()},
        note=note,
    )


def residual_of(points: pd.DataFrame, ranges: Ranges, note: str) -> Residual:
    """The residual of the held-out points; of all of them, and the note says so, if none is held out."""
    unseen = points[points.held_out]
    if unseen.empty:
        unseen, note = points, f"in sample: {note}"
    return residual(unseen.fitted_s, unseen.measured_s, ranges, note)


@dataclass(frozen=True)
class Fitted(Generic[T_co]):
    """What is fitted to some tables, its residuals by name, its points, and notes on what was not measured."""

    fit: T_co
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    points: pd.DataFrame = field(default_factory=lambda: join([]))
    notes: tuple[str, ...] = ()


# A calibration in the making ------------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass
class Parts:
    """What has been fitted so far, what is the base's, and what nothing gives."""

    measured: Measurements
    name: str
    gpu: str
    engine: Engine
    reference: Reference
    base: Calibration | None
    notes: list[str]
    residuals: dict[str, Residual] = field(default_factory=dict)
    points: list[pd.DataFrame] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not any(operator in self.measured for operator in self.measured.tables):
            raise CalibrationError(f"{self.name}: nothing was measured, every table is empty")

    def add(self, part: Fitted[T]) -> T:
        self.residuals.update(part.residuals)
        self.points.append(part.points)
        self.notes.extend(part.notes)
        return part.fit

    def take(
        self, what: str, own: Fitted[T | None] | None, lent: T | None, otherwise: str = "", *operators: str
    ) -> T | None:
        """What was fitted; else what the base lends, noted as `what` with the residuals of these operators (by default
        of that name). Without either there is none, and `otherwise` is missing."""
        if own is not None and (fit := self.add(own)) is not None:
            return fit
        if lent is not None and self.base is not None:
            self.borrowed.append(what)
            self.residuals |= {
                key: item.model_copy(update={"note": f"of {self.base.name}, not measured here. {item.note}".strip()})
                for operator in operators or (what,)
                for key, item in self.base.residuals.items()
                if key == operator or key.startswith(f"{operator}_")
            }
        elif otherwise:
            self.missing.append(otherwise)
        return lent

    def check(self) -> None:
        """Raises `CalibrationError` if anything is missing, with the nearest calibration that could give it."""
        if not self.missing:
            return
        known = calibration_names()
        same = [one for one in known if one.startswith(f"{self.gpu}-")]
        same = same or [one for one in known if one.endswith(f"-{self.engine}")]
        own = f"{self.gpu}-{self.engine}"
        near = own if own in known else next(iter(same), next(iter(known), "NAME"))
        raise CalibrationError(
            f"{self.name}: not measured: {', '.join(self.missing)}; measure it, or take it from another calibration: "
            f"--base {near}"
        )

    def sources(self) -> tuple[Source, ...]:
        """Where the numbers are from: the measurements, and the base's sources if anything is taken from it."""
        own = Source(project="own measurements", commit="as measured", licence="own", files=())
        sources = self.measured.sources or (own,)
        borrowed = self.base.provenance.sources if self.base is not None and self.borrowed else ()
        return tuple(dict.fromkeys((*sources, *borrowed)))
