"""Decode attention: streaming the KV cache."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import (
    Array,
    Mask,
    as_written,
    columns_of,
    fit_logs,
    held_out,
    held_out_rows,
    percent,
    rounded,
    squash,
    unsquash,
)
from rlsim.calibrate.fit.heads import HEAD_DIM, heads_of, of_every_head_dim, usual_groups
from rlsim.calibrate.fit.kernels import (
    Kernel,
    Knots,
    compared,
    corrected,
    distinct,
    enough_for_all_constants,
    few_constants,
)
from rlsim.calibrate.fit.skew import derived_skew, measured_skew
from rlsim.calibrate.points import Fitted, join, residual_of
from rlsim.cost.calibration import Engine, Reference
from rlsim.cost.fits import DecodeAttentionFit

PARALLELISM = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 11.0)
PLAUSIBLE = 0.95  # rows that would need more of the peak bandwidth were served from L2 in part
TOKEN_BYTES = 4.0 * HEAD_DIM  # keys and values of one KV head
KNOTS = {
    "batch": [2.0**e for e in range(12)],
    "context": [2.0, *(4.0**e for e in range(2, 9)), 2.0**17],
    "kv_heads": [1.0, 2.0, 4.0, 8.0, 16.0],
}
KERNEL = Kernel(
    "decode_attention",
    lambda operators, row: operators.decode_attention_s(
        int(row.batch), row.batch * row.context, int(row.q_heads), int(row.kv_heads), HEAD_DIM
    ),
    lambda row: f"{row.batch:.0f} x {row.context:.0f} tokens, {row.q_heads:.0f}/{row.kv_heads:.0f} heads",
)


def kernel_decode_attention(
    table: pd.DataFrame, ref: Reference, engine: Engine, cold: bool, knots: Knots = KNOTS
) -> Fitted[DecodeAttentionFit]:
    """Decode attention of `table` (columns as in `KEYS`, seconds), unequal contexts apart.

    Equal contexts give the fit, unequal ones the skew; without those the skew is derived. `cold`: KV was brought from
    memory, so every row counts; otherwise rows whose KV the L2 may have held are left out, as `decode_rows` says. Heads
    of other sizes that models have get a fit of their own where there are enough rows.
    """
    return of_every_head_dim(
        table, ref, "decode_attention", lambda rows, scaled: _of_one_head_dim(rows, scaled, engine, cold, knots)
    )


def _of_one_head_dim(
    table: pd.DataFrame, ref: Reference, engine: Engine, cold: bool, knots: Knots
) -> Fitted[DecodeAttentionFit]:
    equal = table[table.longest <= table.context * 1.0001]
    unequal = table[table.longest > table.context * 1.0001]
    equal = distinct(equal, "decode_attention", ["batch", "context", "q_heads", "kv_heads"])
    equal = usual_groups(equal, "decode_attention")
    test, tiny, streamed, beyond = decode_rows(equal, ref, include_hot=cold)
    used, train = tiny | streamed, ~test
    skew = derived_skew(ref, uniform=engine == "trtllm")
    full = enough_for_all_constants(ref, used & train) and (tiny & train).sum() >= 4 and (used & test).any()
    if full and (streamed & ~tiny & train).sum() >= 12:
        fit = fit_decode_attention(equal, ref, skew, include_hot=cold, knots=knots)
        note = "KV beyond L2 or contexts of at most 64 tokens; "
        note += f"{percent(float(np.mean(~streamed[beyond])))} of the former dropped as impossible"
    else:
        used, test = np.ones(len(equal), dtype=bool), held_out_rows(heads_of(equal))
        fit, note = small_decode_attention(equal[~test], ref, skew), ""
    points = compared(KERNEL, fit, ref, equal[used], test[used])
    ranges = equal[["batch", "context", "kv_heads"]].assign(group=equal.q_heads / equal.kv_heads)
    note = f"(batch, heads) not fitted; {note or few_constants(points)}"
    residuals = {"decode_attention": residual_of(points, ranges, note)}
    if unequal.empty:
        return Fitted(fit, residuals, points, ("skew of unequal contexts is derived, not measured",))
    skew, extra = measured_skew(fit, ref, unequal, equal)
    note = "unequal contexts, rows not fitted"
    residuals["decode_attention_unequal"] = residual_of(extra, unequal[["batch", "context"]], note)
    fit = fit.model_copy(update={"skew": rounded(skew)})
    note = f"skew of unequal contexts: {percent(skew)} of the padding, fitted to {len(unequal)} measured rows"
    return Fitted(fit, residuals, join([points, extra]), (note,))


class DecodeRows(NamedTuple):
    """Which rows of a table count for what, as masks."""

    test: Mask  # held out: every row of some (batch, heads)
    tiny: Mask  # contexts of at most 64 tokens, in L2: they give the floor
    streamed: Mask  # KV beyond 1.2 L2, and no faster than memory: they give the rest
    beyond: Mask  # KV beyond 1.2 L2, however fast


def decode_rows(table: pd.DataFrame, ref: Reference, include_hot: bool = False) -> DecodeRows:
    """The rows of `table` (batch, context, q_heads, kv_heads, seconds); with `include_hot` whatever L2 holds counts.

    Rows that imply more than 95% of the peak bandwidth cannot have read their KV from memory and are not streamed,
    however large (TensorRT-LLM's grouped-query rows).
    """
    b, s, kv, y = columns_of(table, ("batch", "context", "kv_heads", "seconds"))
    size = b * s * kv * TOKEN_BYTES
    plausible = (size / y < PLAUSIBLE * ref.memory_bytes_per_s) | include_hot
    large, long = size > 1.2 * ref.l2_bytes, s >= 128
    tiny = (s <= 64) & (size < 0.5 * ref.l2_bytes)
    return DecodeRows(held_out(heads_of(table)), tiny, (large | include_hot) & long & plausible, large & long)


def fit_decode_attention(
    table: pd.DataFrame, ref: Reference, skew: float, include_hot: bool = False, knots: Knots = KNOTS
) -> DecodeAttentionFit:
    """Fit decode attention. `table`: batch, context, q_heads, kv_heads, seconds (head size 128).

    The floor comes from contexts of at most 64 tokens, the streaming part from KV beyond 1.2 L2.
    """
    test, tiny, streamed, _ = decode_rows(table, ref, include_hot)
    floor = _fit_floor(table[tiny & ~test])
    stream = _fit_stream(table[streamed & ~test], floor, ref)
    fit = DecodeAttentionFit(
        floor_s=math.exp(floor[0]) * 1e-6,
        floor_tile_s=math.exp(floor[1]) * 1e-6,
        floor_sequence_s=math.exp(floor[2]) * 1e-6,
        stream_s=math.exp(stream[0]) * 1e-6,
        stream_tile_s=math.exp(stream[1]) * 1e-6,
        stream_sequence_s=math.exp(stream[2]) * 1e-6,
        parallelism=PARALLELISM,
        efficiency=tuple(np.minimum(squash(stream[3:]), PLAUSIBLE).tolist()),
        skew=skew,
    )
    return corrected(KERNEL, as_written(fit), ref, table[(streamed | tiny) & ~test], knots)


def _launch_us(p: Array, b: Array, kv: Array) -> Array:
    """A fixed time, one for each sequence and KV head, and one for each sequence, from the logs of the three."""
    return np.asarray(np.exp(p[0]) + np.exp(p[1]) * b * kv + np.exp(p[2]) * b)


def _fit_floor(rows: pd.DataFrame) -> Array:
    b, kv, y = columns_of(rows, ("batch", "kv_heads", "seconds"))
    found = fit_logs(lambda p: _launch_us(p, b, kv), y * 1e6, np.log([9.0, 0.02, 0.01]))
    return np.asarray(found.x)


def _fit_stream(rows: pd.DataFrame, floor: Array, ref: Reference) -> Array:
    """Three launch times as of the floor, and the share of the bandwidth at each knot of `PARALLELISM`."""
    b, s, kv, y = columns_of(rows, ("batch", "context", "kv_heads", "seconds"))
    size, least_s = b * s * kv * TOKEN_BYTES, _launch_us(floor, b, kv) * 1e-6

    def shown(p: Array) -> Array:
        rate = ref.memory_bytes_per_s * np.interp(np.log2(b * kv), np.array(PARALLELISM), squash(p[3:]))
        return np.maximum(_launch_us(p, b, kv) * 1e-6 + size / rate, least_s)

    start = np.concatenate([np.log([12.0, 0.008, 0.004]), np.full(len(PARALLELISM), unsquash(0.8))])
    return np.asarray(fit_logs(shown, y, start, pull=0.03).x)


def small_decode_attention(rows: pd.DataFrame, ref: Reference, skew: float) -> DecodeAttentionFit:
    """A fixed time, one for each sequence, and a share of the bandwidth: for tables that cannot tell more."""
    b, s, kv, y = columns_of(rows, ("batch", "context", "kv_heads", "seconds"))
    size = b * s * kv * TOKEN_BYTES

    def shown(p: Array) -> Array:
        return np.asarray(np.exp(p[0]) + np.exp(p[1]) * b + size / (ref.memory_bytes_per_s * squash(p[2])))

    start = np.array([math.log(0.5 * y.min()), math.log(0.05 * y.min()), unsquash(0.5)])
    p = fit_logs(shown, y, start, pull=0.02, within=12.0).x
    fit = DecodeAttentionFit(
        floor_s=0.0,
        floor_tile_s=0.0,
        floor_sequence_s=0.0,
        stream_s=math.exp(p[0]),
        stream_tile_s=0.0,
        stream_sequence_s=math.exp(p[1]),
        parallelism=(0.0,),
        efficiency=(float(squash(p[2])),),
        skew=skew,
    )
    return corrected(KERNEL, as_written(fit), ref, rows, KNOTS)
