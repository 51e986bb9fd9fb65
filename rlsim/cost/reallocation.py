"""Seconds to bring parameters, or a call's data, from where one call has them to where the next one needs them.

The hierarchical scheme of REAL (Mei et al., MLSys 2025): an outer loop over the pairs of a source and a target pipeline
stage with layers in common; in each, every target GPU takes each tensor-parallel piece that it lacks from the cheapest
source GPU (the same GPU, one of the same node, one of another node). All that go to one source for the same piece get
it in one broadcast, and the sources broadcast side by side.

One message brings a source's piece to all GPUs that take it from there: all layers common to two stages in one buffer
(and the embedding or head if both stages have it). It costs a ring broadcast in which the message passes every link in
a pipeline: the slower of the broadcast inside the node with most of its GPUs and of the way from node to node (a send,
and one more latency for each further node). A GPU sends its messages one after another, receives one after another, and
does both at once; GPUs that share a port to the network also take turns there. The time is that of the busiest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlsim.cost.collectives import CollectiveTime, Groups
from rlsim.cost.flops import Floats
from rlsim.cost.layout import Integers, Layout, canonical
from rlsim.cost.memory import BF16
from rlsim.errors import ConfigError
from rlsim.models.hardware import Cluster
from rlsim.models.model import Model


class Side(NamedTuple):
    """One end of a transfer: the cluster as its GPUs know it, and their times of communication."""

    cluster: Cluster
    collectives: CollectiveTime


class Reallocation:
    """Seconds of moving the parameters of one model between placements on one cluster, in bf16.

    `receiver`: the other end where that has another kind of GPU.

    Among equally cheap sources, target GPU number p of its mesh takes number p mod their count inside the node. From
    other nodes all GPUs of a node that want the same piece take the same source, by the p of the first of them, so that
    it crosses the network once. `collectives` gives the times of broadcasts, sends and gathers; across nodes they are
    assumed, not measured.
    """

    def __init__(
        self, model: Model, cluster: Cluster, collectives: CollectiveTime, receiver: Side | None = None
    ) -> None:
        self.model, self.cluster = model, cluster
        self._collectives = collectives
        self._broadcasts = _Broadcasts(Side(cluster, collectives), receiver)
        self._between_s = cache(self._time_s)

    def time_s(self, source: Layout, target: Layout) -> float:
        """Seconds until every GPU of `target` has its part of the model, which `source` holds as a whole.

        Pieces that a GPU already has cost nothing if the TP degree stays (layers are used where they lie), else one
        copy at memory bandwidth (read and write): slices of another width must be laid out anew. So the time is zero
        only if TP stays and every target GPU holds all that it needs. A `zero3` source first gathers each layer, the
        embedding and the head among its data-parallel ranks (not if the placements are the same, which costs nothing);
        a `zero3` target needs only each GPU's own share, which nobody else does, so there are no broadcasts.

        Experts that are apart are taken as one tensor cut over the GPUs that hold all of them: a GPU under TP gets the
        right bytes in all, but what it finds of them in place is not exact. KV heads and norms that tensor parallelism
        replicates are taken as sharded, and tied embeddings as held once.
        Raises `ConfigError` if a placement suits neither model nor cluster.
        """
        return self._between_s(*canonical(self.cluster, _without_cp(source), _without_cp(target)))

    def _time_s(self, source: Layout, target: Layout) -> float:
        for pp, tp in ((placement.pp, placement.tp) for placement in (source, target)):
            self.model.check_tp(tp)
            if pp > self.model.num_hidden_layers:
                raise ConfigError(f"{self.model.name}: PP {pp} exceeds its {self.model.num_hidden_layers} layers")
        if source == target:
            return 0.0
        parts: list[tuple[Layout, Layout, bool | None]]
        parts = [(source, target, False), (source.experts, target.experts, True)]
        if source.expert_cut is target.expert_cut is None:
            parts = [(source, target, None)]
        found: list[_Wants] = []
        copied: Floats = np.zeros(target.end_gpu)
        for have, need, experts in parts:
            wants = _parameter_wants(
                self.cluster, common_bytes(self.model, have.pp, need.pp, experts=experts), have, need
            )
            here = wants.source == wants.target
            if have.tp != need.tp:
                rate = self.cluster.gpu.memory_bytes_per_s / 2
                copied += np.bincount(wants.target[here], wants.size[here] / rate, target.end_gpu)
            found.append(wants.where(~here))
        return self._gather_s(source) + self._broadcasts.slowest_s(_Wants.together(found), copied)

    def _gather_s(self, source: Layout) -> float:
        """All-gathering what ZeRO-3 shards: layer by layer, the embedding, the head with the final norm."""
        if not source.zero3:
            return 0.0
        model = self.model

        def unit_s(parameters: float, spread: Layout = source) -> float:
            groups = Groups(self._collectives, self.cluster, spread)
            return groups.time_s("all_gather", BF16 * parameters / spread.tp, "sharded")

        total_s = unit_s(model.vocab_size * model.hidden_size) + unit_s(model.head_parameters + model.hidden_size)
        for layer, count in model.groups.items():
            routed = layer.expert_weights() if source.expert_cut else 0
            total_s += count * (unit_s(layer.parameters - routed) + unit_s(routed, source.experts))
        return total_s


def _without_cp(placement: Layout) -> Layout:
    return placement if placement.cp == 1 else replace(placement, dp=placement.shards, cp=1)


class DataTransfer:
    """Seconds of moving what one call made to the call that uses it; `receiver` as in `Reallocation`."""

    def __init__(self, cluster: Cluster, collectives: CollectiveTime, receiver: Side | None = None) -> None:
        self.cluster = cluster
        self._broadcasts = _Broadcasts(Side(cluster, collectives), receiver)
        self._between_s = cache(self._time_s)

    def time_s(self, total_bytes: float, source: Layout, target: Layout) -> float:
        """Seconds until `target` has the data that a call on `source` made.

        `total_bytes` are those of the whole batch: tokens times the bytes kept per token (token numbers,
        log-probabilities, values, …). They lie, evenly, with one holder in each data-parallel rank of the source: the
        first GPU of its last stage. Every GPU of a data-parallel rank of the target needs that rank's share, of which
        each holder sends its part by one broadcast. Zero if there are no bytes, or if all happens on one GPU.
        Raises `ConfigError` for a placement beyond the cluster.
        """
        return self._between_s(total_bytes, *canonical(self.cluster, source, target))

    def _time_s(self, total_bytes: float, source: Layout, target: Layout) -> float:
        return self._broadcasts.slowest_s(_data_wants(total_bytes, source, target), np.zeros(target.end_gpu))


@dataclass
class _Wants:
    """What target GPUs lack, one row each: `source` is to send `size` bytes of piece `piece` to GPU `target`.

    Rows with the same source and piece are one broadcast.
    """

    source: Integers
    target: Integers
    piece: Integers
    size: Floats

    def where(self, rows: npt.NDArray[np.bool_]) -> _Wants:
        """Some of the rows."""
        return _Wants(self.source[rows], self.target[rows], self.piece[rows], self.size[rows])

    @classmethod
    def together(cls, parts: Sequence[_Wants]) -> _Wants:
        """The rows of all; pieces of different parts are different pieces."""
        if len(parts) == 1:
            return parts[0]
        first = np.cumsum([0, *(int(part.piece.max(initial=-1)) + 1 for part in parts[:-1])])
        pieces = [part.piece + start for part, start in zip(parts, first, strict=True)]
        columns = ([getattr(part, name) for part in parts] for name in ("source", "target", "size"))
        source, target, size = (np.concatenate(column) for column in columns)
        return cls(source, target, np.concatenate(pieces), size)


class _Broadcasts:
    """Seconds of many broadcasts side by side.

    Each goes on inside the receivers' nodes at their rate, and to other nodes at that of the slower end.
    """

    def __init__(self, sender: Side, receiver: Side | None) -> None:
        self._sender, self._receiver = sender, receiver or sender
        self._ends = (sender, receiver) if receiver else (sender,)

    def slowest_s(self, wants: _Wants, busy: Floats) -> float:
        """Seconds of the busiest GPU or port; `busy` are those that each target GPU spends on copies besides."""
        if not len(wants.size) or not wants.size.any():
            return float(busy.max())
        per_node = self._sender.cluster.domain_gpus
        gpus = max(len(busy), int(wants.source.max()) + 1)
        # Rows in the order of messages, and of the nodes that each of them goes to.
        at, to = wants.source // per_node, wants.target // per_node
        keys = (wants.source * (wants.piece.max() + 1) + wants.piece) * (to.max() + 1) + to
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))  # of a message's rows for one node
        members = np.diff(np.append(first, len(keys)))
        rows = order[first]
        away = to[rows] != at[rows]
        message_of = keys[first] // (to.max() + 1)
        start = np.flatnonzero(np.concatenate(([True], message_of[1:] != message_of[:-1])))
        largest = np.maximum.reduceat(members + ~away, start)  # the source is a member in its own node
        nodes = np.add.reduceat(away.astype(np.int64), start)
        size = wants.size[rows[start]]
        message_s, shapes = cache(self._message_s), zip(size.tolist(), largest.tolist(), nodes.tolist(), strict=True)
        total_s, network_s = np.array([message_s(*shape) for shape in shapes]).T
        sender = wants.source[rows[start]]
        counts = np.diff(np.append(start, len(first)))
        sent = np.bincount(sender, total_s, gpus)
        received = np.append(busy, np.zeros(gpus - len(busy)))
        received += np.bincount(wants.target[order], np.repeat(np.repeat(total_s, counts), members), gpus)
        slowest = max(sent.max(), received.max())
        if nodes.any():
            out = _busiest_port_s(self._sender.cluster, sender, network_s)
            into = _busiest_port_s(self._receiver.cluster, wants.target[rows], np.repeat(network_s, counts) * away)
            slowest = max(slowest, out, into)
        return float(slowest)

    def _message_s(self, size: float, largest: int, nodes: int) -> tuple[float, float]:
        """Seconds of a message of `size` bytes, in all and on the network: `largest` members in the node with most of
        them, to so many other `nodes`."""
        inside_s = self._receiver.collectives.time_s("broadcast", size, largest, 1)
        if not nodes or size <= 0:
            return inside_s, 0.0
        link = self._receiver.cluster.inter
        latency_s = link.latency_s if link is not None else 0.0
        send_s = max([end.collectives.time_s("send_recv", size, 2, 2) for end in self._ends])
        network_s = send_s + (nodes - 1) * latency_s
        return max(inside_s, network_s), network_s


def _busiest_port_s(cluster: Cluster, gpu: Integers, busy_s: Floats) -> float:
    """Seconds of the busiest port to the network where GPUs share one; `busy_s` of messages by way of each `gpu`'s."""
    per_node, shared_by = cluster.gpus_per_node, cluster.inter.shared_by_gpus if cluster.inter else 1
    if shared_by == 1:
        return 0.0
    port = gpu // per_node * math.ceil(per_node / shared_by) + gpu % per_node // shared_by
    return float(np.bincount(port, busy_s).max())


