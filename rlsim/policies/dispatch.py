"""Which replica gets which responses, by their predicted lengths or their prompts, and whom a replica admits first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.policies.parts import Informed
from rlsim.sim.control import ReplicaView, RequestView, RolloutControl
from rlsim.sim.stage import to_least


class SkewnessDispatch(Informed):
    """Few long responses on each of some replicas, many short ones on each of the others (StreamRL), longest first.

    Zhong et al. 2025. As many replicas are kept for the long ones as make the slower side fastest. A side takes as long
    as its longest response under a batch of its size; where that says that all replicas together are faster, nothing is
    kept.
    """

    long: float = Field(default=0.2, gt=0, lt=1)
    error: float = Field(default=0.3, ge=0, le=10)

    @property
    def length_error(self) -> float:
        return self.error

    def dispatch(self, launched: Sequence[RequestView], replicas: Sequence[ReplicaView]) -> Mapping[int, Sequence[int]]:
        """The split of the replicas that ends first, and on each side the longest response first."""
        ordered = sorted(launched, key=lambda r: (-r.predicted_tokens, r.id))
        long, others = ordered[: round(self.long * len(ordered))], ordered[round(self.long * len(ordered)) :]
        end_s = {0: self._end_s(ordered, replicas)}
        for kept in range(1, len(replicas)):
            end_s[kept] = max(self._end_s(long, replicas[:kept]), self._end_s(others, replicas[kept:]))
        kept = min(end_s, key=end_s.__getitem__)
        if not kept:
            return _spread(ordered, replicas)
        return _spread(long, replicas[:kept]) | _spread(others, replicas[kept:])

    def _end_s(self, requests: Sequence[RequestView], replicas: Sequence[ReplicaView]) -> float:
        """Of the longest, beside as many as its replica gets, whose contexts are those of the mean half-way."""
        if not requests:
            return 0.0
        batch = -(-len(requests) // len(replicas))
        mean = sum(r.context_tokens + r.predicted_tokens / 2 for r in requests) / len(requests)
        step_s = self._context.costs.step(replicas[0].tp).decode(batch).step_s(batch * mean)
        return requests[0].predicted_tokens * step_s


class PrefixDispatch(Schema, RolloutControl):
    """Responses to one prompt share a replica, whose prefix cache then has what they have in common.

    The next prompt goes where the fewest requests are; a router of prefixes in front of engines does the same with a
    batch of groups.
    """

    def dispatch(self, launched: Sequence[RequestView], replicas: Sequence[ReplicaView]) -> Mapping[int, Sequence[int]]:
        groups: dict[int, list[int]] = {}
        for request in launched:
            groups.setdefault(request.position, []).append(request.id)
        load = {replica.index: len(replica.requests) for replica in replicas}
        shares = to_least([(ids, len(ids)) for ids in groups.values()], load)
        return {index: [*chain.from_iterable(own)] for index, own in shares.items()}


class QueueOrder(Schema, RolloutControl):
    """Replicas admit who waits in this order, trajectories that come back from their tools too."""

    first: Literal["longest", "shortest", "least_served"] = "longest"
    error: float = Field(default=0.3, ge=0, le=10)

    @property
    def length_error(self) -> float | None:
        return None if self.first == "least_served" else self.error

    def priority(self, request: RequestView) -> float:
        if self.first == "least_served":
            return request.generated_tokens
        left = max(request.predicted_tokens - request.generated_tokens, 0.0)
        return -left if self.first == "longest" else left


def _spread(requests: Sequence[RequestView], replicas: Sequence[ReplicaView]) -> dict[int, list[int]]:
    """In their order, each to the replica that is predicted to have the fewest tokens so far."""
    weighed = [(request.id, request.predicted_tokens) for request in requests]
    return to_least(weighed, {replica.index: 0.0 for replica in replicas})
