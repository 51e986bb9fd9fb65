"""A calibration as one reads it: what kernels reach of the data sheet, seconds of a step, how far its fits are off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.charts import drawn, save_chart, templates
from rlsim.cost.calibration import Calibration
from rlsim.cost.experts import FusedExperts, expert_load, peak_of
from rlsim.cost.operators import Operators, gemm_of
from rlsim.cost.products import Products
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.speculation import Drafts, Speculation
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model, load_model
from rlsim.models.precision import WEIGHT_BYTES, peak_flop_per_s

ROWS = (1, 16, 64, 256, 1024, 4096, 16384)  # of products, and tokens of experts
WEIGHTS = (1024, 4096, 16384)  # n = k
CONTEXTS = (64, 256, 1024, 4096, 16384, 65536)
SEQUENCES = (1, 8, 64, 256)
HEADS = (32, 8, 128)  # query heads, KV heads and their size
EXPERTS = (128, 8, 4096, 1536)  # of Qwen3-235B-A22B: experts, of them for a token, hidden size, width
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # responses on all GPUs together
Shown = tuple[str, str, str, float, float]


def efficiencies(calibration: Calibration) -> pd.DataFrame:
    """Columns kernel, line, axis (what `at` counts), at and value: the least seconds that the data sheet's FLOP/s and
    bandwidth allow, over those of the kernel. A value above 1 is a cache's."""
    found = [*_products(calibration), *_attention(calibration), *_experts(calibration)]
    return pd.DataFrame(found, columns=["kernel", "line", "axis", "at", "value"])


def _products(calibration: Calibration) -> Iterator[Shown]:
    for precision, fit in calibration.operators.gemms.items():
        if peak_flop_per_s(calibration.reference, precision) is None:
            continue
        products = Products(fit, calibration.reference)
        for side in WEIGHTS:
            for m in ROWS:
                share = products.work.fastest_s(m, side, side, 1) / products.time_s(m, side, side)
                yield (gemm_of(precision), f"n = k = {side:,}", "rows", m, share)


def _attention(calibration: Calibration) -> Iterator[Shown]:
    operators, ref = Operators(calibration.operators, calibration.reference), calibration.reference
    q, kv, dim = HEADS
    for batch in SEQUENCES:
        for tokens in CONTEXTS:
            read = 4.0 * batch * tokens * kv * dim / ref.memory_bytes_per_s
            time = operators.decode_kernels.curve(batch, kv, dim).step_s(batch * tokens)
            yield ("decode_attention", f"{batch} sequence{'s' * (batch > 1)}", "context", tokens, read / time)
    for tokens in CONTEXTS:
        flop = 2.0 * q * dim * tokens**2
        time = operators.prefill_attention_s([(float(tokens), 0.0)], q, kv, dim)
        yield ("prefill_attention", "one prompt", "context", tokens, flop / ref.bf16_flop_per_s / time)


def _experts(calibration: Calibration) -> Iterator[Shown]:
    experts, active, hidden, width = EXPERTS
    ref = calibration.reference
    for precision, fit in calibration.operators.experts.items():
        kernel, peak = FusedExperts(fit, ref, precision), peak_of(ref, fit.multiplied_in or precision)
        for tokens in ROWS:
            load = expert_load(tokens, experts, active)
            flop, size = 6.0 * load.rows * hidden * width, 3.0 * hidden * width * load.hit * WEIGHT_BYTES[precision]
            share = max(flop / peak, size / ref.memory_bytes_per_s) / kernel(load, hidden, width)
            yield (f"experts_{precision}", f"{experts} experts", "tokens", tokens, share)


def latencies(model: Model, cluster: Cluster, calibration: Calibration) -> pd.DataFrame:
    """Columns context (tokens of each response), tp, batch (responses on all GPUs) and step_s: seconds of a decode
    step, missing where the KV cache has no room. Degrees are those that hold a response of the shortest context.
    """
    costs = RolloutCostModel(model, cluster, calibration)
    degrees, _ = costs.feasible_tps(CONTEXTS[2])
    rows = []
    for context, tp, batch in itertools.product(CONTEXTS[2:], degrees, BATCHES):
        own = math.ceil(batch * tp / cluster.gpus)  # of the fullest replica
        fits = own * context <= costs.capacity_pages(tp) * costs.page_tokens
        rows.append((context, tp, batch, costs.step(tp).decode(own).step_s(own * context) if fits else math.nan))
    return pd.DataFrame(rows, columns=["context", "tp", "batch", "step_s"])


