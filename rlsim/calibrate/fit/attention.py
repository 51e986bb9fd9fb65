"""Attention with grouped queries: which rows of a table are fitted, over which axes, and how far a fit is off.

Each size of heads has kernels of its own. Rows are held out by batch and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from rlsim.calibrate.fit.common import (
    FULL,
    KNOTS,
    Kernel,
    Knots,
    Mask,
    check_enough,
    columns_of,
    compared,
    distinct,
    enough_for_all_constants,
    few_constants,
    held_out,
    held_out_rows,
    percent,
    rounded,
    soft_l1,
)
from rlsim.calibrate.fit.kernel import fit_kernel, stacked
from rlsim.calibrate.measurements import ATTENTION, Fitted, Measurements, join, point_rows, residual_of
from rlsim.cost.calibration import Engine, Reference, Residual
from rlsim.cost.fits import AttentionFit, KernelFit
from rlsim.cost.kernel import Work
from rlsim.cost.operators import DecodeKernels, PromptKernels
from rlsim.models.precision import KV_BYTES, KvPrecision

HEAD_DIM = 128  # the size of heads that stands for those that were not measured
OTHER_HEAD_DIMS = (64, 256)  # of gpt-oss and gemma: they have kernels of their own
GROUP = 8  # query heads per KV head in the models RL runs use
PLAUSIBLE = 0.95  # rows that would need more of the peak bandwidth were served from L2 in part
SHORTEST_PROMPT = 16  # tokens of the shortest prompts that are fitted where there are many
LONG_PROMPT = 1024  # tokens of the prompts that have a residual of their own
#: Windows of this size are Llama 4's chunks: SGLang's rows take the time of chunks, not of windows, or on Blackwell of
#: all tokens. A prompt's chunks are sequences of their own to rlsim.
CHUNK = 8192
#: Few prompts tell the share of the bandwidth: a free one stands for something else and does not carry to other GPUs.
OF_PROMPTS = {"held": {"memory": 0.8}, "blend": 2.0}
MASKS = 0.1  # of the time at the peak of pairs that a window masks out: with less the kernel leaves them out
WINDOWS_NOTE = "sequences beyond their window; (batch, heads) not fitted; KV from L2 too"
#: Where the search for what a unit of work takes begins: KV heads and sequences of decode, queries of prompts, and of
#: pairs that a window masks out the share of the time that they would take at the peak.
ADDED_S = {"tiles": 1e-8, "sequences": 1e-8, "queries": 1e-11, "masked": 0.1}


def _window(row: Any) -> int | None:
    return int(row.window) if hasattr(row, "window") else None


def _of_prompts(row: Any) -> tuple[list[tuple[float, float]], int, int, int, int | None]:
    chunks = [(float(row.new), float(row.prior))] * int(row.batch)
    return chunks, int(row.q_heads), int(row.kv_heads), int(row.head_dim), _window(row)


def _decode_s(fit: AttentionFit, ref: Reference) -> Callable[[Any], float]:
    curve = cache(DecodeKernels(fit, ref).curve)

    def seconds(row: Any) -> float:
        window = _window(row)
        made = curve(int(row.batch), int(row.kv_heads), int(row.head_dim), window)
        return made.step_s(row.batch * (window or row.context))

    return seconds


def _prompts_s(fit: AttentionFit, ref: Reference) -> Callable[[Any], float]:
    kernels = PromptKernels(fit, ref)
    return lambda row: kernels.time_s(*_of_prompts(row))


DECODE = Kernel(
    "decode_attention",
    _decode_s,
    lambda row: f"{row.batch:.0f} x {row.context:.0f} tokens, {row.q_heads:.0f}/{row.kv_heads:.0f} heads",
)
PROMPTS = Kernel(
    "prefill_attention",
    _prompts_s,
    lambda row: (
        f"{row.batch:.0f} x {row.new:.0f} tokens{f' on {row.prior:.0f}' if row.prior else ''}, "
        f"{row.q_heads:.0f}/{row.kv_heads:.0f} heads"
    ),
)


def attention_kernels(
    measured: Measurements, ref: Reference, engine: Engine, cold: bool
) -> dict[str, Fitted[AttentionFit]]:
    """Those of every table in `measured`, by its name; on an FP8 cache only if decode and prompts both were."""
    found, fp8 = {}, {operator: measured.table(f"{operator}_fp8") for operator in ATTENTION}
    fp8 = {operator: table[table.head_dim == HEAD_DIM] for operator, table in fp8.items()}  # one fit, for files' size
    if all(map(len, fp8.values())):
        for operator, table in fp8.items():
            found[f"{operator}_fp8"] = kernel_attention(operator, table, ref, engine, cold, "fp8")
    for operator in ATTENTION:
        if operator in measured:
            found[operator] = kernel_attention(operator, measured.table(operator), ref, engine, cold)
    return found


def heads_of(table: pd.DataFrame) -> pd.Series:
    """The key by which attention rows are held out: batch and heads."""
    return table.batch.astype(str) + "/" + table.q_heads.astype(str) + "/" + table.kv_heads.astype(str)


def usual_groups(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    """Medians over rows of the same shape with at most 8 query heads for each KV head; raises `CalibrationError` if
    they are too few. Of decode the longest context is no part of the shape."""
    rows = distinct(table, operator, [key for key in ATTENTION[operator] if key != "longest"])
    rows = rows[rows.q_heads <= GROUP * rows.kv_heads].reset_index(drop=True)
    check_enough(operator, len(rows), f"with at most {GROUP} query heads for each KV head")
    return rows


def kernel_attention(
    operator: str, table: pd.DataFrame, ref: Reference, engine: Engine, cold: bool, kv: KvPrecision = "bf16"
) -> Fitted[AttentionFit]:
    """Decode or prompt attention of `table` (columns as in `KEYS`, seconds), for heads of 128 (or of the commonest
    size), and beside them for those of `OTHER_HEAD_DIMS` with enough rows.

    Of decode equal contexts give the fit, unequal ones the skew; without those there is none. `cold`: its KV was
    brought from memory, so every row counts; otherwise rows whose KV the L2 may have held are left out, as
    `decode_rows` says. Of many prompts those with nothing cached are fitted and compared with the others; few are all
    fitted.
    """

    def fitted(rows: pd.DataFrame) -> Fitted[AttentionFit]:
        decode = operator == DECODE.operator
        return _decode(rows, ref, engine, cold, kv) if decode else _prompts(rows, ref, kv)

    rows = table.head_dim.value_counts()
    others = [dim for dim in OTHER_HEAD_DIMS if HEAD_DIM in rows.index and rows.get(dim, 0) >= FULL]
    dim = HEAD_DIM if HEAD_DIM in rows.index else int(rows.index[0])
    unused = sorted(int(one) for one in rows.index if one != dim and one not in others)
    notes = f"{operator}: heads of {dim}; rows with heads of {', '.join(map(str, unused))} are left out"
    own = {size: fitted(table[table.head_dim == size].reset_index(drop=True)) for size in (dim, *others)}
    found, heads = own[dim], {size: one.fit.heads[size] for size, one in own.items()}
    more = {f"{operator}_heads_of_{size}": own[size].residuals[operator] for size in others}
    residuals, points = {**found.residuals, **more}, found.points
    if kv != "bf16":
        named = f"{operator}_{kv}"
        residuals = {name.replace(operator, named): item for name, item in residuals.items()}
        points = points.assign(operator=points.operator.str.replace(operator, named))
    said = (*((notes,) if unused else ()), *found.notes)
    return Fitted(found.fit.model_copy(update={"heads": heads}), residuals, points, said)


def _works(operator: str, kv: KvPrecision, ref: Reference, rows: pd.DataFrame) -> Work:
    each: Iterable[Any] = rows.itertuples(index=False)
    if operator == PROMPTS.operator:
        prompts = PromptKernels(_of(kv, {}), ref)
        return stacked(prompts.work(*_of_prompts(row)).work for row in each)
    decode = DecodeKernels(_of(kv, {}), ref)
    shapes = ((row, row.batch * (_window(row) or row.context)) for row in each)
    return stacked(decode.work(int(row.batch), read, int(row.kv_heads), int(row.head_dim)) for row, read in shapes)


def _kernel(operator: str, kv: KvPrecision, ref: Reference, rows: pd.DataFrame, knots: Knots) -> KernelFit:
    shape = rows.assign(sequences=rows.batch, tiles=rows.batch * rows.kv_heads, group=rows.q_heads / rows.kv_heads)
    own: dict[str, Any] = OF_PROMPTS if operator == PROMPTS.operator else {}
    work, seconds = _works(operator, kv, ref, rows), rows.seconds.to_numpy(float)
    fit = fit_kernel(work, seconds, shape, knots, added_s=ADDED_S, **own)
    if fit.added_s.get("masked", MASKS) >= MASKS:
        return fit
    unmasked = {name: amount for name, amount in work.added.items() if name != "masked"}
    return fit_kernel(work._replace(added=unmasked), seconds, shape, knots, added_s=ADDED_S, **own)


def _of(kv: KvPrecision, heads: dict[int, KernelFit]) -> AttentionFit:
    return AttentionFit.model_construct(kv_precision=kv, heads=heads, windows={}, skew=0.0)


def _decode(table: pd.DataFrame, ref: Reference, engine: Engine, cold: bool, kv: KvPrecision) -> Fitted[AttentionFit]:
    apart = table.longest > table.context * 1.0001
    equal, unequal = table[~apart], table[apart]
    equal = usual_groups(equal, "decode_attention")
    test, tiny, streamed, beyond = decode_rows(equal, ref, kv, include_hot=cold)
    used = tiny | streamed
    full = enough_for_all_constants(ref, used & ~test) and (tiny & ~test).sum() >= 4 and (used & test).any()
    if full and (streamed & ~tiny & ~test).sum() >= 12:
        note = "KV beyond L2 or contexts of at most 64 tokens; "
        note += f"{percent(float(np.mean(~streamed[beyond])))} of the former dropped as impossible"
    else:
        used, test, note = np.ones(len(equal), dtype=bool), held_out_rows(heads_of(equal)), ""
    knots = KNOTS["decode_attention_trtllm" if engine == "trtllm" else "decode_attention"]
    kernel = _kernel(DECODE.operator, kv, ref, equal[used & ~test], knots)
    fit = _of(kv, {int(equal.head_dim.iloc[0]): kernel})
    points = compared(DECODE, fit, ref, equal[used], test[used])
    ranges = equal[["batch", "context", "kv_heads"]].assign(group=equal.q_heads / equal.kv_heads)
    note = f"(batch, heads) not fitted; {note or few_constants(points)}"
    residuals = {"decode_attention": residual_of(points, ranges, note)}
    if unequal.empty:
        return Fitted(fit, residuals, points, ("skew of unequal contexts was not measured and is taken as none",))
    skew, extra = measured_skew(fit, ref, unequal, equal)
    note = "unequal contexts, rows not fitted"
    residuals["decode_attention_unequal"] = residual_of(extra, unequal[["batch", "context"]], note)
    note = f"skew of unequal contexts: {percent(skew)} of the padding, fitted to {len(unequal)} measured rows"
    return Fitted(fit.model_copy(update={"skew": rounded(skew)}), residuals, join([points, extra]), (note,))


class DecodeRows(NamedTuple):
    """Which rows of a table count for what, as masks."""

    test: Mask  # held out: every row of some (batch, heads)
    tiny: Mask  # contexts of at most 64 tokens, in L2: they give the floor
    streamed: Mask  # KV beyond 1.2 L2, and no faster than memory: they give the rest
    beyond: Mask  # KV beyond 1.2 L2, however fast


def kv_bytes(table: pd.DataFrame, kv: KvPrecision = "bf16") -> pd.Series:
    """What decode reads of the cache in each row."""
    return 2.0 * KV_BYTES[kv] * table.batch * table.context * table.kv_heads * table.head_dim


def decode_rows(
    table: pd.DataFrame, ref: Reference, kv: KvPrecision = "bf16", *, include_hot: bool = False
) -> DecodeRows:
    """The rows of `table`; with `include_hot` whatever L2 holds counts.

    Rows that imply more than 95% of the peak bandwidth cannot have read their KV from memory and are not streamed,
    however large (TensorRT-LLM's grouped-query rows).
    """
    s, y = columns_of(table, ("context", "seconds"))
    size = kv_bytes(table, kv).to_numpy(float)
    plausible = (size / y < PLAUSIBLE * ref.memory_bytes_per_s) | include_hot
    large, long = size > 1.2 * ref.l2_bytes, s >= 128
    tiny = (s <= 64) & (size < 0.5 * ref.l2_bytes)
    return DecodeRows(held_out(heads_of(table)), tiny, (large | include_hot) & long & plausible, large & long)


def _prompts(table: pd.DataFrame, ref: Reference, kv: KvPrecision) -> Fitted[AttentionFit]:
    table = usual_groups(table, "prefill_attention")
    cached = table[table.prior > 0]
    whole = table[(table.prior <= 0) & (table.new >= SHORTEST_PROMPT)].reset_index(drop=True)
    test = held_out(heads_of(whole)) if len(whole) else np.zeros(0, dtype=bool)
    long = (whole.new >= LONG_PROMPT).to_numpy()
    full = enough_for_all_constants(ref, ~test) and (test & long).any()
    if full:
        table, note = whole, "prompts of 16 tokens or more"
    else:
        test, cached, note = held_out_rows(heads_of(table)), cached.head(0), ""
    kernel = _kernel(PROMPTS.operator, kv, ref, table[~test], KNOTS["prefill_attention"])
    fit = _of(kv, {int(table.head_dim.iloc[0]): kernel})
    points = compared(PROMPTS, fit, ref, table, test)
    ranges = table[["new"]].assign(context=table.new + table.prior, group=table.q_heads / table.kv_heads)
    unseen = "(batch, heads) not fitted"
    residuals = {"prefill_attention": residual_of(points, ranges, f"{unseen}; {note or few_constants(points)}")}
    if full:
        note = f"{unseen}; prompts of {LONG_PROMPT} tokens or more"
        residuals["prefill_attention_long"] = residual_of(points[long], ranges, note)
    if len(cached):
        extra = compared(PROMPTS, fit, ref, cached, True, "prefill_attention_cached")
        note = "chunks on cached tokens, none fitted"
        residuals["prefill_attention_cached"] = residual_of(extra, cached[["new", "prior"]], note)
        points = join([points, extra])
    return Fitted(fit, residuals, points)


def with_windows(
    fit: AttentionFit, ref: Reference, operator: str, table: pd.DataFrame, engine: Engine
) -> tuple[AttentionFit, dict[str, Residual]]:
    """`fit` of an operator with kernels of `table` (batch, tokens, window, q_heads, kv_heads, head_dim, seconds), and
    their residuals by size of window, of batches and heads that no fit has seen."""
    used = (table.q_heads <= GROUP * table.kv_heads) & table.head_dim.isin((HEAD_DIM, *OTHER_HEAD_DIMS))
    decode, chunks = operator == DECODE.operator, (table.window == CHUNK) & (engine == "sglang")
    rows = table[used if decode else used & ~chunks].assign(context=table.tokens, new=table.tokens, prior=0)
    told = ~chunks[rows.index].to_numpy()
    if not told.any():
        return fit, {}
    rows, test = rows[told].reset_index(drop=True), held_out(heads_of(rows))[told]
    own = {int(dim): ~test & (rows.head_dim == dim) for dim in sorted(rows.head_dim.unique())}
    name = f"{operator}_windows"
    windows = {dim: _kernel(operator, "bf16", ref, rows[mask], KNOTS[name]) for dim, mask in own.items() if mask.any()}
    fit = fit.model_copy(update={"windows": windows})
    kernel, unseen, residuals = DECODE if decode else PROMPTS, rows[test], {}
    sizes = {f"_of_{size}": one for size, one in unseen.groupby("window")} if unseen.window.nunique() > 1 else {}
    for which, some in {"": unseen, **sizes}.items():  # many rows of one size would hide few ones of another
        points = compared(kernel, fit, ref, some, True, name + which)
        ranges = some[["batch", "tokens", "window", "head_dim"]]
        residuals[name + which] = residual_of(points, ranges, WINDOWS_NOTE)
    return fit, residuals


# Unequal contexts -----------------------------------------------------------------------------------------------------


def measured_skew(
    fit: AttentionFit, ref: Reference, unequal: pd.DataFrame, equal: pd.DataFrame
) -> tuple[float, pd.DataFrame]:
    """The share of the padding that brings equal contexts to the times of unequal ones, and the points with it.

    Equal contexts of the same batch and heads, if measured, say what the padding costs; else the fit does. Every
    fourth row is held out, if there are eight or more.
    """
    heads = ["batch", "q_heads", "kv_heads"]
    measured = {key: rows.sort_values("context") for key, rows in equal.groupby(heads)}
    rows = list(unequal[[*heads, "context", "longest", "seconds"]].itertuples(index=False))
    curve, (dim,) = cache(DecodeKernels(fit, ref).curve), fit.heads

    def shown(row: tuple[float, ...], skew: float) -> float:
        b, q, kv, context, longest, _ = row
        at = context + skew * (longest - context)
        same = measured.get((b, q, kv))
        if same is not None and len(same) >= 2 and same.context.iloc[0] <= at <= same.context.iloc[-1]:
            return float(np.interp(at, same.context, same.seconds))
        return curve(int(b), int(kv), dim).step_s(b * at)

    test = np.arange(len(rows)) % 4 == 3 if len(rows) >= 8 else np.zeros(len(rows), dtype=bool)
    train = [row for row, unseen in zip(rows, test, strict=True) if not unseen]

    def loss(skew: float) -> float:
        return float(np.sum(soft_l1(np.array([np.log(shown(row, skew) / row[-1]) for row in train]))))

    best = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    best = min((0.0, best, 1.0), key=loss)
    labels = [f"{r[0]:.0f} x {r[3]:.0f} tokens, longest {r[4]:.0f}, {r[1]:.0f}/{r[2]:.0f} heads" for r in rows]
    values = [shown(row, best) for row in rows]
    return best, point_rows("decode_attention_unequal", labels, [row[-1] for row in rows], values, test)
