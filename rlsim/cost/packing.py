"""Dealing sequences of uneven length to data-parallel ranks and packing them into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.intp]


def deal(work: Floats, ranks: int) -> list[Integers]:
    """Indices of `work` for each of `ranks`, with equal counts (to within one) and nearly equal sums of work.

    Largest first, `ranks` at a time, each round's largest to the least loaded rank: LPT with equal counts. Within a
    rank the original order is kept, so that mini-batches cut from it stay as random as the input. veRL uses
    Karmarkar–Karp differencing for the same purpose (`trainer.balance_batch`).
    """
    if ranks == 1:
        return [np.arange(len(work), dtype=np.intp)]
    order = np.argsort(-work, kind="stable")
    load = np.zeros(ranks)
    owner = np.empty(len(work), dtype=np.intp)
    for start in range(0, len(order), ranks):
        group = order[start : start + ranks]
        to = np.argsort(load, kind="stable")[: len(group)]
        owner[group] = to
        load[to] += work[group]
    return [np.flatnonzero(owner == rank) for rank in range(ranks)]


def pack(work: Sequence[float], bins: int) -> list[list[int]]:
    """Indices of `work` in `bins` bins of nearly equal sums: largest first, each to the least loaded bin (LPT).

    Bins may stay empty when there are more of them than items.
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    if bins == 1:
        packed[0].extend(range(len(work)))
        return packed
    heap = [(0.0, i) for i in range(bins)]
    for item in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        load, i = heap[0]
        packed[i].append(item)
        heapq.heapreplace(heap, (load + work[item], i))
    return packed


def first_fit(sizes: Floats, capacity: float, ranks: int) -> list[list[int]]:
    """Indices of `sizes` in bins of that capacity: largest first, each into the first bin with room for it.

    An item above the capacity has a bin of its own. Bins are a multiple of `ranks`, made up by splitting those of most
    items, or as many as items. NeMo-RL's packer (`nemo_rl/data/packing/algorithms.py`) is a variant of this.
    """
    room = np.empty(len(sizes))
    bins: list[list[int]] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        fits = np.flatnonzero(room[: len(bins)] >= sizes[item])
        at = int(fits[0]) if len(fits) else len(bins)
        if at == len(bins):
            bins.append([])
            room[at] = max(capacity, sizes[item])
        bins[at].append(item)
        room[at] -= sizes[item]
    while len(bins) % ranks and len(bins) < len(sizes):
        bins.append([max(bins, key=len).pop()])
    return bins
