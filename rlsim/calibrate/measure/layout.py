"""A change of layout between workers, really carried out: weights resharded, the KV of live sequences moved.

Both go layer by layer, so that never more than one layer is there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rlsim.calibrate.measure.decoder import Decoder, KvCache, weight_splits


class Move(NamedTuple):
    """One sequence with `tokens` in the cache, from a slot of a replica of the old layout to one of the new."""

    tokens: int
    from_replica: int
    from_slot: int
    to_replica: int
    to_slot: int


def reshard(decoder: Decoder, into: Decoder) -> None:
    """The weights of `decoder` to one of another degree: its ranks gather each weight, and every rank keeps its slice.

    From TP 1 nothing is gathered. All workers call this together. The KV cache stays as it is: see `migrate`.
    """
    for layer, old, new in zip(weight_splits(decoder.model), decoder.weights, into.weights, strict=True):
        for name, split in layer.items():
            shares = [old[name]] if split.axis is None else decoder.ranks.all_gather(old[name])
            split.slice(split.join(shares), into.tp, into.index, new[name])


def migrate(worker: Any, cache: KvCache, from_tp: int, to_tp: int, moves: Sequence[Move]) -> None:
    """Move the KV of live sequences from one layout to another inside the same pool.

    A rank sends to every rank of the sequence's new replica the heads that one keeps. All workers call this together,
    with the same moves.
    """
    heads, own = cache.model.num_key_value_heads, worker.rank
    outgoing = _parts(own, heads, from_tp, to_tp, moves)
    incoming = _parts(own, heads, to_tp, from_tp, [Move(m.tokens, *m[3:], *m[1:3]) for m in moves])
    for layer in range(cache.model.num_hidden_layers):
        source, target = cache.layer(layer, from_tp), cache.layer(layer, to_tp)
        packed = {peer: torch.cat([source[part].reshape(-1) for part in parts]) for peer, parts in outgoing.items()}
        places = {peer: [target[part] for part in parts] for peer, parts in incoming.items()}
        sizes = {peer: sum(place.numel() for place in found) for peer, found in places.items() if peer != own}
        received = worker.all.exchange({peer: x for peer, x in packed.items() if peer != own}, sizes, source)
        for peer, found in places.items():
            flat = packed[own] if peer == own else received[peer]
            for place, x in zip(found, torch.split(flat, [place.numel() for place in found]), strict=True):
                place.copy_(x.view(place.shape))


def _parts(rank: int, heads: int, own_tp: int, other_tp: int, moves: Sequence[Move]) -> dict[int, list[Any]]:
    """By peer, in the order of `moves`: what the sequences leaving `rank`'s replica have in common with the peer, as
    indices into this rank's layer of the cache."""
    own, other = heads // own_tp, heads // other_tp
    first = rank % own_tp * own
    parts: dict[int, list[Any]] = {}
    for move in moves:
        if move.from_replica != rank // own_tp:
            continue
        for index in range(other_tp):
            low, high = max(first, index * other), min(first + own, (index + 1) * other)
            if low < high:
                part = (slice(None), move.from_slot, slice(move.tokens), slice(low - first, high - first))
                parts.setdefault(move.to_replica * other_tp + index, []).append(part)
    return parts
