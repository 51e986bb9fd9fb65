"""Attention: decode (KV streaming) and prompts (blocks over the SMs)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rlsim.calibrate.fit.common import (
    Array,
    Fitted,
    held_out,
    operators_with,
    percent,
    residual,
    rounded,
    squash,
    unsquash,
)
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.cost.calibration import DecodeAttentionFit, PrefillAttentionFit, Reference, Residual
from rlsim.cost.operators import DECODE_AXES, PREFILL_AXES
from rlsim.schema import validate

PARALLELISM = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 11.0)

PLAUSIBLE = 0.95  # rows that would need more of the peak bandwidth were served from L2 in part

SHORTEST_PROMPT = 16  # tokens of the shortest prompts fitted
GROUP = 8  # query heads per KV head in the models RL runs use

DECODE_KNOTS = {
    "batch": [2.0**e for e in range(12)],
    "context": [2.0, *(4.0**e for e in range(2, 9)), 2.0**17],
    "kv_heads": [1.0, 2.0, 4.0, 8.0, 16.0],
}
PREFILL_KNOTS = {
    "sequences": [4.0**e for e in range(5)],
    "new": [2.0**e for e in range(4, 15)],
    "q_heads": [1.0, 4.0, 16.0, 64.0],
    "group": [1.0, 2.0, 8.0],
}

KEYS = (128.0, 192.0, 320.0, 576.0, 1088.0, 2112.0, 4160.0, 8256.0)


class DecodeRows(NamedTuple):
    """Which rows of a table count for what, as masks."""

    test: NDArray[np.bool_]  # held out: every row of some (batch, heads)
    tiny: NDArray[np.bool_]  # contexts of at most 64 tokens, in L2: they give the floor
    streamed: NDArray[np.bool_]  # KV beyond 1.2 L2, and no faster than memory: they give the rest


def heads_of(table: pd.DataFrame) -> pd.Series:
    """The key by which attention rows are held out: batch and heads."""
    return table.batch.astype(str) + "/" + table.q_heads.astype(str) + "/" + table.kv_heads.astype(str)


def decode_rows(table: pd.DataFrame, ref: Reference, include_hot: bool = False) -> DecodeRows:
    """The rows of `table` (batch, context, q_heads, kv_heads, seconds); with `include_hot` whatever L2 holds counts."""
    b, s, kv, y = (table[c].to_numpy(float) for c in ("batch", "context", "kv_heads", "seconds"))
    size = b * s * kv * 512.0
    plausible = (size / y < PLAUSIBLE * ref.memory_bytes_per_s) | include_hot
    streamed = ((size > 1.2 * ref.l2_bytes) | include_hot) & (s >= 128) & plausible
    return DecodeRows(held_out(heads_of(table)), (s <= 64) & (size < 0.5 * ref.l2_bytes), streamed)


def fit_decode_attention(
    table: pd.DataFrame, ref: Reference, skew: float, include_hot: bool = False
) -> Fitted[DecodeAttentionFit]:
    """Fit decode attention. `table`: batch, context, q_heads, kv_heads, seconds (head size 128).

    The floor comes from contexts of at most 64 tokens, the streaming part from KV beyond 1.2 L2. Rows that imply
    more than 95% of the peak bandwidth cannot have read their KV from memory and are left out, however large
    (TensorRT-LLM's grouped-query rows).
    """
    table = table[table.q_heads <= GROUP * table.kv_heads]
    b, s, kv, q, y = (table[c].to_numpy(float) for c in ("batch", "context", "kv_heads", "q_heads", "seconds"))
    size = b * s * kv * 512.0
    test, tiny, cold = decode_rows(table, ref, include_hot)

    def floor(p: Array, i: NDArray[Any]) -> Array:
        return np.asarray(np.exp(p[0]) + np.exp(p[1]) * b[i] * kv[i] + np.exp(p[2]) * b[i])

    short = np.flatnonzero(tiny & ~test)

    def floor_error(p: Array) -> Array:
        return np.asarray(np.log(floor(p, short) / (y[short] * 1e6)))

    low = least_squares(floor_error, np.log([9.0, 0.02, 0.01]), loss="soft_l1", f_scale=0.1).x
    knots = np.array(PARALLELISM)

    def stream(p: Array, i: NDArray[Any]) -> Array:
        rate = ref.memory_bytes_per_s * np.interp(np.log2(b[i] * kv[i]), knots, squash(p[3:]))
        return np.asarray((np.exp(p[0]) + np.exp(p[1]) * b[i] * kv[i] + np.exp(p[2]) * b[i]) * 1e-6 + size[i] / rate)

    rows = np.flatnonzero(cold & ~test)
    start = np.concatenate([np.log([12.0, 0.008, 0.004]), np.full(len(knots), unsquash(0.8))])

    def error(p: Array) -> Array:  # a small pull to the start keeps knots without data where they are
        shown = np.maximum(stream(p, rows), floor(low, rows) * 1e-6)
        return np.concatenate([np.log(shown / y[rows]), 0.03 * (p - start)])

    p = least_squares(error, start, loss="soft_l1", f_scale=0.1).x
    fit = DecodeAttentionFit(
        floor_s=math.exp(low[0]) * 1e-6,
        floor_tile_s=math.exp(low[1]) * 1e-6,
        floor_sequence_s=math.exp(low[2]) * 1e-6,
        stream_s=math.exp(p[0]) * 1e-6,
        stream_tile_s=math.exp(p[1]) * 1e-6,
        stream_sequence_s=math.exp(p[2]) * 1e-6,
        parallelism=PARALLELISM,
        efficiency=tuple(np.minimum(squash(p[3:]), PLAUSIBLE).tolist()),
        skew=skew,
    )
    fit = validate(rounded(fit.model_dump()), DecodeAttentionFit)
    check = operators_with(ref, decode=fit)

    def predict(i: NDArray[Any]) -> list[float]:
        return [check.decode_attention_s(int(b[j]), b[j] * s[j], int(q[j]), int(kv[j]), 128) for j in i]

    rows = np.flatnonzero((cold | tiny) & ~test)
    columns = dict(zip(DECODE_AXES, (b[rows], s[rows], kv[rows]), strict=True))
    correction = fit_correction(columns, DECODE_KNOTS, np.log(y[rows] / predict(rows)))
    fit = fit.model_copy(update={"correction": correction})
    check = operators_with(ref, decode=fit)
    score = np.flatnonzero((cold | tiny) & test)
    beyond = (size > 1.2 * ref.l2_bytes) & (s >= 128)
    dropped = np.mean(~cold[beyond])
    note = "(batch, heads) not fitted; KV beyond L2 or contexts of at most 64 tokens; "
    note += f"{percent(float(dropped))} of the former dropped as impossible"
    ranges = {"batch": b, "context": s, "kv_heads": kv, "group": q / kv}
    hot = np.flatnonzero(~cold & (size <= 1.2 * ref.l2_bytes) & (s >= 128) & test & (b <= 512))
    return Fitted(
        fit,
        residual(predict(score), y[score], ranges, note),
        residual(predict(hot), y[hot], {"batch": b[hot], "megabytes": size[hot] / 1e6}) if len(hot) else None,
    )


def fit_prefill_attention(table: pd.DataFrame, ref: Reference) -> Fitted[PrefillAttentionFit]:
    """Fit causal prompt attention. `table`: batch, new, q_heads, kv_heads, seconds (head size 128)."""
    table = table[(table.q_heads <= GROUP * table.kv_heads) & (table.new >= SHORTEST_PROMPT)]
    b, s, q, kv, y = (table[c].to_numpy(float) for c in ("batch", "new", "q_heads", "kv_heads", "seconds"))
    test = held_out(heads_of(table))
    block, memory_efficiency = 128, 0.8
    blocks = np.ceil(s / block)

    def shown(p: Array, i: NDArray[Any]) -> Array:
        overhead, blend, single = np.exp(p[1]), 1.0 + np.exp(p[2]), squash(p[3])
        keys = block * (blocks[i] + 1.0) / 2.0 + overhead
        work = b[i] * blocks[i] * block * keys
        longest = block * (blocks[i] * block + overhead)
        total_s = 512.0 * q[i] * work / (ref.bf16_flop_per_s * np.interp(keys, KEYS, squash(p[4:])))
        longest_s = 512.0 * longest * ref.sm_count / (ref.bf16_flop_per_s * single)
        compute = (total_s**blend + longest_s**blend) ** (1 / blend)
        memory = b[i] * s[i] * (2 * q[i] + 2 * kv[i]) * 256.0 / (ref.memory_bytes_per_s * memory_efficiency)
        return np.asarray(np.exp(p[0]) * 1e-6 + np.maximum(compute, memory))

    rows = np.flatnonzero(~test)
    guess = (0.5, 0.14, 0.25, 0.33, 0.42, 0.5, 0.55, 0.58, 0.6)
    start = np.concatenate([np.log([8.0, 8.0, 1.0]), [unsquash(e) for e in guess]])

    def error(p: Array) -> Array:  # a small pull to the start keeps what the data do not tell where it is
        return np.concatenate([np.log(shown(p, rows) / y[rows]), 0.3 * (p - start)])

    p = least_squares(error, start, loss="soft_l1", f_scale=0.1).x
    fit = PrefillAttentionFit(
        launch_s=math.exp(p[0]) * 1e-6,
        block_tokens=block,
        overhead_tokens=math.exp(p[1]),
        blend=1.0 + math.exp(p[2]),
        keys=KEYS,
        efficiency=tuple(squash(p[4:]).tolist()),
        single_efficiency=float(squash(p[3])),
        memory_efficiency=memory_efficiency,
    )
    fit = validate(rounded(fit.model_dump()), PrefillAttentionFit)
    formula = operators_with(ref, prefill=fit)
    rows = np.flatnonzero(~test)
    expected = [formula.prefill_attention_s([(s[i], 0)] * int(b[i]), int(q[i]), int(kv[i]), 128) for i in rows]
    columns = dict(zip(PREFILL_AXES, (b[rows], s[rows], q[rows], q[rows] / kv[rows]), strict=True))
    correction = fit_correction(columns, PREFILL_KNOTS, np.log(y[rows] / expected))
    fit = fit.model_copy(update={"correction": correction})
    check = operators_with(ref, prefill=fit)
    ranges = {"new": s, "context": s, "group": q / kv}

    def score(rows: NDArray[Any], note: str) -> Residual:
        values = [check.prefill_attention_s([(s[i], 0)] * int(b[i]), int(q[i]), int(kv[i]), 128) for i in rows]
        return residual(values, y[rows], ranges, f"(batch, heads) not fitted; {note}")

    every = score(np.flatnonzero(test), "prompts of 16 tokens or more")
    long = score(np.flatnonzero(test & (s >= 1024)), "prompts of 1024 tokens or more")
    return Fitted(fit, every, long=long)
