"""What unequal contexts cost decode attention: derived by list scheduling, not measured."""

from __future__ import annotations

import math

import numpy as np

from rlsim.calibrate.fit.common import Array
from rlsim.cost.calibration import Reference


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
