"""Layout changes, training and copies: the measured numbers that are no kernel and no step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from rlsim.calibrate.fit.common import percent, rounded
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.points import join, point_rows, residual_of
from rlsim.cost.calibration import CollectiveFits, Reference, Residual, RuntimeFit, TrainingFit
from rlsim.cost.collectives import Collectives
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost, TrainEfficiency
from rlsim.models import Model

FRAMEWORKS = ("fsdp", "megatron")  # what experiments train with
FRAMEWORK = "torch"  # name of the training efficiency that is measured here


@dataclass(frozen=True)
class Rates:
    """A fit besides kernels and steps, with its points, residuals and notes."""

    runtime: RuntimeFit | None = None
    training: TrainingFit | None = None
    missing: tuple[str, ...] = ()
    points: pd.DataFrame = field(default_factory=lambda: join([]))
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def fit_runtime(measured: Measurements, base: RuntimeFit | None, base_name: str) -> Rates:
    """Costs of a layout change: medians of graph captures and of control steps, rates of the moves.

    Rows of `control` whose name has `group` in it are the creation of a communication group; all others are parts of
    one switch and add up. What was not measured is `base`'s, if there is one; `missing` names what nothing gives.
    Steps that ran eagerly only have no graphs to capture, and a lone device has no layout to change.
    """
    capture, control = measured.table("graph_capture"), measured.table("control")
    steps = measured.table("decode_step")
    modes = set(steps["mode"]) if len(steps) else set()
    alone = len(steps) > 0 and bool((steps.tp == 1).all()) and "collective" not in measured
    values: dict[str, object] = {}
    said, kept, missing = [], [], []
    if len(capture):
        values["graph_capture_s"] = rounded(float(capture.seconds.median()))
        captured = tuple(sorted({int(batch) for batch in capture.batch}))
        values["graph_batch_sizes"] = base.graph_batch_sizes if base else captured
        said.append(f"graph capture: median of {len(capture)} measured")
    elif modes == {"eager"}:
        values["graph_capture_s"], values["graph_batch_sizes"] = 0.0, ()
        said.append("graph capture: none, steps ran eagerly")
    elif base:
        values["graph_capture_s"], values["graph_batch_sizes"] = base.graph_capture_s, base.graph_batch_sizes
        kept.append("graph capture")
    else:
        missing.append("graph_capture")
    group = control.what.astype(str).str.contains("group") if len(control) else pd.Series(dtype=bool)
    for key, rows, what in (
        ("switch_control_s", control[~group] if len(control) else control, "control of a switch"),
        ("group_create_s", control[group] if len(control) else control, "creation of a group"),
    ):
        if len(rows):
            parts = rows.groupby("what").seconds.median()
            values[key] = rounded(float(parts.sum()))
            said.append(f"{what}: measured ({', '.join(map(str, parts.index))})")
        elif base:
            values[key] = getattr(base, key)
            kept.append(what)
        elif alone:
            values[key] = 0.0
            said.append(f"{what}: none, one device was measured")
        else:
            missing.append(f"control ({what})")
    points, residuals = [], {}
    for key, operator in (("reshard_bytes_per_s", "reshard"), ("migrate_bytes_per_s", "migrate")):
        rows = measured.table(operator)
        if len(rows):
            large = rows[rows.bytes >= rows.bytes.median()]  # what a switch moves; small moves are latency
            rate = float(np.median(large.bytes / large.seconds))
            values[key] = rounded(rate)
            labels = [f"{r.model} TP{r.from_tp} to TP{r.to_tp}, {r.bytes:.0f} bytes" for r in rows.itertuples()]
            part = point_rows(operator, labels, rows.seconds, rows.bytes / rate, np.zeros(len(rows), dtype=bool))
            points.append(part)
            residuals[operator] = residual_of(
                part, {"bytes": rows.bytes.to_numpy(float)}, "bytes / rate of the larger moves"
            )
            said.append(f"{operator}: median rate of the larger half of {len(rows)} moves")
        elif base and getattr(base, key) is not None:
            values[key] = getattr(base, key)
            kept.append(f"{operator} rate")
    if missing:
        return Rates(missing=tuple(missing))
    if kept and base:
        said.append(f"{', '.join(kept)}: not measured, from {base_name} ({base.source})")
    runtime = RuntimeFit.model_validate({**values, "source": "; ".join(said)})
    notes = (f"not measured, from {base_name}: {', '.join(kept)}",) if kept else ()
    return Rates(runtime=runtime, points=join(points), residuals=residuals, notes=notes)


def fit_training(
    measured: Measurements, ref: Reference, gpu: str, shape: Callable[[str], Model | None], base: TrainingFit | None
) -> Rates:
    """The share of peak at which `TrainCost`'s layer takes as long as the measured ones; every third size held out.

    It joins `base`'s frameworks as `torch`: a lone layer has no gaps, gathers or data loading, so it is a bound for
    a framework, not a replacement.
    """
    table = measured.table("train_block")
    known = table[[shape(str(model)) is not None for model in table.model]] if len(table) else table
    if known.empty:
        return Rates(missing=("train_block",))
    test = np.arange(len(known)) % 3 == 2 if len(known) >= 6 else np.zeros(len(known), dtype=bool)
    node = measured_node(gpu, ref)
    none = Collectives(CollectiveFits(nccl={}, inter_efficiency=1.0), ref, node)
    rows = known.to_dict("records")
    y = known.seconds.to_numpy(float)

    def layer_s(row: Mapping[Hashable, Any], efficiency: float) -> float:
        """Two layers less one: embedding and head drop out."""
        model = shape(str(row["model"]))
        assert model is not None
        tokens, length = int(row["tokens"]), int(row["length"])
        lengths = [length] * max(1, tokens // length)
        strategy = TrainStrategy(recompute="none", micro_batch_tokens=max(tokens, length))
        times = []
        for layers in (1, 2):
            deep = model.model_copy(update={"num_hidden_layers": layers})
            cost = TrainCost(deep, node, none, strategy, TrainEfficiency(flop=efficiency))
            both = row["direction"] == "forward_backward"
            times.append((cost.train_s(lengths) if both else cost.forward_s(lengths)).compute_s)
        return times[1] - times[0]

    def loss(efficiency: float) -> float:
        error = [
            np.log(layer_s(row, efficiency) / s) for row, s, unseen in zip(rows, y, test, strict=True) if not unseen
        ]
        return float(np.sum(np.sqrt(1.0 + (np.array(error) / 0.1) ** 2) - 1.0))

    best = float(minimize_scalar(lambda x: loss(float(np.exp(x))), bounds=(np.log(1e-4), 0.0), method="bounded").x)
    efficiency = rounded(float(np.exp(best)))
    labels = [
        f"{row['model']} {row['direction']}, {row['tokens']} tokens in sequences of {row['length']}" for row in rows
    ]
    points = point_rows("train_block", labels, y, [layer_s(row, efficiency) for row in rows], test)
    residual = residual_of(points, {"tokens": known.tokens.to_numpy(float)}, "layer blocks, one efficiency for all")
    source = f"{FRAMEWORK}: {len(rows)} measured passes of single layers"
    if base is None:
        frameworks = dict.fromkeys((FRAMEWORK, *FRAMEWORKS), efficiency)
        source += f"; {' and '.join(FRAMEWORKS)}: not measured, taken to reach what plain layers do"
    else:
        frameworks = {**base.flop_efficiency, FRAMEWORK: efficiency}
        source += f"; the others: not measured, {base.source}"
    return Rates(
        training=TrainingFit(flop_efficiency=frameworks, source=source),
        points=points,
        residuals={"train_block": residual},
        notes=_optimizer_note(measured.table("optimizer"), ref),
    )


def _optimizer_note(table: pd.DataFrame, ref: Reference) -> tuple[str, ...]:
    """What the optimizer was measured at; the simulator takes it as memory-bound."""
    if table.empty:
        return ()
    per_parameter = float((table.seconds / table.parameters).median())
    bound = float(ref.memory_bytes_per_s * per_parameter)
    return (
        f"optimizer: measured {per_parameter * 1e9:.3g} s for 1e9 parameters = {bound:.0f} bytes each at peak rate",
    )


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