def common_bytes(model: Model, source_pp: int, target_pp: int, *, experts: bool | None = None) -> Floats:
    """Bytes in bf16 that pipeline stages have in common, before TP: (source_pp, target_pp).

    `experts`: of the matrices of experts only, or of all others only; default: of all.

    A stage holds ⌈layers / PP⌉ layers (the last ones what is left), the first also the embedding, the last the head and
    the final norm.
    """
    layers = model.num_hidden_layers
    bounds = []
    for pp in (source_pp, target_pp):
        start = np.minimum(np.arange(pp) * math.ceil(layers / pp), layers)
        bounds.append((start, np.append(start[1:], layers)))
    (start, end), (target_start, target_end) = bounds
    routed = [layer.expert_weights() if experts is not None else 0 for layer in model.layers]
    counted = routed if experts else [layer.parameters - n for layer, n in zip(model.layers, routed, strict=True)]
    before = np.cumsum([0.0, *counted])
    last, first = np.minimum(end[:, None], target_end), np.maximum(start[:, None], target_start)
    parameters: Floats = np.maximum(before[last] - before[first], 0.0)
    if experts:
        return BF16 * parameters
    parameters[0, 0] += model.vocab_size * model.hidden_size
    parameters[-1, -1] += model.head_parameters + model.hidden_size
    return BF16 * parameters


