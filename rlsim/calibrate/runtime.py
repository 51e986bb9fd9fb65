"""Layout changes, training and copies: the measured numbers that are no kernel and no step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import percent, rounded
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.parts import Fitted, Parts, point_rows, residual_of
from rlsim.cost.calibration import Calibration, Reference, RuntimeFit, TrainingFit
from rlsim.cost.strategy import TRAFFIC, efficiency_of

FRAMEWORKS = ("fsdp", "megatron")  # what experiments train with
FRAMEWORK = "torch"  # name of the training efficiency that is of one's own products
LARGE = 0.9  # products with at least this quantile of FLOPs are large


def fit_runtime(parts: Parts) -> RuntimeFit | None:
    """Costs of a layout change: medians of graph captures and of control steps, rates of the moves.

    What was not measured is the base's, if there is one; what nothing gives is missing. Steps that ran eagerly only
    have no graphs to capture, and a lone device has no layout to change.
    """
    measured, base = parts.measured, parts.base
    capture, control, steps = (measured.table(name) for name in ("graph_capture", "control", "decode_step"))
    values, said, kept = dict[str, Any](), list[str](), list[str]()

    def take(what: str, fields: Sequence[str], own: Sequence[Any] | None, words: str, otherwise: str) -> None:
        """The values of some fields as measured, in these words, or the base's."""
        lent = tuple(getattr(base.runtime, name) for name in fields) if base else None
        found = own or parts.take(what, None, lent, otherwise)
        values.update(zip(fields, found or (), strict=False))
        if own:
            said.append(f"{what}: {words}")
        elif found:
            kept.append(what)

    own: Sequence[Any] | None = None
    words = f"median of {len(capture)} measured"
    if len(capture):
        sizes = base.runtime.graph_batch_sizes if base else tuple(sorted({int(batch) for batch in capture.batch}))
        own = rounded(float(capture.seconds.median())), sizes
    elif len(steps) and set(steps["mode"]) == {"eager"}:
        own, words = (0.0, ()), "none, steps ran eagerly"
    take("graph capture", ("graph_capture_s", "graph_batch_sizes"), own, words, "graph_capture")

    # Rows whose name has `group` in it are the creation of a communication group; all others are parts of one switch.
    alone = measured.one_device and "collective" not in measured and base is None
    group = control.what.astype(str).str.contains("group").astype(bool)
    for key, rows, what in (
        ("switch_control_s", control[~group], "control of a switch"),
        ("group_create_s", control[group], "creation of a group"),
    ):
        medians = rows.groupby("what").seconds.median()
        own = (rounded(float(medians.sum())),) if len(rows) or alone else None
        words = f"measured ({', '.join(map(str, medians.index))})" if len(rows) else "none, one device was measured"
        take(what, (key,), own, words, f"control ({what})")

    for key, operator in (("reshard_bytes_per_s", "reshard"), ("migrate_bytes_per_s", "migrate")):
        rows = measured.table(operator)
        if len(rows):
            large = rows[rows.bytes >= rows.bytes.median()]  # what a switch moves; small moves are latency
            rate = float(np.median(large.bytes / large.seconds))
            labels = [f"{r.model} TP{r.from_tp} to TP{r.to_tp}, {r.bytes:.0f} bytes" for r in rows.itertuples()]
            points = point_rows(operator, labels, rows.seconds, rows.bytes / rate, False)
            residual = residual_of(points, rows[["bytes"]], "bytes / rate of the larger moves")
            parts.add(Fitted(None, {operator: residual}, points))
            take(operator, (key,), (rounded(rate),), f"median rate of the larger half of {len(rows)} moves", "")
        elif base and getattr(base.runtime, key) is not None:
            take(f"{operator} rate", (key,), None, "", "")
    if parts.missing:
        return None
    if kept and base:
        said.append(f"{', '.join(kept)}: not measured, from {base.name} ({base.runtime.source})")
    return RuntimeFit.model_validate({**values, "source": "; ".join(said)})


def training_of(gemm: pd.DataFrame, ref: Reference, base: Calibration | None) -> TrainingFit | None:
    """`FRAMEWORK` as the large products of `gemm` (m, n, k, seconds) and the traffic beside them give it, as they do in
    shipped calibrations; the others are `base`'s, or as much. None if neither is there."""
    said = f"not measured, from {base.name}: {base.training.source}" if base else ""
    if gemm.empty:
        return base.training.model_copy(update={"source": said}) if base else None
    flops = 2.0 * gemm.m * gemm.n * gemm.k
    large = flops >= flops.quantile(LARGE)
    share = min(float((flops / gemm.seconds)[large].median()) / ref.bf16_flop_per_s, 1.0)
    own = rounded(efficiency_of(share, ref.flops_per_byte))
    others = base.training.flop_efficiency if base else dict.fromkeys(FRAMEWORKS, own)
    source = (
        f"{FRAMEWORK}: the largest {int(large.sum())} products reach {percent(share)} of peak, and {TRAFFIC * 1e3:g} "
        f"bytes are moved for every thousand of their FLOPs; the others: {said or 'the same'}"
    )
    return TrainingFit(flop_efficiency={**others, FRAMEWORK: own}, source=source)


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
