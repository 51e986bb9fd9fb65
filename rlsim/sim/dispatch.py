"""Which replica gets which requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import TypeVar

from rlsim.sim.request import Request
from rlsim.sim.stage import Routing

#: Requests of each replica that gets any, by its index, in the order in which they come there.
Shares = Mapping[int, Sequence[Request]]

_T = TypeVar("_T")


def evenly(requests: Sequence[_T], replicas: int, routing: Routing) -> list[Sequence[_T]]:
    """As many to each replica, one after the other or in runs; the first replicas get one more."""
    if routing == "round_robin":
        return [requests[i::replicas] for i in range(replicas)]
    size, extra = divmod(len(requests), replicas)
    ends = [size * i + min(i, extra) for i in range(replicas + 1)]
    return [requests[first:end] for first, end in pairwise(ends)]


def by_context(requests: Iterable[Request], load_tokens: Mapping[int, int]) -> Shares:
    """Longest context first, each to the replica with the least context so far."""
    return _least([(r, r.context) for r in sorted(requests, key=lambda r: (-r.context, r.id))], load_tokens)


def by_number(requests: Iterable[Request], load: Mapping[int, int]) -> Shares:
    """In their order, each to the replica with the fewest so far."""
    return _least([(request, 1) for request in requests], load)


def _least(weighed: Iterable[tuple[Request, int]], load: Mapping[int, int]) -> Shares:
    shares: dict[int, list[Request]] = {}
    least = [(amount, index) for index, amount in load.items()]
    heapify(least)
    for request, weight in weighed:
        amount, index = least[0]
        heapreplace(least, (amount + weight, index))
        shares.setdefault(index, []).append(request)
    return {index: shares[index] for index in load if index in shares}
