"""How sequences of uneven length are dealt to the data-parallel ranks of a call, and become their micro-batches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rlsim.cost.flops import Floats, Reach, linear_flops, pair_flops, token_flops
from rlsim.cost.strategy import TrainStrategy
from rlsim.models.model import Model


@dataclass(frozen=True)
class MicroBatches:
    """What micro-batches hold, arrays (ranks, micro-batches): tokens, and query-key pairs by reach."""

    tokens: Floats
    pairs: dict[Reach, Floats]


class MicroBatching:
    """Micro-batches of a model under a strategy: of nearly equal work, by veRL's rules, or packed by NeMo-RL's."""

    def __init__(self, model: Model, strategy: TrainStrategy) -> None:
        self._strategy = strategy
        flops = pair_flops(model)
        total = sum(flops.values()) or 1.0
        self._shares = {reach: flop / total for reach, flop in flops.items()}
        self._token_pairs = (linear_flops(model) + token_flops(model)) / total  # pairs that cost what a token does

    def of_call(self, lengths: npt.ArrayLike, mini_batches: int, *, backward: bool) -> list[MicroBatches]:
        """Those of each mini-batch: sequences dealt to ranks once, each rank's cut in order, then packed.

        All ranks run as many micro-batches as the one that needs most (veRL's rule; ZeRO-3 could not do otherwise), but
        never more than the fullest rank has sequences: no sequence is cut in two. Raises `ValueError` for lengths that
        are not a flat sequence of counts.
        """
        return self._made(lengths, mini_batches, self._strategy.dp, self._strategy.micro_batches, backward)

    def of_part(self, lengths: npt.ArrayLike, *, backward: bool) -> MicroBatches:
        """Those of one rank that works on some sequences of a call."""
        return self._made(lengths, 1, 1, None, backward)[0]

    def _made(
        self, lengths: npt.ArrayLike, mini_batches: int, ranks: int, micro_batches: int | None, backward: bool
    ) -> list[MicroBatches]:
        sizes = np.asarray(lengths, dtype=np.float64)
        if sizes.ndim != 1 or (len(sizes) and sizes.min() < 0):
            raise ValueError("lengths must be a flat sequence of token counts")
        strategy, pairs = self._strategy, self._pairs(sizes)
        counted = strategy.micro_batches or strategy.sequences(backward=backward)
        if strategy.packing == "first_fit" and not counted:
            chunks = np.array_split(np.arange(len(sizes), dtype=np.intp), mini_batches)
            return [self._packed(sizes[chunk], ranks, backward) for chunk in chunks]
        work = self._work(sizes, pairs)
        shares = [np.array_split(indices, mini_batches) for indices in deal(work, ranks)]
        result = []
        for step in range(mini_batches):
            parts = [share[step] for share in shares]
            if micro_batches:
                count = max(min(micro_batches, max(map(len, parts))), 1)
            else:
                count = max(self._count(sizes[part], backward) for part in parts)
            bins = [self._bins(work[part], count, backward) for part in parts]
            result.append(self._sums(sizes, pairs, parts, bins, count))
        return result

    def _packed(self, sizes: Floats, ranks: int, backward: bool) -> MicroBatches:
        """Those of one mini-batch by `first_fit`; a micro-batch is padded by making its last sequence longer."""
        bins = first_fit(sizes, self._strategy.budget(backward=backward), ranks)
        shape = ranks, max(math.ceil(len(bins) / ranks), 1)
        tokens, pairs = np.zeros(shape), {reach: np.zeros(shape) for reach in self._shares}
        for rank in range(ranks):
            packs = [sizes[members] for members in bins[rank::ranks]]
            longest = max((float(one.sum()) for one in packs), default=0.0)
            for column, one in enumerate(packs):
                if self._strategy.pp > 1:
                    one[-1] += longest - one.sum()
                tokens[rank, column] = one.sum()
                for reach, of in self._pairs(one).items():
                    pairs[reach][rank, column] = of.sum()
        return MicroBatches(tokens, pairs)

    def _pairs(self, sizes: Floats) -> dict[Reach, Floats]:
        return {reach: reach.pairs(sizes) for reach in self._shares}

    def _work(self, sizes: Floats, pairs: dict[Reach, Floats]) -> Floats:
        """The work of sequences, as the number of query-key pairs (in a layer of the average) that cost as much."""
        return sizes * self._token_pairs + sum(share * pairs[reach] for reach, share in self._shares.items())

    def _count(self, sizes: Floats, backward: bool) -> int:
        """Micro-batches of one rank's sequences, never more than these: of so many sequences, or by token budget
        (`rearrange_micro_batches`)."""
        each, budget = self._strategy.sequences(backward=backward), self._strategy.budget(backward=backward)
        wanted = math.ceil(len(sizes) / each if each else float(sizes.sum()) / budget)
        return max(min(wanted, len(sizes)), 1)

    def _bins(self, work: Floats, count: int, backward: bool) -> npt.NDArray[np.intp]:
        """The micro-batch of each sequence: balanced, or every so many in their order if that is what is asked for."""
        bins = np.zeros(len(work), dtype=np.intp)
        if each := self._strategy.sequences(backward=backward):
            return np.arange(len(work), dtype=np.intp) // each
        for i, members in enumerate(pack(work.tolist(), count)):
            bins[members] = i
        return bins

    @staticmethod
    def _sums(
        sizes: Floats,
        pairs: dict[Reach, Floats],
        parts: list[npt.NDArray[np.intp]],
        bins: list[npt.NDArray[np.intp]],
        count: int,
    ) -> MicroBatches:

        def summed(each: Floats) -> Floats:
            return np.array([np.bincount(at, each[part], count) for at, part in zip(bins, parts, strict=True)], float)

        return MicroBatches(summed(sizes), {reach: summed(each) for reach, each in pairs.items()})


# Dealing and packing --------------------------------------------------------------------------------------------------


def deal(work: Floats, ranks: int) -> list[npt.NDArray[np.intp]]:
    """Indices of `work` for each of `ranks`, with equal counts (to within one) and nearly equal sums of work.

    Largest first, `ranks` at a time, each round's largest to the least loaded rank: LPT with equal counts. Within a
    rank the original order is kept, so that mini-batches cut from it stay as random as the input. veRL uses
    Karmarkar–Karp differencing for the same purpose (`trainer.balance_batch`).
    """
    return _dealt(np.asarray(work, np.float64).tobytes(), ranks)


@lru_cache(maxsize=32)  # the calls of a step, and their memory, deal the same sequences
def _dealt(raw: bytes, ranks: int) -> list[npt.NDArray[np.intp]]:
    work = np.frombuffer(raw)
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
