"""Operators fitted from measurements: GEMM, attention, elementwise kernels, collectives, each with its points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize_scalar

from rlsim.calibrate.fit.attention import (
    GROUP,
    SHORTEST_PROMPT,
    decode_rows,
    fit_decode_attention,
    fit_prefill_attention,
    heads_of,
)
from rlsim.calibrate.fit.collectives import INTER_EFFICIENCY, fit_collective
from rlsim.calibrate.fit.common import Array, held_out, operators_with, percent, rounded
from rlsim.calibrate.fit.elementwise import fit_elementwise
from rlsim.calibrate.fit.gemm import fit_gemm, gemm_rows
from rlsim.calibrate.fit.skew import derived_skew
from rlsim.calibrate.points import join, point_rows, residual_of
from rlsim.calibrate.small import small_decode_attention, small_gemm, small_prefill_attention
from rlsim.cost.calibration import (
    CollectiveFit,
    CollectiveFits,
    DecodeAttentionFit,
    Engine,
    GemmFit,
    MemoryOpFit,
    PrefillAttentionFit,
    Reference,
    Residual,
)
from rlsim.cost.collectives import Collectives
from rlsim.cost.operators import Operators
from rlsim.errors import CalibrationError
from rlsim.hardware import Cluster
from rlsim.schema import Schema

F = TypeVar("F", bound=Schema, covariant=True)

#: Fewest distinct rows that a fit is made of; below that there is an error, not a guess.
FEWEST = {"gemm": 8, "decode_attention": 6, "prefill_attention": 5, "memory_bound": 4, "collective": 3}
FULL = 60  # rows to fit from which the full fits, with their dozen constants, are used
SMS = 8  # fewer are no GPU: the full fits are made of waves of blocks over SMs
HEAD_DIM = 128  # the head size of the full fits' tables
MANY_SIZES = 16  # of one collective, from which knots are fewer than sizes
FITTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DERIVED = ("broadcast", "send_recv")  # the simulator derives these from all-gather


@dataclass(frozen=True)
class KernelFit(Generic[F]):
    """A fit, its residuals by name, its points, and what was derived rather than measured."""

    fit: F
    residuals: dict[str, Residual]
    points: pd.DataFrame
    notes: tuple[str, ...] = field(default=())


def kernel_gemm(table: pd.DataFrame, ref: Reference, cold: bool) -> KernelFit[GemmFit]:
    """Products of `table` (m, n, k, seconds).

    `cold`: their weights were brought from memory, so every row counts; otherwise rows whose weights the L2 may have
    held are left out, as `fit_gemm` says.
    """
    table = _distinct(table, "gemm", ["m", "n", "k"])
    m, n, k, y = (table[name].to_numpy(float) for name in ("m", "n", "k", "seconds"))
    seen = ref.model_copy(update={"l2_bytes": 1.0}) if cold else ref
    test, hot, streamed = gemm_rows(table, seen)
    residuals: dict[str, Residual] = {}
    full = ref.sm_count >= SMS and (~test & ~hot).sum() >= FULL
    if full and streamed.sum() >= 4 and (test & ~hot).any():
        with np.errstate(divide="ignore"):  # no slope at all: the fit takes its upper bound
            fitted = fit_gemm(table, seen)
        fit, residuals["gemm"] = fitted.fit, fitted.residual
    else:
        test, hot = _held_out_rows(table.n.astype(str) + "x" + table.k.astype(str)), np.zeros(len(y), dtype=bool)
        fit = small_gemm({"m": m[~test], "n": n[~test], "k": k[~test], "seconds": y[~test]}, ref)
    check = operators_with(ref, gemm=fit)
    rows = np.flatnonzero(~hot)
    values = [check.gemm_s(m[i], int(n[i]), int(k[i])) for i in rows]
    labels = [f"{m[i]:.0f} x {n[i]:.0f} x {k[i]:.0f}" for i in rows]
    points = point_rows("gemm", labels, y[rows], values, test[rows])
    if not residuals:
        residuals["gemm"] = residual_of(points, {"m": m, "n": n, "k": k}, f"shapes (n, k) not fitted; {_few(points)}")
    return KernelFit(fit, residuals, points)


def kernel_decode_attention(
    table: pd.DataFrame, ref: Reference, engine: Engine, cold: bool
) -> KernelFit[DecodeAttentionFit]:
    """Decode attention of `table` (columns as in `KEYS`, seconds), unequal contexts apart.

    Equal contexts give the fit, unequal ones the skew; without those the skew is derived. `cold` as in `kernel_gemm`.
    """
    table, dim, notes = _one_head_dim(table, "decode_attention")
    ref = _per_head_of_128(ref, dim)
    equal = table[table.longest <= table.context * 1.0001]
    unequal = table[table.longest > table.context * 1.0001]
    equal = _distinct(equal, "decode_attention", ["batch", "context", "q_heads", "kv_heads"])
    equal = equal[equal.q_heads <= GROUP * equal.kv_heads].reset_index(drop=True)
    _enough("decode_attention", len(equal), "with at most 8 query heads for each KV head")
    b, s, q, kv, y = (equal[c].to_numpy(float) for c in ("batch", "context", "q_heads", "kv_heads", "seconds"))
    test, tiny, streamed = decode_rows(equal, ref, include_hot=cold)
    used = tiny | streamed
    skew = derived_skew(ref, uniform=engine == "trtllm")
    residuals: dict[str, Residual] = {}
    enough = ref.sm_count >= SMS and (used & ~test).sum() >= FULL and (tiny & ~test).sum() >= 4 and (used & test).any()
    if enough and (streamed & ~tiny & ~test).sum() >= 12:
        fitted = fit_decode_attention(equal, ref, skew, include_hot=cold)
        fit, residuals["decode_attention"] = fitted.fit, fitted.residual
    else:
        used, test = np.ones(len(y), dtype=bool), _held_out_rows(heads_of(equal))
        columns = {"batch": b, "context": s, "q_heads": q, "kv_heads": kv, "seconds": y}
        fit = small_decode_attention({name: values[~test] for name, values in columns.items()}, ref, skew)
    check = operators_with(ref, decode=fit)
    rows = np.flatnonzero(used)
    values = [check.decode_attention_s(int(b[i]), b[i] * s[i], int(q[i]), int(kv[i]), HEAD_DIM) for i in rows]
    labels = [f"{b[i]:.0f} x {s[i]:.0f} tokens, {q[i]:.0f}/{kv[i]:.0f} heads" for i in rows]
    points = point_rows("decode_attention", labels, y[rows], values, test[rows])
    if not residuals:
        ranges = {"batch": b, "context": s, "kv_heads": kv, "group": q / kv}
        residuals["decode_attention"] = residual_of(points, ranges, f"(batch, heads) not fitted; {_few(points)}")
    if unequal.empty:
        return KernelFit(fit, residuals, points, (*notes, "skew of unequal contexts is derived, not measured"))
    skew, extra = _measured_skew(unequal, equal, check)
    ranges = {name: unequal[name].to_numpy(float) for name in ("batch", "context")}
    residuals["decode_attention_unequal"] = residual_of(extra, ranges, "unequal contexts, rows not fitted")
    fit = fit.model_copy(update={"skew": rounded(skew)})
    note = f"skew of unequal contexts: {percent(skew)} of the padding, fitted to {len(unequal)} measured rows"
    return KernelFit(fit, residuals, join([points, extra]), (*notes, note))


def kernel_prefill_attention(table: pd.DataFrame, ref: Reference) -> KernelFit[PrefillAttentionFit]:
    """Prompt attention of `table` (columns as in `KEYS`, seconds).

    The full fit takes rows with nothing cached and is compared with the others; few rows are all fitted.
    """
    table, dim, notes = _one_head_dim(table, "prefill_attention")
    ref = _per_head_of_128(ref, dim)
    table = _distinct(table, "prefill_attention", ["batch", "new", "prior", "q_heads", "kv_heads"])
    table = table[table.q_heads <= GROUP * table.kv_heads].reset_index(drop=True)
    _enough("prefill_attention", len(table), "with at most 8 query heads for each KV head")
    cached = table[table.prior > 0]
    long = table[(table.prior <= 0) & (table.new >= SHORTEST_PROMPT)].reset_index(drop=True)
    test = held_out(heads_of(long)) if len(long) else np.zeros(0, dtype=bool)
    residuals: dict[str, Residual] = {}
    if ref.sm_count >= SMS and (~test).sum() >= FULL and (test & (long.new >= 1024).to_numpy()).any():
        table, fitted = long, fit_prefill_attention(long, ref)
        fit, residuals["prefill_attention"] = fitted.fit, fitted.residual
        if fitted.long is not None:
            residuals["prefill_attention_long"] = fitted.long
    else:
        test, cached = _held_out_rows(heads_of(table)), cached.head(0)
        names = ("batch", "new", "prior", "q_heads", "kv_heads", "seconds")
        fit = small_prefill_attention({name: table[name].to_numpy(float)[~test] for name in names}, ref)
    check = operators_with(ref, prefill=fit)

    def compared(rows: pd.DataFrame, operator: str, unseen: NDArray[np.bool_]) -> pd.DataFrame:
        b, s, prior, q, kv = (rows[c].to_numpy(float) for c in ("batch", "new", "prior", "q_heads", "kv_heads"))
        values = [
            check.prefill_attention_s([(s[i], prior[i])] * int(b[i]), int(q[i]), int(kv[i]), HEAD_DIM)
            for i in range(len(rows))
        ]
        labels = [
            f"{b[i]:.0f} x {s[i]:.0f} tokens{f' on {prior[i]:.0f}' if prior[i] else ''}, {q[i]:.0f}/{kv[i]:.0f} heads"
            for i in range(len(rows))
        ]
        return point_rows(operator, labels, rows.seconds, values, unseen)

    points = compared(table, "prefill_attention", test)
    if not residuals:
        s, group = table.new.to_numpy(float), (table.q_heads / table.kv_heads).to_numpy(float)
        ranges = {"new": s, "context": s + table.prior.to_numpy(float), "group": group}
        residuals["prefill_attention"] = residual_of(points, ranges, f"(batch, heads) not fitted; {_few(points)}")
    if len(cached):
        extra = compared(cached, "prefill_attention_cached", np.ones(len(cached), dtype=bool))
        new, prior = cached.new.to_numpy(float), cached.prior.to_numpy(float)
        residuals["prefill_attention_cached"] = residual_of(
            extra, {"new": new, "context": new + prior}, "chunks on cached tokens, none fitted"
        )
        points = join([points, extra])
    return KernelFit(fit, residuals, points, notes)


def kernel_memory_bound(table: pd.DataFrame, ref: Reference) -> KernelFit[MemoryOpFit]:
    """Elementwise kernels of `table` (columns as in `KEYS`, seconds); token counts are held out."""
    table = _distinct(table, "memory_bound", ["kernels", "tokens", "bytes"])
    kernels, tokens, size, y = (table[name].to_numpy(float) for name in ("kernels", "tokens", "bytes", "seconds"))
    labels = [f"{a:.0f} over {t:.0f} tokens, {b:.0f} bytes" for a, t, b in zip(kernels, tokens, size, strict=True)]
    key = table.tokens.astype(str) if table.tokens.nunique() >= 4 else pd.Series(labels)
    fitted = fit_elementwise(table.assign(key=key), ref)
    check = operators_with(ref, memory=fitted.fit)
    values = [a * check.memory_bound_s(b / a, t) for a, t, b in zip(kernels, tokens, size, strict=True)]
    points = point_rows("memory_bound", labels, y, values, held_out(key))
    note = "token counts not fitted"
    return KernelFit(fitted.fit, {"memory_bound": residual_of(points, {"bytes": size / kernels}, note)}, points)


def kernel_collectives(table: pd.DataFrame, ref: Reference, node: Cluster) -> KernelFit[CollectiveFits]:
    """Collectives of `table` (op, gpus, bytes, seconds) inside one node.

    Knots go through all sizes; how far they are off between those is seen by leaving sizes out. Broadcast and
    send/receive are compared with what the simulator derives for them.
    """
    known = (*FITTED, *DERIVED, "custom_all_reduce")
    unknown = sorted(set(table.op) - set(known))
    if unknown:
        raise CalibrationError(f"the collective table has unknown operations: {', '.join(unknown)}; known: {known}")
    nccl: dict[str, dict[int, CollectiveFit]] = {}
    custom: dict[int, CollectiveFit] = {}
    parts, few = [], []
    for (op, gpus), rows in table.groupby(["op", "gpus"]):
        rows = rows.groupby("bytes", as_index=False)[["seconds"]].median()
        op, gpus = str(op), int(str(gpus))
        if op in DERIVED:
            continue
        if len(rows) < FEWEST["collective"]:
            few.append(f"{op} on {gpus} GPUs: {len(rows)} message sizes")
            continue
        name = "custom_all_reduce" if op == "custom_all_reduce" else "nccl"
        parts.append(_left_out(name, op, gpus, rows))
        if name == "nccl":
            nccl.setdefault(op, {})[gpus] = _curve(rows)
        else:
            custom[gpus] = _curve(rows)
    if not nccl and not custom:
        found = ", ".join(few) or f"only {', '.join(sorted(set(table.op)))}"
        raise CalibrationError(
            f"collective: {found}; at least {FEWEST['collective']} are needed of one of {', '.join(FITTED)}"
        )
    fits = CollectiveFits(nccl=nccl, custom_all_reduce=custom, inter_efficiency=INTER_EFFICIENCY)
    points = join(parts)
    residuals = {
        name: residual_of(points[points.operator == name], {"bytes": _bytes(table, name)}, "sizes left out in turn")
        for name in ("nccl", "custom_all_reduce")
        if (points.operator == name).any()
    }
    derived = table[table.op.isin(DERIVED)]
    if len(derived) and fits.nccl.get("all_gather"):
        collectives = Collectives(fits, ref, node)
        values = [
            collectives.time_s(str(op), float(size), int(gpus))
            for op, size, gpus in zip(derived.op, derived.bytes, derived.gpus, strict=True)
        ]
        extra = point_rows(
            "collective_derived", _messages(derived), derived.seconds, values, np.ones(len(derived), dtype=bool)
        )
        sizes = derived.bytes.to_numpy(float)
        residuals["collective_derived"] = residual_of(
            extra, {"bytes": sizes}, "broadcast and send/receive as derived from all-gather, none fitted"
        )
        points = join([points, extra])
    return KernelFit(fits, residuals, points, tuple(f"{what}, too few to fit, left out" for what in few))


def _curve(rows: pd.DataFrame) -> CollectiveFit:
    """The usual knots through many sizes; few sizes are knots themselves, their times made to rise."""
    if len(rows) >= MANY_SIZES:
        return fit_collective(rows)
    times = np.exp(isotonic_regression(np.log(rows.seconds.to_numpy(float))).x)
    return CollectiveFit(message_bytes=tuple(rows.bytes.astype(float)), time_s=tuple(rounded(times.tolist())))


def _left_out(operator: str, op: str, gpus: int, rows: pd.DataFrame) -> pd.DataFrame:
    """Every row with its time from knots through the other rows; the outermost sizes in sample.

    Many sizes are left out by thirds, few one by one.
    """
    size, y = rows.bytes.to_numpy(float), rows.seconds.to_numpy(float)
    place = np.arange(len(rows))
    inner = (place > 0) & (place < len(rows) - 1)
    turns = 3 if len(rows) >= MANY_SIZES else len(rows)
    test = np.zeros(len(rows), dtype=bool)
    values = _at(_curve(rows), size)
    for turn in range(turns):
        chosen = inner & (place % turns == turn)
        if chosen.any():
            values[chosen] = _at(_curve(rows[~chosen]), size[chosen])
            test |= chosen
    labels = [f"{op}, {gpus} GPUs, {x:.0f} bytes" for x in size]
    return point_rows(operator, labels, y, values, test)


def _at(fit: CollectiveFit, size: Array) -> Array:
    return np.asarray(np.exp(np.interp(np.log(size), np.log(fit.message_bytes), np.log(fit.time_s))))


def _messages(table: pd.DataFrame) -> list[str]:
    return [f"{op}, {n} GPUs, {x:.0f} bytes" for op, n, x in zip(table.op, table.gpus, table.bytes, strict=True)]


def _bytes(table: pd.DataFrame, name: str) -> Array:
    own = table.op == "custom_all_reduce"
    return table[own if name == "custom_all_reduce" else ~own].bytes.to_numpy(float)


def _measured_skew(unequal: pd.DataFrame, equal: pd.DataFrame, check: Operators) -> tuple[float, pd.DataFrame]:
    """The share of the padding that brings equal contexts to the times of unequal ones, and the points with it.

    Equal contexts of the same batch and heads, if measured, say what the padding costs; else the fit does. Every
    fourth row is held out, if there are eight or more.
    """
    heads = ["batch", "q_heads", "kv_heads"]
    measured = {key: rows.sort_values("context") for key, rows in equal.groupby(heads)}
    rows = list(unequal[[*heads, "context", "longest", "seconds"]].itertuples(index=False))

    def shown(row: tuple[float, ...], skew: float) -> float:
        b, q, kv, context, longest, _ = row
        at = context + skew * (longest - context)
        same = measured.get((b, q, kv))
        if same is not None and len(same) >= 2 and same.context.iloc[0] <= at <= same.context.iloc[-1]:
            return float(np.interp(at, same.context, same.seconds))
        return check.decode_attention_s(int(b), b * at, int(q), int(kv), HEAD_DIM)

    test = np.arange(len(rows)) % 4 == 3 if len(rows) >= 8 else np.zeros(len(rows), dtype=bool)
    train = [row for row, unseen in zip(rows, test, strict=True) if not unseen]

    def loss(skew: float) -> float:
        error = np.array([np.log(shown(row, skew) / row[-1]) for row in train])
        return float(np.sum(np.sqrt(1.0 + (error / 0.1) ** 2) - 1.0))

    best = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    best = min((0.0, best, 1.0), key=loss)
    labels = [f"{r[0]:.0f} x {r[3]:.0f} tokens, longest {r[4]:.0f}, {r[1]:.0f}/{r[2]:.0f} heads" for r in rows]
    values = [shown(row, best) for row in rows]
    return best, point_rows("decode_attention_unequal", labels, [row[-1] for row in rows], values, test)


def _one_head_dim(table: pd.DataFrame, operator: str) -> tuple[pd.DataFrame, int, tuple[str, ...]]:
    """The rows of one head size: 128 if measured, else the commonest."""
    dims = table.head_dim.value_counts()
    dim = HEAD_DIM if HEAD_DIM in dims.index else int(dims.index[0])
    others = sorted(int(d) for d in dims.index if int(d) != dim)
    note = f"{operator}: heads of {dim}; rows with heads of {', '.join(map(str, others))} are left out"
    return table[table.head_dim == dim], dim, (note,) if others else ()


def _per_head_of_128(ref: Reference, dim: int) -> Reference:
    """The fits take heads of 128: heads of `dim` move and multiply `dim` / 128 of that, as if the GPU were faster."""
    more = HEAD_DIM / dim
    if more == 1.0:
        return ref
    update = {
        "memory_bytes_per_s": ref.memory_bytes_per_s * more,
        "bf16_flop_per_s": ref.bf16_flop_per_s * more,
        "l2_bytes": ref.l2_bytes * more,
    }
    return ref.model_copy(update=update)


def _distinct(table: pd.DataFrame, operator: str, keys: list[str]) -> pd.DataFrame:
    """Medians over rows of the same shape; raises `CalibrationError` if too few shapes are left."""
    rows = table.groupby(keys, as_index=False)[["seconds"]].median()
    _enough(operator, len(rows))
    return rows


def _enough(operator: str, count: int, which: str = "") -> None:
    if count < FEWEST[operator]:
        raise CalibrationError(
            f"{operator}: {count} distinct rows{f' {which}' if which else ''}; at least {FEWEST[operator]} are needed"
        )


def _held_out_rows(keys: pd.Series) -> NDArray[np.bool_]:
    """A quarter of the shapes, or of the rows where there are fewer than four shapes."""
    if keys.nunique() >= 4:
        return held_out(keys)
    return held_out(pd.Series([f"row {i}" for i in range(len(keys))]))


def _few(points: pd.DataFrame) -> str:
    return f"few-constant fit to {int((~points.held_out).sum())} rows"