def _parameter_wants(cluster: Cluster, common: Floats, source: Layout, target: Layout) -> _Wants:
    """Every piece that every target GPU needs, with the cheapest GPU to take it from (perhaps itself)."""
    stage = source.shards * source.tp
    pieces = -(-source.tp // target.tp)
    if source.tp % target.tp and target.tp % source.tp:
        pieces += 1  # slices of both overlap out of step
    i, j = np.nonzero(common)
    # One row for each pair of stages, GPU of the target stage, and source TP rank whose slice overlaps the GPU's.
    members = np.arange(target.shards * target.tp)
    pair, member, nth = (x.ravel() for x in np.meshgrid(np.arange(len(i)), members, np.arange(pieces), indexing="ij"))
    i, j = i[pair], j[pair]
    t = member % target.tp
    r = t * source.tp // target.tp + nth
    overlap = np.minimum((t + 1) * source.tp, (r + 1) * target.tp) - np.maximum(t * source.tp, r * target.tp)
    if (overlap <= 0).any():
        keep = overlap > 0
        i, j, member, t, r, overlap = i[keep], j[keep], member[keep], t[keep], r[keep], overlap[keep]
    size = common[i, j] * overlap / (source.tp * target.tp) / (target.shards if target.zero3 else 1)

    # Source GPUs of the row are base + tp · k for k in 0 … shards − 1; those in the target GPU's node come first.
    place = j * (target.shards * target.tp) + member  # within the target mesh
    gpu = target.first_gpu + place
    base = source.first_gpu + i * stage + r
    per_node = cluster.domain_gpus
    node_start = gpu // per_node * per_node
    low = np.clip(-((base - node_start) // source.tp), 0, source.shards)
    high = np.clip(-((base - node_start - per_node) // source.tp), 0, source.shards)
    near = high > low
    leader = place
    if not target.zero3:
        stage_start = j * (target.shards * target.tp)
        begin = np.maximum(stage_start, node_start - target.first_gpu)
        leader = begin + (t - begin) % target.tp  # stages start at a multiple of TP
    k = np.where(near, low + place % np.maximum(high - low, 1), leader % source.shards)
    own = gpu - base
    itself = (own >= 0) & (own < stage) & (own % source.tp == 0)
    chosen = np.where(itself, gpu, base + source.tp * k)
    piece = place if target.zero3 else j * target.tp + t
    return _Wants(chosen, gpu, piece, size)


def _data_wants(total_bytes: float, source: Layout, target: Layout) -> _Wants:
    pieces = math.ceil(source.dp / target.dp) + 1
    places = np.arange(target.gpus)
    place, nth = (x.ravel() for x in np.meshgrid(places, np.arange(pieces), indexing="ij"))
    rank = place // (target.tp * target.cp) % target.dp
    d = rank * source.dp // target.dp + nth
    overlap = np.minimum((rank + 1) * source.dp, (d + 1) * target.dp) - np.maximum(rank * source.dp, d * target.dp)
    last_stage = source.first_gpu + (source.pp - 1) * source.shards * source.tp
    holder, gpu = last_stage + d * source.cp * source.tp, target.first_gpu + place
    keep = (overlap > 0) & (holder != gpu)
    size = total_bytes * overlap[keep] / (source.dp * target.dp)
    return _Wants(holder[keep], gpu[keep], rank[keep], size)
