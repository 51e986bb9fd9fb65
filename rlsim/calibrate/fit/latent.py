"""Latent attention: decode in the latent, and prompts.

Where the tables time a whole module, its products and elementwise kernels are those of the calibration's other fits,
and the constants are fitted to the sum: what they hold is the module less those. Errors are those of the sum. The head
counts of `UNSEEN` (whole degrees of tensor parallelism) judge a fit that has seen none of them, corrected by the number
of heads, or by blocks of heads for kernels that are made for these (on B200 the one for 32 heads takes a third longer
than those for 16 and 64); what decode is then costed with has seen all.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from rlsim.calibrate.fit.common import Array, as_written, columns_of, fit_logs, squash, unsquash
from rlsim.calibrate.fit.correction import fit_correction
from rlsim.calibrate.fit.kernels import Knots
from rlsim.calibrate.points import Fitted, join, point_rows, residual_of
from rlsim.cost.curve import DecodeCurve
from rlsim.cost.fits import LatentAttentionFit
from rlsim.cost.latent import BLEND, HEAD_BLOCK, LatentKernels, padded_heads
from rlsim.cost.operators import BF16_BYTES, Operators
from rlsim.layers import LatentAttention
from rlsim.precision import KV_BYTES, KvPrecision

#: What was measured: a layer of DeepSeek-V3.
MEASURED = LatentAttention(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
HIDDEN = 7168
UNSEEN = (16, 64)  # heads on one GPU
FEWEST_HEADS = 8  # of prompts: with fewer, L2 holds all weights of the layer that was measured over and over
TINY = 64  # tokens of the contexts that give the floor
PROMPT_KEYS = (3.0, 5.0, 7.0, 10.0, 12.0, 14.0)  # log2 of the mean keys per query, of prompts of 16 to 32,768 tokens
PARALLELISM = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
KNOTS = {
    "batch": [4.0**e for e in range(6)],
    "context": [2.0, *(4.0**e for e in range(2, 9)), 2.0**17],
    "heads": [1.0, 8.0, float(HEAD_BLOCK), 128.0],
}
#: Of kernels that are made for 16, 32 or 64 heads: fewer fill such a block in part, more take several.
BLOCK_KNOTS = {**KNOTS, "heads": [16.0, 32.0, float(HEAD_BLOCK)]}
ALL_KNOTS = {**KNOTS, "heads": [1.0, 8.0, 16.0, 32.0, 64.0, 128.0]}
#: What is fitted to prompts.
OF_PROMPTS = ("prompt_launch_s", "prompt_head_s", "prompt_keys", "prompt_speed", "latent_prompt_tokens")

#: Nothing fitted yet: no launches, everything at its peak, prompts as grouped queries.
_NONE = LatentAttentionFit(
    launch_s=0.0,
    sequence_s=0.0,
    head_s=0.0,
    parallelism=(0.0,),
    efficiency=(1.0,),
    flop_efficiency=1.0,
    prompt_launch_s=0.0,
    prompt_head_s=0.0,
    prompt_keys=(0.0,),
    prompt_speed=(1.0,),
    latent_prompt_tokens=0,
)


def kernel_latent_attention(
    decode: pd.DataFrame,
    prompts: pd.DataFrame,
    operators: Operators,
    *,
    module: bool,
    blocks: bool,
    kv: KvPrecision = "bf16",
) -> Fitted[LatentAttentionFit]:
    """Both tables (columns batch, heads, new, prior, seconds) of one GPU on a KV cache of `kv`, whose products, and
    attention of grouped queries in bf16, cost what `operators` say.

    `module`: they time all of a layer's attention with its products. Otherwise prompts are not fitted: what such a
    table times works in the latent, which engines do for prompts with cached tokens only. `blocks`: the kernel of
    decode is made for 16, 32 or 64 heads.
    """
    ref = operators.reference
    decode = decode.assign(context=decode.prior + decode.new)
    none = _NONE.model_copy(update={"kv_precision": kv})
    size = decode.batch * decode.context * MEASURED.cached_elements() * KV_BYTES[kv]
    rows = decode[(size > 1.2 * ref.l2_bytes) | (decode.context <= TINY)].reset_index(drop=True)
    beside = [_beside_s(operators, h, b) if module else 0.0 for h, b in zip(rows.heads, rows.batch, strict=True)]
    rows = rows.assign(beside_s=beside, absorbs=float(module))
    unseen = rows.heads.isin(UNSEEN).to_numpy(bool)
    seen, fit = rows[~unseen].reset_index(drop=True), _fit_decode(rows, operators, ALL_KNOTS, none)
    judged = _fit_decode(seen, operators, BLOCK_KNOTS if blocks else KNOTS, none)
    prompts = prompts[prompts.heads >= FEWEST_HEADS].reset_index(drop=True) if module else prompts.head(0)
    if module:
        tokens = prompts.batch * prompts.new
        beside = [_beside_s(operators, h, n) for h, n in zip(prompts.heads, tokens, strict=True)]
        prompts = prompts.assign(beside_s=beside)
        judged = _fit_prompts(prompts[~prompts.heads.isin(UNSEEN)], operators, judged)
    fit = as_written(fit.model_copy(update={name: getattr(judged, name) for name in OF_PROMPTS}))
    judged = as_written(judged)
    what = "whole module, its products by their own fit" if module else "kernel alone"
    note = f"heads of {UNSEEN[0]} and {UNSEEN[1]} on a GPU not fitted; {what}"
    shown = _decode_s(operators, judged, rows)
    name = "latent_attention" if kv == "bf16" else f"latent_attention_{kv}"
    points = point_rows(name, _labels(rows), rows.seconds, shown, unseen)
    residuals = {name: residual_of(points, rows[["batch", "context", "heads"]], note)}
    if module:
        shown = _prompts_s(operators, judged, prompts)
        unseen = prompts.heads.isin(UNSEEN).to_numpy(bool)
        extra = point_rows(f"{name}_prompts", _labels(prompts), prompts.seconds, shown, unseen)
        residuals[f"{name}_prompts"] = residual_of(extra, prompts[["new", "heads"]], note)
        points = join([points, extra])
    notes = () if module else ("prompts of latent attention: prompt attention of grouped queries, not measured",)
    return Fitted(fit, residuals, points, notes)


def _beside_s(operators: Operators, heads: int, tokens: float) -> float:
    """Seconds of a measured layer's products over all tokens, `kv_b` not among them, and of its elementwise kernels."""
    mine = MEASURED.linears(HIDDEN, MEASURED.heads // heads)
    products = sum(operators.gemm_s(tokens, linear.n_out, linear.k_in) for linear in mine if linear.name != "kv_b")
    return products + LatentKernels(operators, _NONE, MEASURED, heads).elementwise_s(tokens)


def _labels(rows: pd.DataFrame) -> list[str]:
    return [f"{row.batch} x {row.new} tokens on {row.prior}, {row.heads} heads" for row in rows.itertuples(index=False)]


def _decode_s(operators: Operators, fit: LatentAttentionFit, rows: pd.DataFrame) -> Array:
    found = np.empty(len(rows))
    for _, group in rows.groupby(["heads", "batch"]):
        heads, batch = int(group.heads.iloc[0]), int(group.batch.iloc[0])
        kernels = LatentKernels(operators, fit, MEASURED, heads)
        curve = DecodeCurve(batch, *kernels.decode_curve(batch))
        more = (1.0 - group.absorbs.iloc[0]) * kernels.absorb_s(batch)  # which a kernel's own table does not time
        found[group.index] = [curve.step_s(batch * context) - more for context in group.context]
    return np.asarray(found + rows.beside_s.to_numpy(float))


def _prompts_s(operators: Operators, fit: LatentAttentionFit, rows: pd.DataFrame) -> Array:
    kernels = {int(heads): LatentKernels(operators, fit, MEASURED, int(heads)) for heads in rows.heads.unique()}
    columns = zip(rows.heads.tolist(), rows.batch.tolist(), rows.new.tolist(), rows.prior.tolist(), strict=True)
    shown = [kernels[heads].prefill_s([(new, prior)] * batch) for heads, batch, new, prior in columns]
    return np.asarray(np.array(shown) + rows.beside_s.to_numpy(float))


def _fit_decode(rows: pd.DataFrame, operators: Operators, knots: Knots, none: LatentAttentionFit) -> LatentAttentionFit:
    """All constants of decode at once, then what they leave over of the time without products; the rest as in
    `none`."""
    b, s, h, beside, y = columns_of(rows, ("batch", "context", "heads", "beside_s", "seconds"))
    absorbs, gemm, ref = rows.absorbs.to_numpy(float), operators.fits.gemm, operators.reference
    least = MEASURED.cached_elements() * KV_BYTES[none.kv_precision] / ref.memory_bytes_per_s
    padded = np.array([padded_heads(int(heads)) for heads in h])
    flop_s = 2.0 * padded * (MEASURED.cached_elements() + MEASURED.kv_rank) / ref.bf16_flop_per_s
    weights = h * MEASURED.kv_rank * (MEASURED.nope_dim + MEASURED.v_dim)
    read = BF16_BYTES * weights / (ref.memory_bytes_per_s * gemm.memory_efficiency)

    def absorb(computes: float) -> Array:
        computed = 2.0 * weights * b / (ref.bf16_flop_per_s * computes)
        return np.asarray(absorbs * (2 * gemm.launch_s + np.maximum(read, computed)))

    def shown(p: Array) -> Array:
        launch_us = np.exp(p[0]) + np.exp(p[1]) * b + np.exp(p[2]) * b * h
        computes = squash(p[3])
        each = least / np.interp(np.log2(b), PARALLELISM, squash(p[4:]))
        each = (each**BLEND + (flop_s / computes) ** BLEND) ** (1.0 / BLEND)
        return np.asarray(beside + absorb(float(computes)) + launch_us * 1e-6 + each * b * s)

    start = np.concatenate([np.log([20.0, 0.02, 0.002]), np.full(1 + len(PARALLELISM), unsquash(0.7))])
    p = fit_logs(shown, y, start, pull=0.03).x
    update = {
        "launch_s": math.exp(p[0]) * 1e-6,
        "sequence_s": math.exp(p[1]) * 1e-6,
        "head_s": math.exp(p[2]) * 1e-6,
        "parallelism": PARALLELISM,
        "efficiency": tuple(squash(p[4:]).tolist()),
        "flop_efficiency": float(squash(p[3])),
    }
    fit = none.model_copy(update=update)
    other = beside + absorb(fit.flop_efficiency)
    kernel = _decode_s(operators, as_written(fit), rows.reset_index(drop=True)) - other
    left = np.log(np.maximum(y - other, 0.1 * kernel) / kernel)
    return fit.model_copy(update={"correction": fit_correction(rows, knots, left)})


def _fit_prompts(rows: pd.DataFrame, operators: Operators, fit: LatentAttentionFit) -> LatentAttentionFit:
    """The constants of long prompts, and which prompts work in the latent: the length that suits the rows best."""
    tokens, y = (rows.batch * rows.new * rows.heads).to_numpy(float), rows.seconds.to_numpy(float)
    keys = np.log2(rows.new.to_numpy(float) / 2.0)
    bare = {at: fit.model_copy(update={"latent_prompt_tokens": at}) for at in (0, 128, 256, 512, 1024)}
    start = np.concatenate([[math.log(50e-6), math.log(1e-10)], np.full(len(PROMPT_KEYS), math.log(2.0))])
    found = {}
    for at, one in bare.items():
        slow = _prompts_s(operators, one.model_copy(update={"prompt_speed": (1.0,)}), rows)
        fast = _prompts_s(operators, one.model_copy(update={"prompt_speed": (10.0,)}), rows)
        attention, beside = (slow - fast) / 0.9, slow - (slow - fast) / 0.9

        def shown(p: Array, attention: Array = attention, beside: Array = beside) -> Array:
            speed = np.interp(keys, PROMPT_KEYS, _speeds(p))
            return np.asarray(np.exp(p[0]) + np.exp(p[1]) * tokens + attention / speed + beside)

        found[at] = fit_logs(shown, y, start, pull=0.3)
    best = min(found, key=lambda at: float(found[at].cost))
    p = found[best].x
    update = {
        "prompt_launch_s": math.exp(p[0]),
        "prompt_head_s": math.exp(p[1]),
        "prompt_keys": PROMPT_KEYS,
        "prompt_speed": tuple(_speeds(p).tolist()),
    }
    return bare[best].model_copy(update=update)


def _speeds(p: Array) -> Array:
    """At `PROMPT_KEYS`; what no row tells stays within what can be meant."""
    return np.asarray(np.clip(np.exp(p[2:]), 0.5, 5.0))
