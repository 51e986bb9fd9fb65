"""Whole steps as measured: decode profiles, and the host time that they leave over the operators' sum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from rlsim.calibrate.fit.common import Array, rounded
from rlsim.calibrate.measurements import Measurements
from rlsim.calibrate.node import measured_node
from rlsim.calibrate.points import Fitted, join, point_rows, residual_of
from rlsim.cost.calibration import Calibration, DecodeProfile, HostFit
from rlsim.cost.profile import ProfileStep, prompts_of
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import StepCost
from rlsim.models import Model

NO_HOST = HostFit(step_s=0.0, sequence_s=0.0, source="none")
FEWEST_STEPS = 4  # rows of whole steps from which host time is fitted
Shape = Callable[[str], Model | None]


def fit_host(measured: Measurements, calibration: Calibration, shape: Shape) -> Fitted[HostFit | None]:
    """Host time per step and per sequence: decode steps less the kernels of `calibration`, none below zero.

    Least squares of relative errors with a soft-L1 loss; every third batch size of a model and TP is held out. Without
    whole steps, or without the shape of their model, there is none.
    """
    kernels = _Kernels(calibration.model_copy(update={"host": NO_HOST}), shape)
    rows = _decode_rows(measured.table("decode_step"))
    rows = rows[[kernels.knows(str(model)) for model in rows.model]] if len(rows) else rows
    if len(rows) < FEWEST_STEPS:
        return Fitted(None)
    batch, y = rows.batch.to_numpy(float), rows.seconds.to_numpy(float)
    shown = np.array(
        [
            kernels.step(str(row["model"]), int(row["tp"])).decode(int(row["batch"])).step_s(row["context_tokens"])
            for row in rows.to_dict("records")
        ]
    )
    order = rows.groupby(["model", "tp"]).batch.transform(lambda b: b.rank(method="dense")).to_numpy(int)
    test = order % 3 == 2
    if (~test).sum() < FEWEST_STEPS:
        test = np.zeros(len(rows), dtype=bool)
    design = np.stack([1.0 / y, batch / y], axis=1)
    target = 1.0 - shown / y
    start, _ = nnls(design[~test], target[~test])

    def error(p: Array) -> Array:
        return np.asarray(design[~test] @ (np.abs(p) * 1e-6) - target[~test])

    step_s, sequence_s = np.abs(least_squares(error, start * 1e6, loss="soft_l1", f_scale=0.05).x) * 1e-6
    values = shown + step_s + sequence_s * batch
    points = point_rows("step_from_operators", _step_labels(rows), y, values, test)
    models = ", ".join(sorted({f"{row.model} at TP{row.tp} ({row.mode})" for row in rows.itertuples()}))
    prefill_s = _prefill_host(measured.table("prefill_step"), kernels, float(step_s), float(sequence_s))
    host = HostFit(
        step_s=rounded(float(step_s)),
        sequence_s=rounded(float(sequence_s)),
        prefill_s=rounded(prefill_s),
        source=f"what {len(rows)} measured decode steps leave over the operators' sum: {models}",
    )
    note = "operators and host time, batch sizes not fitted"
    residual = residual_of(points, rows[["batch", "context_tokens"]], note)
    return Fitted(host, {"step_from_operators": residual}, points)


def _prefill_host(table: pd.DataFrame, kernels: _Kernels, step_s: float, sequence_s: float) -> float:
    """The median time of a prefill over its kernels and the host time of a decode step; zero if it takes less."""
    left = []
    for row in table.to_dict("records"):
        if kernels.knows(str(row["model"])):
            chunks = prompts_of(int(row["tokens"]), int(row["length"]))
            kernel_s = kernels.step(str(row["model"]), int(row["tp"])).prefill_s(chunks)
            left.append(float(row["seconds"]) - kernel_s - step_s - sequence_s * len(chunks))
    return max(0.0, float(np.median(left))) if left else 0.0


def fit_profiles(measured: Measurements, calibration: Calibration, shape: Shape) -> Fitted[tuple[DecodeProfile, ...]]:
    """One profile for every model and TP with decode steps: as measured, nothing fitted.

    Steps from CUDA graphs are taken where there are any. A batch size needs two contexts. Cells of the prefill grid
    that were not measured are filled (see `_prefill_grid`). The points say how far interpolation is off: every inner
    batch size, or inner context if there are fewer than three batch sizes, is left out in turn.
    """
    table = _decode_rows(measured.table("decode_step"))
    prefills = measured.table("prefill_step")
    kernels = _Kernels(calibration, shape)
    profiles, parts, notes = [], [], []
    for (model, tp), rows in table.groupby(["model", "tp"]):
        model, tp = str(model), int(str(tp))
        counts = rows.groupby("batch").context_tokens.nunique()
        single = [int(batch) for batch in counts.index[counts < 2]]
        rows = rows[~rows.batch.isin(single)]
        if single:
            notes.append(
                f"decode steps of {model} at TP{tp}, batch {', '.join(map(str, single))}: one context only, left out"
            )
        if rows.empty:
            continue
        grid = _prefill_grid(prefills[(prefills.model == model) & (prefills.tp == tp)], kernels, model, tp)
        if grid is None:
            notes.append(f"no decode profile of {model} at TP{tp}: no prefill measured and its shape is not known")
            continue
        prefill, filled = grid
        if filled:
            notes.append(f"prefill profile of {model} at TP{tp}: {filled}")
        record = DecodeProfile.model_validate({"model": model, "tp": tp, **_grid(rows), **prefill})
        profiles.append(record)
        parts.append(_left_out(record, rows, calibration.operators.decode_attention.skew))
    points = join(parts)
    residuals = {}
    if len(points):
        note = "interpolated from the other batch sizes"
        residuals["decode_step"] = residual_of(points, table[["batch", "context_tokens"]], note)
    return Fitted(tuple(profiles), residuals, points, tuple(notes))


class _Kernels:
    """Step costs of a calibration's operators and host time, by model and TP."""

    def __init__(self, calibration: Calibration, shape: Shape) -> None:
        self._calibration, self._shape = calibration, shape
        self._node = measured_node(calibration.gpu, calibration.reference)
        self._steps: dict[tuple[str, int], StepCost] = {}

    def knows(self, model: str) -> bool:
        return self._shape(model) is not None

    def step(self, model: str, tp: int) -> StepCost:
        shape = self._shape(model)
        assert shape is not None
        if (model, tp) not in self._steps:
            self._steps[model, tp] = step_cost(shape, tp, self._node, self._calibration)
        return self._steps[model, tp]


