"""Layout changes, training and copies: the measured numbers that are no kernel and no step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from rlsim.calibrate.fit.common import percent, rounded, soft_l1
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.parts import Parts
from rlsim.calibrate.points import Fitted, point_rows, residual_of
from rlsim.cost.calibration import Reference, RuntimeFit, TrainingFit
from rlsim.cost.collectives import Collectives
from rlsim.cost.fits import CollectiveFits
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.train_efficiency import TrainEfficiency
from rlsim.models.model import Model

FRAMEWORKS = ("fsdp", "megatron")  # what experiments train with
FRAMEWORK = "torch"  # name of the training efficiency that is measured here


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


# Training -------------------------------------------------------------------------------------------------------------


def fit_training(
    measured: Measurements, ref: Reference, gpu: str, shape: Callable[[str], Model | None], base: TrainingFit | None
) -> Fitted[TrainingFit | None]:
    """The share of peak at which `TrainCost`'s layer takes as long as the measured ones; every third size held out.

    It joins `base`'s frameworks as `torch`: a lone layer has no gaps, gathers or data loading, so it is a bound for
    a framework, not a replacement.
    """
    table = measured.table("train_block")
    known = table[[shape(str(model)) is not None for model in table.model]] if len(table) else table
    if known.empty:
        return Fitted(None)
    test = np.arange(len(known)) % 3 == 2 if len(known) >= 6 else np.zeros(len(known), dtype=bool)
    rows = known.to_dict("records")
    measured_s = known.seconds.to_numpy(float)

    def seconds(row: Mapping[Hashable, Any], efficiency: float) -> float:
        model = shape(str(row["model"]))
        assert model is not None
        return _layer_s(model, row, ref, gpu, efficiency)

    def loss(logarithm: float) -> float:
        efficiency = float(np.exp(logarithm))
        fitted = zip(rows, measured_s, test, strict=True)
        return float(
            np.sum(soft_l1(np.array([np.log(seconds(r, efficiency) / s) for r, s, unseen in fitted if not unseen])))
        )

    best = float(minimize_scalar(loss, bounds=(np.log(1e-4), 0.0), method="bounded").x)
    efficiency = rounded(float(np.exp(best)))
    labels = [f"{r['model']} {r['direction']}, {r['tokens']} tokens in sequences of {r['length']}" for r in rows]
    points = point_rows("train_block", labels, measured_s, [seconds(row, efficiency) for row in rows], test)
    residual = residual_of(points, known[["tokens"]], "layer blocks, one efficiency for all")
    others = base.flop_efficiency if base else dict.fromkeys(FRAMEWORKS, efficiency)
    said = base.source if base else "taken to reach what plain layers do"
    training = TrainingFit(
        flop_efficiency={**others, FRAMEWORK: efficiency},
        source=f"{FRAMEWORK}: {len(rows)} measured passes of single layers; the others: not measured, {said}",
    )
    return Fitted(training, {"train_block": residual}, points)


def _layer_s(model: Model, row: Mapping[Hashable, Any], ref: Reference, gpu: str, efficiency: float) -> float:
    """Two layers less one: embedding and head drop out."""
    node = measured_node(gpu, ref)
    none = Collectives(CollectiveFits(nccl={}), ref, node)
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