def gains(model: Model, cluster: Cluster, calibration: Calibration, speculation: Speculation) -> pd.DataFrame:
    """Columns context (tokens of each response), drafted (of each in a step), tp, batch (responses of a replica) and
    gain: time of a token without drafts over that with them, missing where the KV cache has no room. At the lowest TP.
    """
    plain, rows = RolloutCostModel(model, cluster, calibration), []
    tp, named = plain.feasible_tps(CONTEXTS[2])[0][0], speculation.model
    draft = load_model(named) if named else None
    for drafted in range(1, speculation.num_speculative_tokens + 1):
        own = speculation.model_copy(update={"num_speculative_tokens": drafted})
        costs = RolloutCostModel(model, cluster, calibration, drafts=Drafts.of(own, model, draft))
        for context, batch in itertools.product(CONTEXTS[2:], BATCHES):
            times = [one.step(tp).decode(batch).step_s(batch * context) for one in (plain, costs)]
            fits = batch * context <= costs.capacity_pages(tp) * costs.page_tokens
            rows.append((context, drafted, tp, batch, times[0] / times[1] if fits else math.nan))
    return pd.DataFrame(rows, columns=["context", "drafted", "tp", "batch", "gain"])


def by_line(found: pd.DataFrame) -> pd.DataFrame:
    """`latencies` or `gains` with the columns of `efficiencies`; values are milliseconds, or gains."""
    if "gain" in found:
        lines, values = "k = " + found.drafted.astype(str), found.gain
    else:
        lines, values = "TP" + found.tp.astype(str), 1e3 * found.step_s
    named = {"kernel": found.context.map("context {:,}".format), "line": lines}
    return found.assign(**named, axis="responses", at=found.batch, value=values)


def write(found: pd.DataFrame, title: str, path: Path) -> None:
    """A panel for every kernel, as .html, .svg or .png; raises `CalibrationError` for another ending."""
    unit, form, digits = ("ms", "d", ".2f") if "step_s" in found else ("of the data sheet's rate", "%", ".1%")
    unit, form, digits = ("times as fast", ".1f", ".2f") if "gain" in found else (unit, form, digits)
    found = found.assign(panel=found.kernel.str.replace("_", " ") + ", by " + found.axis)
    known = {"found": found, "title": title, "unit": unit, "form": form, "digits": digits}
    save_chart(drawn(templates("calibrate")["shown"], known), path, CalibrationError)


# Measured against fitted times ----------------------------------------------------------------------------------------


BAND = 0.15  # relative error of the shaded band
MOST, WORST = 400, 20  # points drawn of an operator, the worst among them


def write_chart(points: pd.DataFrame, path: str | Path) -> None:
    """Draws `points` (see `measurements.COLUMNS`) to .html, .svg or .png; the HTML file holds everything it needs.

    Raises `CalibrationError` for another ending, a folder that does not exist, or no points.
    """
    save_chart(calibration_chart(points), Path(path), CalibrationError)


def calibration_chart(points: pd.DataFrame) -> dict[str, Any]:
    """The chart of `points`: log-log panels with the ±15% band; the error is in the tooltip and each panel's title."""
    if points.empty:
        raise CalibrationError("no points to draw")
    parts = []
    for operator, every in points.groupby("operator", sort=False):
        shown = _sample(every).sort_values("held_out")  # held-out points lie on top
        shown = shown.assign(seen=np.where(shown.held_out, "held out", "used for the fit"))
        times = shown[["measured_s", "fitted_s"]].to_numpy(float)
        ends = pd.DataFrame({"at": [times.min() / 1.3, times.max() * 1.3]})
        ends = ends.assign(low=ends["at"] * (1 - BAND), high=ends["at"] * (1 + BAND))
        parts.append(pd.concat([shown, ends]).assign(panel=_title(str(operator), every, len(shown))))
    columns = ["panel", "label", "measured_s", "fitted_s", "error", "seen", "at", "low", "high"]
    known = {"points": pd.concat(parts, ignore_index=True)[columns], "BAND": BAND}
    chart: dict[str, Any] = drawn(templates("calibrate")["fit"], known)
    return chart


def _title(operator: str, rows: pd.DataFrame, shown: int) -> str:
    unseen = rows[rows.held_out]
    error = (unseen if len(unseen) else rows).error.abs()
    count = f"{len(error):,} point{'s' * (len(error) != 1)}"
    which = "held out" if len(unseen) else "in sample"
    lines = [
        operator.replace("_", " "),
        f"{which}: median {error.median():.1%}, p90 {error.quantile(0.9):.1%}, {count}",
    ]
    if shown < len(rows):
        lines.append(f"{shown:,} of {len(rows):,} drawn, the worst among them")
    return "\n".join(lines)


def _sample(rows: pd.DataFrame) -> pd.DataFrame:
    """At most `MOST` rows, spread evenly over the measured times, and the worst of all."""
    if len(rows) <= MOST:
        return rows
    even = rows.sort_values("measured_s").iloc[np.linspace(0, len(rows) - 1, MOST - WORST).astype(int)]
    worst = rows.loc[rows.error.abs().sort_values(ascending=False).index[:WORST]]
    return pd.concat([even, worst]).drop_duplicates()
