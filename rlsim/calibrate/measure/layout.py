"""A change of layout between workers, really carried out: weights resharded, the KV of live sequences moved.

Both go layer by layer, so that never more than one layer is there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsim.calibrate.measure.decoder import Decoder, KvCache, check_degree, weight_splits


@dataclass(frozen=True)
class Move:
    """One sequence with `tokens` in the cache, from a slot of a replica of the old layout to one of the new."""

    tokens: int
    from_replica: int
    from_slot: int
    to_replica: int
    to_slot: int


def reshard(worker: Any, decoder: Decoder, tp: int, into: Decoder | None = None) -> Decoder:
    """`decoder` at another degree: its old ranks gather each weight, every rank keeps its new slice.

    From TP 1 nothing is gathered. All workers call this together. The weights go `into` a decoder of that degree, as
    into an engine's own pool, or to new memory. The KV cache stays as it is: see `migrate`. Raises `CalibrationError`
    if the degree does not split the model.
    """
    model = decoder.model
    check_degree(model, tp)
    index = worker.rank % tp
    weights = []
    for number, layer in enumerate(weight_splits(model)):
        old, new = decoder.weights[number], {}
        for name, split in layer.items():
            shares = [old[name]] if split.axis is None else decoder.ranks.all_gather(old[name])
            if into is None:
                new[name] = split.slice(split.join(shares), tp, index)
            else:
                split.slice(split.join(shares), tp, index, into.weights[number][name])
        weights.append(new)
    if into is not None:
        return into
    return Decoder(model, tp, index, worker.ranks(tp), worker.device, weights, decoder.cache)


def migrate(worker: Any, cache: KvCache, from_tp: int, to_tp: int, moves: Sequence[Move]) -> None:
    """Move the KV of live sequences from one layout to another inside the same pool.

    A rank sends to every rank of the sequence's new replica the heads that one keeps. All workers call this together,
    with the same moves.
    """
    model = cache.model
    outgoing = _pieces(worker.rank, model.num_key_value_heads, from_tp, to_tp, moves)
    incoming = _pieces(worker.rank, model.num_key_value_heads, to_tp, from_tp, [_reversed(move) for move in moves])
    for layer in range(model.num_hidden_layers):
        source, target = cache.layer(layer, from_tp), cache.layer(layer, to_tp)
        packed = {
            peer: torch.cat([source[:, p.slot, : p.tokens, p.heads].reshape(-1) for p in pieces])
            for peer, pieces in outgoing.items()
        }
        sizes = {
            peer: sum(p.numbers(model.head_dim) for p in pieces)
            for peer, pieces in incoming.items()
            if peer != worker.rank
        }
        sends = {peer: tensor for peer, tensor in packed.items() if peer != worker.rank}
        received = worker.all.exchange(sends, sizes, source)
        if worker.rank in packed:
            received[worker.rank] = packed[worker.rank]
        for peer, pieces in incoming.items():
            parts = torch.split(received[peer], [p.numbers(model.head_dim) for p in pieces])
            for p, part in zip(pieces, parts, strict=True):
                place = target[:, p.slot, : p.tokens, p.heads]
                place.copy_(part.view(place.shape))


@dataclass(frozen=True)
class _Piece:
    """What one rank sends another of one sequence: the sender's slot and heads, or the receiver's."""

    slot: int
    tokens: int
    first_head: int
    last_head: int  # exclusive

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.last_head)

    def numbers(self, head_dim: int) -> int:
        return 2 * self.tokens * (self.last_head - self.first_head) * head_dim


def _pieces(rank: int, heads: int, own_tp: int, other_tp: int, moves: Sequence[Move]) -> dict[int, list[_Piece]]:
    """By peer, in the order of `moves`: what the sequences leaving `rank`'s replica have in common with the peer."""
    own, other = heads // own_tp, heads // other_tp
    first = rank % own_tp * own
    pieces: dict[int, list[_Piece]] = {}
    for move in moves:
        if move.from_replica != rank // own_tp:
            continue
        for index in range(other_tp):
            low, high = max(first, index * other), min(first + own, (index + 1) * other)
            if low < high:
                piece = _Piece(move.from_slot, move.tokens, low - first, high - first)
                pieces.setdefault(move.to_replica * other_tp + index, []).append(piece)
    return pieces


def _reversed(move: Move) -> Move:
    return Move(move.tokens, move.to_replica, move.to_slot, move.from_replica, move.from_slot)
