"""Seconds of communication between GPUs.

Inside an NVLink domain, a node or a rack of them: curves fitted to NCCL, and inside a node to the engine's own
all-reduce, which shares memory between the processes of one host. Across domains a formula of few constants, NCCL's
own latencies among them (`fits.AcrossFit`), for any cluster that is known by its link alone.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache, cached_property
from math import exp, log, log2
from typing import Literal, Protocol, get_args

import numpy as np

from rlsim.cost.calibration import Reference
from rlsim.cost.fits import CollectiveFit, CollectiveFits, Operation
from rlsim.cost.layout import Integers, Layout
from rlsim.cost.step import Lookups
from rlsim.errors import CalibrationError
from rlsim.models.hardware import Cluster

OPERATIONS: tuple[str, ...] = get_args(Operation)
#: DeepEP's low-latency kernels across nodes: seconds of no bytes one way, such that 16 GPUs come out as its authors
#: measured (118 and 195 us, github.com/deepseek-ai/DeepEP, docs/legacy.md); and bytes both ways, FP8 there and bf16
#: back, over those of bf16 one way.
DEEPEP_S, DEEPEP_BYTES = 47e-6, 1.5


class _Curve:
    """One fitted collective: log-log linear between knots, flat below, proportional above."""

    def __init__(self, fit: CollectiveFit, stretch: float) -> None:
        base, times = fit.time_s[0], fit.time_s
        # A slower link stretches the time above that of a tiny message, not the latency itself.
        stretched = times if stretch == 1.0 else [base + (time - base) * stretch for time in times]
        self._x, self._y = list(map(log, fit.message_bytes)), list(map(log, stretched))

    def measured(self, size: float) -> bool:
        """Whether messages of so many bytes lie within what was measured; rounding aside."""
        return size <= exp(self._x[-1]) * (1 + 1e-9)

    def __call__(self, size: float) -> float:
        x, y = self._x, self._y
        if size <= 0.0:
            return exp(y[0])
        at = log(size)
        if at <= x[0]:
            return exp(y[0])
        if at >= x[-1]:
            return exp(y[-1] + at - x[-1])
        i = bisect_right(x, at) - 1
        return exp(y[i] + (y[i + 1] - y[i]) * (at - x[i]) / (x[i + 1] - x[i]))


def exchanged_bytes(tokens: float, active: int, hidden_bytes: float, gpus: int) -> tuple[float, float]:
    """Bytes of `tokens` tokens with a copy for each of the `active` experts of a token, and with one for each of `gpus`
    GPUs that it reaches if every choice falls on any GPU alike."""
    size = tokens * hidden_bytes
    return size * active, size * gpus * (1.0 - (1.0 - 1.0 / gpus) ** active)


class Collectives:
    """Communication on one cluster.

    `message_bytes` is always the full tensor: what every GPU holds after an all-gather or before a reduce-scatter or
    all-reduce, what one GPU deals out in an all-to-all with its own part, what travels in a broadcast or send. In a
    send_recv half of the GPUs send to the others, all at once.
    Fits made on another link rate are stretched by the ratio of the rates.
    """

    def __init__(self, fits: CollectiveFits, reference: Reference, cluster: Cluster) -> None:
        stretch = reference.link_bytes_per_s / cluster.intra.bytes_per_s
        self.cluster = cluster
        self.lookups = Lookups()
        self._seen: set[tuple[str, float, int]] = set()
        self.across = fits.across
        self._nccl: dict[str, dict[int, _Curve]] = {
            op: {gpus: _Curve(fit, stretch) for gpus, fit in sorted(by_gpus.items())}
            for op, by_gpus in fits.nccl.items()
        }
        self._deepep = {
            gpus: (_Curve(fit.low_latency, stretch), _Curve(fit.normal, stretch)) for gpus, fit in fits.deepep.items()
        }
        self._custom = {gpus: _Curve(fit, stretch) for gpus, fit in sorted(fits.custom_all_reduce.items())}

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds of `op` over `gpus` GPUs spread evenly over `nodes` nodes (NVLink domains where these are larger).

        Zero for one GPU or no bytes. Raises `CalibrationError` for an operation that was not measured, and if the
        cluster has no inter-node link.
        """
        if gpus == 1 or message_bytes <= 0.0:
            return 0.0
        if nodes == 1:
            return self._intra(op, message_bytes, gpus)
        return self._across(op, message_bytes, gpus // nodes, nodes)

    def exchange_s(self, tokens: float, active: int, hidden_bytes: float, gpus: int, nodes: int = 1) -> float:
        """Seconds in which every one of `gpus` GPUs sends `tokens` tokens of `hidden_bytes` to the GPUs of the `active`
        experts that each has chosen, and gets as much back.

        Inside a node DeepEP's dispatch and combine where they were measured on so many GPUs, by whichever of its two
        kinds of kernels is faster; else two all-to-alls, or, across nodes where the engine has DeepEP, its low-latency
        kernels if these are faster. A token that has chosen several experts of a GPU goes there once, but for those.
        """
        size_each, size_once = exchanged_bytes(tokens, active, hidden_bytes, gpus)
        curves = self._deepep.get(gpus) if nodes == 1 else None
        if curves is None:
            time = 2.0 * self.time_s("all_to_all", size_once, gpus, nodes)
            if self._deepep and nodes > 1 and self.cluster.inter is not None:
                link, local = self.cluster.inter, gpus // nodes
                outside = DEEPEP_BYTES * size_each * (nodes - 1) / nodes
                low_latency_s = 2.0 * DEEPEP_S + outside * min(link.shared_by_gpus, local) / link.bytes_per_s
                time = min(time, low_latency_s)
            return time
        self.lookups.add("exchange", "interpolated")
        low_latency, normal = curves
        return min(low_latency(size_each), normal(size_once))

    def _intra(self, op: str, size: float, gpus: int) -> float:
        if op == "send_recv":
            # In an all-gather over two GPUs each sends half of the tensor while it receives the other half.
            return self._nccl_s("all_gather", 2.0 * size, 2)
        if op == "broadcast":
            # A pipelined ring moves the whole tensor over each link, an all-gather only (gpus − 1) / gpus of it.
            return self._nccl_s("all_gather", size * gpus / (gpus - 1), gpus)
        time = self._nccl_s(op, size, gpus)
        if op == "all_reduce" and gpus in self._custom and gpus <= self.cluster.gpus_per_node:
            time = min(time, self._custom[gpus](size))
        return time

    def _nccl_s(self, op: str, size: float, gpus: int) -> float:
        if (op, size, gpus) not in self._seen:
            curves = self._measured(op)
            first, last, nearest = min(curves), max(curves), min(curves, key=lambda count: abs(count - gpus))
            if not first <= gpus <= last:
                self.lookups.add(op, "extrapolated", f"{gpus} GPUs of one domain, measured {first} to {last}")
            elif not curves[nearest].measured(size):
                self.lookups.add(op, "extrapolated", f"{size:g} bytes over {gpus} GPUs, beyond what was measured")
            else:
                self.lookups.add(op, "interpolated")
            self._seen.add((op, size, gpus))
        return self._curve_s(op, size, gpus)

    def _measured(self, op: str) -> dict[int, _Curve]:
        curves = self._nccl.get(op)
        if not curves:
            raise CalibrationError(f"the calibration holds no measurement of {op!r}")
        return curves

    def _curve_s(self, op: str, size: float, gpus: int) -> float:
        """Seconds of NCCL's `op` inside one domain, between and beyond the numbers of GPUs that were measured."""
        curves = self._measured(op)
        if gpus in curves:
            return curves[gpus](size)
        counts = list(curves)
        if gpus < counts[0]:
            return curves[counts[0]](size)
        if gpus > counts[-1]:
            # Latency as through a tree, by log2 of the GPUs; the rest by what a link of a ring carries: (n − 1) / n.
            high = counts[-1]
            latency, rest = curves[high](0.0), curves[high](size) - curves[high](0.0)
            factor = ((gpus - 1) / gpus) / ((high - 1) / high)
            return latency * log2(gpus) / log2(high) + rest * factor
        i = bisect_right(counts, gpus) - 1
        low, high = counts[i], counts[i + 1]
        share = log(gpus / low) / log(high / low)
        return curves[low](size) * (1.0 - share) + curves[high](size) * share

    def _across(self, op: str, size: float, local: int, nodes: int) -> float:
        """NCCL over `local` GPUs in each of `nodes` nodes, each GPU with its share of the node's ports.

        Small all-reduces go up and down a tree over nodes, within each along a chain of its GPUs; other operations go
        round a ring, or to every GPU on its own. Latencies are those of NCCL's tuning model for its LL protocol
        (src/graph/tuning.cc, 2.21). Large messages fill either the network, as a ring does (an all-reduce of two nodes
        as a tree, which sends each byte once), or NVLink, whichever is slower: what a node's GPUs do among themselves
        overlaps with what they send.
        """
        link, fit, gpus = self.cluster.inter, self.across, local * nodes
        if link is None:
            raise CalibrationError(
                f"cluster {self.cluster.name!r} has no inter-node link, but {op!r} spans {nodes} nodes"
            )
        if (op, size, -nodes) not in self._seen:
            self._seen.add((op, size, -nodes))
            self.lookups.add(
                f"{op} across nodes", "extrapolated", f"{nodes} nodes; as on other networks, this one is not measured"
            )
        sharing = min(link.shared_by_gpus, local)
        rate = link.bytes_per_s * fit.efficiency / sharing
        ring, around = size / local * (gpus - 1) / gpus, (gpus - nodes) * fit.message_s + (nodes - 1) * link.latency_s
        inside = (op, size)
        if op == "all_reduce":
            latency = 2.0 * ((local - 1) * fit.step_s + log2(nodes) * (link.latency_s + fit.tree_hop_s))
            sent = size / local if nodes == 2 else 2.0 * ring
        elif op in ("all_gather", "reduce_scatter"):
            latency, sent = around, ring
        elif op == "broadcast":
            latency, sent, inside = around, size / local, ("all_gather", size)
        elif op == "all_to_all":  # a message to each GPU; those for other nodes leave over the GPU's own port
            latency = link.latency_s + (gpus - 1) * fit.message_s
            sent, inside = size * (gpus - local) / gpus, (op, size * local / gpus)
        else:
            latency, sent, local = link.latency_s + fit.tree_hop_s, size, 1
        transfer = sent / rate
        if local > 1:
            transfer = max(transfer, self._curve_s(*inside, local) - self._curve_s(inside[0], 0.0, local))
        start = fit.base_s + latency
        ramp: float = fit.ramp * (transfer / start) ** fit.power
        return start + transfer + start * ramp


# Groups of ranks ------------------------------------------------------------------------------------------------------

# Communication inside the groups of a layout, wherever on the nodes of a cluster its mesh lies.
#
# Here a node is what the faster link joins: an NVLink domain where that is larger than a node.

#: The GPUs that talk to each other: TP, CP and PP groups; `shards`, the DP × CP ranks with the same parameters; under
#: HSDP `sharded`, those of them that share the states, and `replicas`, those that hold the same part of them.
Group = Literal["tp", "cp", "shards", "sharded", "replicas", "pp"]


class CollectiveTime(Protocol):
    """Times of communication, as `Collectives` gives them."""

    def time_s(self, op: str, message_bytes: float, gpus: int, nodes: int = 1) -> float: ...


class Groups:
    """Times of collectives in the process groups of `layout` on `cluster`; `collectives` gives those of even groups."""

    def __init__(self, collectives: CollectiveTime, cluster: Cluster, layout: Layout) -> None:
        self._collectives, self._layout = collectives, layout
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
        layout, sharded = self._layout, self._layout.sharded_over
        degree, apart = {  # the group's, and how far apart neighbours of it lie
            "tp": (layout.tp, 1),
            "cp": (layout.cp, layout.tp),
            "shards": (layout.shards, layout.tp),
            "sharded": (sharded, layout.tp),
            "replicas": (layout.shards // sharded, sharded * layout.tp),
            "pp": (layout.pp, layout.shards * layout.tp),
        }[group]
        gpus = np.arange(layout.first_gpu, layout.end_gpu, dtype=np.int64)
        mesh = (gpus // self._per_domain).reshape(-1, degree, apart)
        return np.moveaxis(mesh, 1, 2).reshape(-1, degree)