def _decode_rows(table: pd.DataFrame) -> pd.DataFrame:
    """One row a step: those from graphs where a model and TP has any, medians of repeats."""
    if table.empty:
        return table
    keys = ["model", "tp", "mode", "batch", "context_tokens"]
    table = table.groupby(keys, as_index=False)[["seconds"]].median()
    graphs = (table["mode"] == "graph").groupby([table.model, table.tp]).transform("any")
    return table[~graphs | (table["mode"] == "graph")].reset_index(drop=True)


def _grid(rows: pd.DataFrame) -> dict[str, tuple[object, ...]]:
    """The fields of a profile that decode steps give."""
    by_batch = [(int(str(batch)), part.sort_values("context_tokens")) for batch, part in rows.groupby("batch")]
    return {
        "batches": tuple(batch for batch, _ in by_batch),
        "context_tokens": tuple(tuple(part.context_tokens.astype(float)) for _, part in by_batch),
        "step_s": tuple(tuple(part.seconds.astype(float)) for _, part in by_batch),
    }


def _left_out(record: DecodeProfile, rows: pd.DataFrame, skew: float) -> pd.DataFrame:
    """Every step with its time from a profile without it, where it lies inside; its own time at the edges."""
    rows = rows.sort_values(["batch", "context_tokens"]).reset_index(drop=True)
    values, test = rows.seconds.to_numpy(float).copy(), np.zeros(len(rows), dtype=bool)
    edges = {record.batches[0], record.batches[-1]}
    for i, (batch, tokens) in enumerate(zip(rows.batch.astype(int), rows.context_tokens.astype(float), strict=True)):
        if len(record.batches) >= 3:
            if batch in edges:
                continue
            rest = rows[rows.batch != batch]
        else:
            own = rows[rows.batch == batch].context_tokens
            if tokens in (own.min(), own.max()):
                continue
            rest = rows[rows.index != i]
        profile = ProfileStep.from_record(record.model_copy(update=_grid(rest)), skew=skew)
        values[i], test[i] = profile.decode(batch).step_s(tokens), True
    return point_rows("decode_step", _step_labels(rows), rows.seconds, values, test)


def _step_labels(rows: pd.DataFrame) -> list[str]:
    return [
        f"{row.model} TP{row.tp}, {row.batch} sequences, {row.context_tokens:.0f} tokens ({row.mode})"
        for row in rows.itertuples()
    ]


def _prefill_grid(table: pd.DataFrame, kernels: _Kernels, model: str, tp: int) -> tuple[dict[str, object], str] | None:
    """The fields of a profile with token counts, lengths and the seconds of every pair, and what was done about pairs
    that were not measured.

    A missing pair takes seconds = a + b · tokens + c · tokens · length, fitted to the measured ones (the last term is
    attention), times what the nearest measured pair of the same token count is off by. With nothing measured it is
    all from the operators and the host time. None if the model's shape is needed and not known.
    """
    if table.empty:
        if not kernels.knows(model):
            return None
        sizes = [128, 512, 2048, 8192]
        step = kernels.step(model, tp)
        seconds = [[step.prefill_s(prompts_of(tokens, length)) for length in sizes] for tokens in sizes]
        grid = {"prefill_tokens": sizes, "prefill_lengths": sizes, "prefill_s": seconds}
        return grid, "not measured; the operators' sum and host time"
    measured = table.groupby(["tokens", "length"]).seconds.median()
    tokens = sorted({float(t) for t, _ in measured.index})
    lengths = sorted({float(length) for _, length in measured.index})
    t, length = (np.array([key[i] for key in measured.index], float) for i in (0, 1))
    y = measured.to_numpy(float)
    design = np.stack([np.ones(len(y)), t, t * length], axis=1)
    scale = design.max(axis=0)
    weights = nnls(design / scale / y[:, None], np.ones(len(y)))[0] / scale

    def plane(a: float, b: float) -> float:
        return float(weights @ [1.0, a, a * b])

    def at(a: float, b: float) -> float:
        if (a, b) in measured.index:
            return float(measured.loc[(a, b)])
        near = min(range(len(y)), key=lambda i: (abs(np.log(t[i] / a)), abs(np.log(length[i] / b))))
        return plane(a, b) * float(y[near]) / plane(t[near], length[near])

    missing = len(tokens) * len(lengths) - len(y)
    note = f"{missing} of {len(tokens) * len(lengths)} cells not measured, filled by a plane through the others"
    seconds = [[at(a, b) for b in lengths] for a in tokens]
    return {"prefill_tokens": tokens, "prefill_lengths": lengths, "prefill_s": seconds}, note if missing else ""
