"""Communication inside the groups of a layout, wherever on the nodes of a cluster its mesh lies.

Here a node is what the faster link joins: an NVLink domain where that is larger than a node.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Literal, Protocol

import numpy as np

from rlsim.cost.layout import Integers, Layout
from rlsim.models.hardware import Cluster

#: The GPUs that talk to each other: TP, CP and PP groups; `shards`, the DP × CP ranks with the same parameters; under
#: HSDP `sharded`, those of them that share the states, and `replicas`, those that hold the same part of them.
Group = Literal["tp", "cp", "shards", "sharded", "replicas", "pp"]


class CollectiveTime(Protocol):
    """Times of communication, as `rlsim.cost.collectives.Collectives` gives them."""

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds of one collective among `gpus` ranks spread over `nodes` nodes.

        `op` is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_recv; `message_bytes` the whole
        gathered tensor of an all_gather or reduce_scatter, else the tensor each rank holds or sends.
        """
        ...


class Groups:
    """Times of collectives inside the groups of `layout` on `cluster`; `collectives` gives those of even groups.

    `sharded_over`: the ranks that share the states under HSDP; default: all of `shards`.
    """

    def __init__(
        self, collectives: CollectiveTime, cluster: Cluster, layout: Layout, sharded_over: int | None = None
    ) -> None:
        self._collectives, self._layout = collectives, layout
        self._sharded_over = sharded_over or layout.shards
        self._per_domain = cluster.domain_gpus
        self.spreads = cache(self._spreads)

    def time_s(self, op: str, message_bytes: float, group: Group) -> float:
        """Seconds of `op` in the slowest of these groups; `message_bytes` as in `Collectives.time_s`.

        A group that lies unevenly over nodes takes the time of an even one, of as many GPUs of every node as the one
        with fewest has, and what the node with most of its GPUs needs longer inside.
        """
        return max([self._time_s(op, message_bytes, *spread) for spread in self.spreads(group)])

    def _time_s(self, op: str, size: float, nodes: int, fewest: int, most: int) -> float:
        time_s = self._collectives.time_s
        even_s = time_s(op, size, nodes * fewest, nodes)
        return even_s + time_s(op, size, most, 1) - time_s(op, size, fewest, 1) if most > fewest else even_s

    def _spreads(self, group: Group) -> list[tuple[int, int, int]]:
        """Ways in which these groups lie over nodes: how many, and the fewest and the most GPUs on one of them."""
        rows = self._nodes(group)
        counts = [np.unique(row, return_counts=True)[1].tolist() for row in np.unique(rows - rows[:, :1], axis=0)]
        return sorted({(len(count), min(count), max(count)) for count in counts})

    @cached_property
    def boundaries(self) -> tuple[int, int]:
        """Boundaries between neighbouring pipeline stages: inside nodes, and across them (the most of any pipeline)."""
        across = int(np.count_nonzero(np.diff(self._nodes("pp")), axis=1).max())
        return self._layout.pp - 1 - across, across

    def _nodes(self, group: Group) -> Integers:
        """The nodes of the GPUs of every such group: (groups, GPUs of a group)."""
        layout = self._layout
        gpus = np.arange(layout.first_gpu, layout.end_gpu, dtype=np.int64)
        mesh = (gpus // self._per_domain).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
        match group:
            case "tp":
                return mesh.reshape(-1, layout.tp)
            case "cp":
                return np.moveaxis(mesh, 2, 3).reshape(-1, layout.cp)
            case "shards":
                return np.moveaxis(mesh.reshape(layout.pp, layout.shards, layout.tp), 1, 2).reshape(-1, layout.shards)
            case "sharded":
                return self._nodes("shards").reshape(-1, self._sharded_over)
            case "replicas":
                rows = self._nodes("shards").reshape(-1, layout.shards // self._sharded_over, self._sharded_over)
                return np.moveaxis(rows, 1, 2).reshape(-1, layout.shards // self._sharded_over)
            case "pp":
                return mesh.reshape(layout.pp, -1).T
