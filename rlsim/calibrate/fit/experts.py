"""Mixtures of experts: the fused kernel's constants for each precision, judged on models that no fit has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.reading import shipped
from rlsim.calibrate.fit.collectives import fit_collective, times_of
from rlsim.calibrate.fit.common import FEWEST, KNOTS, Mask, held_out_rows
from rlsim.calibrate.fit.kernel import fit_with_l2
from rlsim.calibrate.measurements import Fitted, join, point_rows, residual_of
from rlsim.cost.calibration import Reference, Residual
from rlsim.cost.collectives import exchanged_bytes
from rlsim.cost.experts import BLOCK_ROWS, MXFP8, ExpertLoad, FusedExperts, peak_of
from rlsim.cost.fits import ExchangeFit, ExpertsFit
from rlsim.models.precision import WEIGHT_BYTES, Precision

#: Models that are left out whole when errors are measured: Qwen3-235B-A22B and DeepSeek-V3.
LEFT_OUT = ("4096 x 1536, 8 of 128", "7168 x 2048, 8 of 256")
BLOCKS: Sequence[Mapping[str, Any]] = shipped("expert_tables.yaml")["blocks"]
DEFAULT_BLOCKS = ((16, 32), (64, 64))  # of SGLang's Triton kernel: for no more tokens than experts, and beyond

Experts = tuple[dict[Precision, ExpertsFit], dict[Precision, ExpertsFit]]


def kernel_experts(table: pd.DataFrame, ref: Reference) -> Fitted[Experts]:
    """The mixtures of `table` (columns of `KEYS`, seconds): for experts on one GPU, and on several by another kernel.

    Constants are fitted to balanced rows, the table to all. Errors are those of a second fit that has not seen the
    models of `LEFT_OUT` (or a quarter of the models where neither was measured), on these; those under a power law are
    told apart, and so are those of a kernel that was measured with experts on several GPUs only. Rows whose weights
    the L2 may have held are not judged; those that it held for certain are fitted, with bytes at a rate of its own.
    """
    one: dict[Precision, ExpertsFit] = {}
    several: dict[Precision, ExpertsFit] = {}
    points, residuals = [], {}
    for precision in WEIGHT_BYTES:
        own = table[table.precision == precision]
        hot, in_l2 = _hot(own, ref, precision)
        if (~hot).sum() < FEWEST["experts"]:
            continue
        rows = own.assign(hot=hot, in_l2=in_l2)[~hot | in_l2]
        alone = rows.ep == 1
        parts = [(one, rows[alone]), (several, rows[~alone])]
        if alone.any() and rows.kernel.nunique() == 1:
            parts = [(one, rows)]
        for fits, part in parts:
            if len(part):
                fits[precision] = fit_experts(part, ref, precision)
        name = f"experts_{precision}{'' if alone.any() else '_parallel'}"
        found = join([_judged(name, part, ref, precision) for _, part in parts if len(part)])
        points.append(found)
        for operator, own in found.groupby("operator"):
            skewed = str(operator).endswith("_skewed")
            note = f"{'power-law routing, ' if skewed else ''}models left out of the fit"
            judged = rows[~rows.hot]
            ranges = judged[["hit", "hidden", "width"]].astype(float)
            ranges.insert(0, "rows", judged.rows / judged.hit)
            residuals[str(operator)] = residual_of(own, ranges, note)
    return Fitted((one, several), residuals, join(points))


def other_experts(table: pd.DataFrame, ref: Reference) -> Fitted[dict[str, dict[Precision, ExpertsFit]]]:
    """The mixtures of `table` by kernel, each as `kernel_experts` has them: one kernel for one GPU and for several."""
    fits: dict[str, dict[Precision, ExpertsFit]] = {}
    residuals: dict[str, Residual] = {}
    points = []
    for kernel, rows in table.groupby("kernel"):
        found = kernel_experts(rows, ref)
        fits[str(kernel)] = found.fit[0]
        residuals |= {f"{name}_{kernel}": item for name, item in found.residuals.items()}
        points.append(found.points.assign(operator=found.points.operator + f"_{kernel}"))
    return Fitted(fits, residuals, join(points))


def kernel_exchange(table: pd.DataFrame) -> Fitted[dict[int, ExchangeFit]]:
    """DeepEP's dispatch and combine of `table` (columns of `KEYS`, seconds) by number of GPUs.

    Errors are those of curves that have not seen the hidden sizes of `LEFT_OUT`.
    """
    fits, points = {}, []
    for gpus, rows in table.groupby("gpus"):
        calls = zip(rows.kind, rows.tokens, rows.active, rows.hidden, strict=True)
        size = [exchanged_bytes(t, int(k), 2.0 * h, int(str(gpus)))[kind == "normal"] for kind, t, k, h in calls]
        rows = rows.assign(bytes=size)
        unseen = rows.hidden.isin([int(model.split(" ")[0]) for model in LEFT_OUT])
        curves = {}
        for kind, own in rows.groupby("kind"):
            curves[str(kind)] = fit_collective(own)
            test = own[unseen.loc[own.index]]
            shown = fit_collective(own[~unseen.loc[own.index]])
            times = times_of(shown, test.bytes.to_numpy(float))
            labels = [f"{kind}, {row.tokens:.0f} tokens of {row.hidden:.0f}" for row in test.itertuples(index=False)]
            points.append(point_rows("exchange", labels, test.seconds, times, True))
        fits[int(str(gpus))] = ExchangeFit.model_validate(curves)
    found = join(points)
    residuals = {"exchange": residual_of(found, table[["tokens", "active", "hidden"]], "hidden sizes left out")}
    return Fitted(fits, residuals, found)


def _hot(table: pd.DataFrame, ref: Reference, precision: Precision) -> tuple[Mask, Mask]:
    """Rows that memory bounds and whose weights are under 1.5 L2, and of these those under half of L2."""
    size = 3.0 * table.hidden * table.width * table.hit * WEIGHT_BYTES[precision]
    ridge = peak_of(ref, precision) * WEIGHT_BYTES[precision] / 2.0 / ref.memory_bytes_per_s
    hot = np.asarray((size < 1.5 * ref.l2_bytes) & (table.rows / table.hit <= ridge), dtype=bool)
    return hot, hot & np.asarray(size < 0.5 * ref.l2_bytes, dtype=bool)


def _judged(name: str, rows: pd.DataFrame, ref: Reference, precision: Precision) -> pd.DataFrame:
    test = rows.model.isin(LEFT_OUT).to_numpy(bool)
    if not test.any() or test.all():
        test = held_out_rows(rows.model)
    fit = fit_experts(rows[~test], ref, precision)
    skewed = (rows.routing != "balanced").to_numpy(bool)
    test = test & ~rows.hot.to_numpy(bool)
    parts = [(name, test & ~skewed), (f"{name}_skewed", test & skewed)]
    kernel, points = FusedExperts(fit, ref, precision), []
    for operator, mask in parts:
        own = rows[mask]
        labels = [f"{row.model}: {row.tokens:.0f} tokens, EP {row.ep}" for row in own.itertuples(index=False)]
        points.append(point_rows(operator, labels, own.seconds, (kernel(*one) for one in calls_of(own)), True))
    return join(points)


def calls_of(rows: pd.DataFrame) -> list[tuple[ExpertLoad, float, float]]:
    """Load, hidden size and width of each row of a table."""
    rows = rows.assign(selections=rows.tokens * rows.active, parallel=rows.ep > 1, exponent=exponents_of(rows.routing))
    plain = rows[[*ExpertLoad._fields[:-1], "hidden", "width"]].to_numpy(float).tolist()
    blocks = rows[[f"blocks_{size}" for size in BLOCK_ROWS]].to_numpy(float).tolist()
    return [(ExpertLoad._make([*own, tuple(counts)]), h, w) for (*own, h, w), counts in zip(plain, blocks, strict=True)]


def exponents_of(routing: pd.Series) -> pd.Series:
    """Those of the power laws that routings are named by; 0 for balanced ones."""
    return pd.to_numeric(routing.str.rsplit("_").str[-1], errors="coerce").fillna(0.0)


def fit_experts(table: pd.DataFrame, ref: Reference, precision: Precision) -> ExpertsFit:
    """Fit one kernel to the rows of `table`, all in `precision`."""
    rows = table.assign(exponent=exponents_of(table.routing))
    rows = rows[(rows.exponent == 0) | ~rows.in_l2]
    pairs = sorted(set(zip(rows.experts[rows.tuned], rows.width[rows.tuned], strict=True)))
    all_tuned = bool(rows.tuned.all())
    kernel = str(rows.kernel.iloc[0])
    suiting = (row for row in BLOCKS if row.get("precision", precision) == precision)
    blocks = next(row for row in suiting if kernel.startswith(row["kernel"]))
    kind = ExpertsFit(
        kernel=kernel,
        launch_s=0.0,
        efficiency={},
        multiplied_in="fp8" if kernel.endswith(MXFP8) else None,
        block_rows=blocks["rows"],
        block_fill=blocks.get("fill", 2.0),
        default_blocks=None if all_tuned else DEFAULT_BLOCKS,
        tuned=() if all_tuned else tuple((int(experts), int(own)) for experts, own in pairs),
    )
    fused = FusedExperts(kind, ref, precision)
    calls = calls_of(rows)
    size = [fused.weight_bytes(*one) for one in calls]
    shape = pd.DataFrame(
        {"rows": rows.rows / rows.hit, "width": rows.width, "bytes": size, "popularity": 1.0 + rows.exponent}
    )
    works = (fused.work(*one) for one in calls)
    return fit_with_l2(kind, works, rows, shape, KNOTS["experts"], telling=rows.exponent.to_numpy() == 0)
