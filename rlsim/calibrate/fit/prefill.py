"""Prompt attention: blocks of queries over the SMs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import OptimizeResult

from rlsim.calibrate.fit.common import (
    Array,
    as_written,
    columns_of,
    fit_logs,
    held_out,
    held_out_rows,
    squash,
    unsquash,
)
from rlsim.calibrate.fit.heads import HEAD_DIM, heads_of, of_every_head_dim, usual_groups
from rlsim.calibrate.fit.kernels import (
    Kernel,
    compared,
    corrected,
    distinct,
    enough_for_all_constants,
    few_constants,
    predict,
)
from rlsim.calibrate.points import Fitted, join, residual_of
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import PrefillAttentionFit

SHORTEST_PROMPT = 16  # tokens of the shortest prompts of the full fit
LONG_PROMPT = 1024  # tokens of the prompts that have a residual of their own
BLOCK = 128  # queries of one block
KEYS = (128.0, 192.0, 320.0, 576.0, 1088.0, 2112.0, 4160.0, 8256.0)
MEMORY_EFFICIENCY = 0.8
PACKED_GAIN = 0.1  # of the mean error, for the less simple formula
SMALL_BLOCKS = (16, 64, 128)  # queries per block: the one that suits the rows best is kept
SMALL_BLEND = 4.0
KNOTS = {
    "sequences": [4.0**e for e in range(5)],
    "new": [2.0**e for e in range(4, 15)],
    "q_heads": [1.0, 4.0, 16.0, 64.0],
    "group": [1.0, 2.0, 8.0],
}
SMALL_KNOTS = {**KNOTS, "new": [2.0**e for e in range(15)]}


def _label(row: Any) -> str:
    cached = f" on {row.prior:.0f}" if row.prior else ""
    return f"{row.batch:.0f} x {row.new:.0f} tokens{cached}, {row.q_heads:.0f}/{row.kv_heads:.0f} heads"


KERNEL = Kernel(
    "prefill_attention",
    lambda operators, row: operators.prefill_attention_s(
        [(float(row.new), float(row.prior))] * int(row.batch), int(row.q_heads), int(row.kv_heads), HEAD_DIM
    ),
    _label,
)


def kernel_prefill_attention(table: pd.DataFrame, ref: Reference) -> Fitted[PrefillAttentionFit]:
    """Prompt attention of `table` (columns as in `KEYS`, seconds).

    The full fit takes rows with nothing cached and is compared with the others; few rows are all fitted. Heads of other
    sizes that models have get a fit of their own where there are enough rows.
    """
    return of_every_head_dim(table, ref, "prefill_attention", _of_one_head_dim)


def _of_one_head_dim(table: pd.DataFrame, ref: Reference) -> Fitted[PrefillAttentionFit]:
    table = distinct(table, "prefill_attention", ["batch", "new", "prior", "q_heads", "kv_heads"])
    table = usual_groups(table, "prefill_attention")
    table = table.assign(sequences=table.batch, context=table.new + table.prior, group=table.q_heads / table.kv_heads)
    cached = table[table.prior > 0]
    whole = table[(table.prior <= 0) & (table.new >= SHORTEST_PROMPT)].reset_index(drop=True)
    test = held_out(heads_of(whole)) if len(whole) else np.zeros(0, dtype=bool)
    long = (whole.new >= LONG_PROMPT).to_numpy()
    full = enough_for_all_constants(ref, ~test) and (test & long).any()
    if full:
        table, note = whole, "prompts of 16 tokens or more"
        fit = _plain_or_packed(table[~test], ref)
    else:
        test, cached = held_out_rows(heads_of(table)), cached.head(0)
        fit, note = small_prefill_attention(table[~test], ref), ""
    points = compared(KERNEL, fit, ref, table, test)
    ranges = table[["new", "context", "group"]]
    unseen = "(batch, heads) not fitted"
    residuals = {"prefill_attention": residual_of(points, ranges, f"{unseen}; {note or few_constants(points)}")}
    if full:
        note = f"{unseen}; prompts of {LONG_PROMPT} tokens or more"
        residuals["prefill_attention_long"] = residual_of(points[long], ranges, note)
    if len(cached):
        extra = compared(KERNEL, fit, ref, cached, True, "prefill_attention_cached")
        note = "chunks on cached tokens, none fitted"
        residuals["prefill_attention_cached"] = residual_of(extra, cached[["new", "context"]], note)
        points = join([points, extra])
    return Fitted(fit, residuals, points)


def _plain_or_packed(rows: pd.DataFrame, ref: Reference) -> PrefillAttentionFit:
    """Blocks of one head's queries, or of those of all heads that share a KV head where these describe `rows` better
    by `PACKED_GAIN`. FlashAttention 3 packs heads so, which shows in prompts of few tokens."""
    plain, packed = (fit_prefill_attention(rows, ref, packed=one) for one in (False, True))
    shown = [np.log(predict(KERNEL, fit, ref, rows) / rows.seconds.to_numpy(float)) for fit in (plain, packed)]
    errors = [float(np.abs(one).mean()) for one in shown]
    return packed if errors[1] < (1.0 - PACKED_GAIN) * errors[0] else plain


def fit_prefill_attention(rows: pd.DataFrame, ref: Reference, *, packed: bool = False) -> PrefillAttentionFit:
    """All constants of causal prompt attention with nothing cached, from the columns of `KNOTS`, batch, kv_heads and
    seconds (head size 128). `packed`: blocks hold queries of all heads that share a KV head."""
    b, s, q, kv, y = columns_of(rows, ("batch", "new", "q_heads", "kv_heads", "seconds"))
    heads = q / kv if packed else np.ones_like(q)
    block, blocks = BLOCK / heads, np.ceil(s * heads / BLOCK)

    def shown(p: Array) -> Array:
        overhead, blend, single = np.exp(p[1]), 1.0 + np.exp(p[2]), squash(p[3])
        keys = block * (blocks + 1.0) / 2.0 + overhead
        work = b * blocks * block * keys
        longest = BLOCK * (blocks * block + overhead)
        total_s = 512.0 * q * work / (ref.bf16_flop_per_s * np.interp(keys, KEYS, squash(p[4:])))
        longest_s = 512.0 * longest * ref.sm_count / (ref.bf16_flop_per_s * single)
        compute = (total_s**blend + longest_s**blend) ** (1 / blend)
        memory = b * s * (2 * q + 2 * kv) * 256.0 / (ref.memory_bytes_per_s * MEMORY_EFFICIENCY)
        return np.asarray(np.exp(p[0]) * 1e-6 + np.maximum(compute, memory))

    guess = (0.5, 0.14, 0.25, 0.33, 0.42, 0.5, 0.55, 0.58, 0.6)
    start = np.concatenate([np.log([8.0, 8.0, 1.0]), [unsquash(e) for e in guess]])
    p = fit_logs(shown, y, start, pull=0.3).x
    fit = PrefillAttentionFit(
        launch_s=math.exp(p[0]) * 1e-6,
        block_tokens=BLOCK,
        packed=packed,
        overhead_tokens=math.exp(p[1]),
        blend=1.0 + math.exp(p[2]),
        keys=KEYS,
        efficiency=tuple(squash(p[4:]).tolist()),
        single_efficiency=float(squash(p[3])),
        memory_efficiency=MEMORY_EFFICIENCY,
    )
    return corrected(KERNEL, as_written(fit), ref, rows, KNOTS)


def small_prefill_attention(rows: pd.DataFrame, ref: Reference) -> PrefillAttentionFit:
    """A launch time and a share of the peak, of all SMs and of one: for tables that cannot tell more. Chunks on
    `prior` cached tokens count like any other."""
    b, s, prior, q, kv, y = columns_of(rows, ("batch", "new", "prior", "q_heads", "kv_heads", "seconds"))
    moved = b * (s * 2 * q + (s + prior) * 2 * kv) * 256.0
    memory = moved / (ref.memory_bytes_per_s * MEMORY_EFFICIENCY)

    def fitted(block: int) -> OptimizeResult:
        blocks = np.ceil(s / block)
        end = prior + blocks * block
        total = 512.0 * q * b * blocks * block * (prior + block + end) / 2.0 / ref.bf16_flop_per_s
        longest = 512.0 * block * end * ref.sm_count / ref.bf16_flop_per_s

        def shown(p: Array) -> Array:
            all_s, one_s = total / squash(p[1]), longest / squash(p[2])
            compute = (all_s**SMALL_BLEND + one_s**SMALL_BLEND) ** (1.0 / SMALL_BLEND)
            return np.asarray(np.exp(p[0]) + np.maximum(compute, memory))

        single = 0.9 if ref.sm_count == 1 else 0.5
        start = np.array([math.log(0.5 * y.min()), unsquash(0.3), unsquash(single)])
        return fit_logs(shown, y, start, pull=0.02, within=12.0)

    found = {block: fitted(block) for block in SMALL_BLOCKS}
    block = min(found, key=lambda one: float(found[one].cost))
    p = found[block].x
    fit = PrefillAttentionFit(
        launch_s=math.exp(p[0]),
        block_tokens=block,
        overhead_tokens=0.0,
        blend=SMALL_BLEND,
        keys=(float(block),),
        efficiency=(float(squash(p[1])),),
        single_efficiency=float(squash(p[2])),
        memory_efficiency=MEMORY_EFFICIENCY,
    )
    return corrected(KERNEL, as_written(fit), ref, rows, SMALL_KNOTS)
