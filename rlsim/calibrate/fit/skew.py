"""What unequal contexts cost decode attention: derived by list scheduling, or measured."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from rlsim.calibrate.fit.common import Array, soft_l1
from rlsim.calibrate.fit.heads import HEAD_DIM
from rlsim.calibrate.fit.kernels import operators_with
from rlsim.calibrate.points import point_rows
from rlsim.cost.calibration import Reference
from rlsim.cost.fits import DecodeAttentionFit


def derived_skew(ref: Reference, uniform: bool) -> float:
    """Share of the padding of unequal contexts that a split-KV kernel pays for, by list scheduling (nothing is
    measured).

    Contexts are lognormal (sigma 0.6, mean 4096 tokens), batches 8, 32 and 128, 2 and 8 KV heads. Every (sequence,
    head) is cut into pieces: equal in size over the batch (FlashInfer, FlashAttention 3 with scheduler metadata),
    or, if `uniform`, the same number of pieces for every sequence (TensorRT-LLM's multi-block mode). Pieces run in
    order, two to an SM, and share the bandwidth; a lone block can take at most twice its fair share (assumption).
    """
    rng = np.random.default_rng(7)
    slots = 2 * ref.sm_count  # blocks that run at once
    shares = []
    for batch in (8, 32, 128):
        for heads in (2, 8):
            for _ in range(8):
                lengths = rng.lognormal(0.0, 0.6, batch)
                lengths *= 4096.0 / lengths.mean()
                if uniform:
                    count = max(1, slots // (batch * heads))
                    pieces = np.repeat(lengths / count, count * heads)
                else:
                    chunk = 256.0  # the smallest that fits all pieces into one round, as FlashInfer's planner finds it
                    while chunk < lengths.max() and np.ceil(lengths / chunk).sum() * heads > slots:
                        chunk += 64.0
                    cut = [np.full(math.ceil(x / chunk), x / math.ceil(x / chunk)) for x in lengths]
                    pieces = np.concatenate(cut * heads)
                shares.append((_fluid(pieces, slots) / heads - lengths.sum()) / (batch * lengths.max() - lengths.sum()))
    return float(np.clip(np.mean(shares), 0.0, 1.0))


def _fluid(pieces: Array, slots: int, alone: float = 2.0) -> float:
    """Bytes that could have moved until the last piece is done: pieces in order on slots sharing one bandwidth of 1."""
    waiting = pieces.tolist()[::-1]
    running = [waiting.pop() for _ in range(min(slots, len(waiting)))]
    now = 0.0
    while running:
        rate = min(1.0 / len(running), alone / slots)
        done = min(running)
        now += done / rate
        running = [left - done for left in running if left - done > 1e-9]
        while waiting and len(running) < slots:
            running.append(waiting.pop())
    return now


def measured_skew(
    fit: DecodeAttentionFit, ref: Reference, unequal: pd.DataFrame, equal: pd.DataFrame
) -> tuple[float, pd.DataFrame]:
    """The share of the padding that brings equal contexts to the times of unequal ones, and the points with it.

    Equal contexts of the same batch and heads, if measured, say what the padding costs; else the fit does. Every
    fourth row is held out, if there are eight or more.
    """
    heads = ["batch", "q_heads", "kv_heads"]
    measured = {key: rows.sort_values("context") for key, rows in equal.groupby(heads)}
    rows = list(unequal[[*heads, "context", "longest", "seconds"]].itertuples(index=False))
    operators = operators_with(ref, decode_attention=fit)

    def shown(row: tuple[float, ...], skew: float) -> float:
        b, q, kv, context, longest, _ = row
        at = context + skew * (longest - context)
        same = measured.get((b, q, kv))
        if same is not None and len(same) >= 2 and same.context.iloc[0] <= at <= same.context.iloc[-1]:
            return float(np.interp(at, same.context, same.seconds))
        return operators.decode_attention_s(int(b), b * at, int(q), int(kv), HEAD_DIM)

    test = np.arange(len(rows)) % 4 == 3 if len(rows) >= 8 else np.zeros(len(rows), dtype=bool)
    train = [row for row, unseen in zip(rows, test, strict=True) if not unseen]

    def loss(skew: float) -> float:
        return float(np.sum(soft_l1(np.array([np.log(shown(row, skew) / row[-1]) for row in train]))))

    best = float(minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded").x)
    best = min((0.0, best, 1.0), key=loss)
    labels = [f"{r[0]:.0f} x {r[3]:.0f} tokens, longest {r[4]:.0f}, {r[1]:.0f}/{r[2]:.0f} heads" for r in rows]
    values = [shown(row, best) for row in rows]
    return best, point_rows("decode_attention_unequal", labels, [row[-1] for row in rows], values, test)
