"""What is under way in one step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field

import simpy

from rlsim.sim.batching import Batching, StepBatch
from rlsim.sim.control import Launch
from rlsim.sim.flow import Flow
from rlsim.sim.request import NAN, Request
from rlsim.sim.responses import Responses
from rlsim.sim.rollout import Rollout
from rlsim.sim.scorer import StreamingScorer


class Countdown:
    """`done` fires when so many have said `one`."""

    def __init__(self, env: simpy.Environment, left: int) -> None:
        self.done = env.event()
        self._left = left

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self.done.succeed()


@dataclass(eq=False)
class StepState:
    """What is under way in one step."""

    flow: Flow
    batching: Batching
    trained_version: int  # of the weights that the step trains: the updates before it
    version: int = 0  # of the weights that generate: how many updates they have had
    paused: frozenset[int] = frozenset()  # requests that go on in a later step
    batch: StepBatch | None = None
    rollout: Rollout | None = None
    requests: list[Request] = field(default_factory=list)
    made: dict[str, list[Request]] = field(default_factory=dict)  # these, by the call that generates them
    launch: Launch | None = None  # of all calls that generate together
    replicas: Iterator[int] = field(default_factory=itertools.count)  # their numbers
    taken: set[int] | None = None  # those trained on, where a rollout for all steps generates them
    ids: int = 0
    trained: list[Countdown] = field(default_factory=list)  # of each window: the train calls that are to work on it
    offered: set[int] = field(default_factory=set)  # responses that reward calls have been given
    scorers: dict[str, StreamingScorer] = field(default_factory=dict)  # by call that takes chunks
    scored: set[str] = field(default_factory=set)  # those of these calls that are done
    residents: dict[int, str] = field(default_factory=dict)  # by GPU: whose weights calls in pieces have left there
    chunk_tokens: int = 0
    generates_at: float = NAN  # when its rollout began
    judge_ready_at: float = 0.0  # when the judge's weights are there

    def responses(self) -> Responses:
        return Responses.of(
            self.requests,
            self._accepted,
            self.version,
            self.paused if self.batching.launcher.pauses else None,
            self.trained_version,
        )

    def take(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self.taken = self.taken or set()
        self.taken.update(request.id for request in requests)

    def forget(self) -> None:
        """The step is over: let go of what keeps its requests in cycles, so that they are freed at once."""
        self.flow.forget()
        self.rollout = None

    @property
    def _accepted(self) -> Set[int] | None:
        return self.batch.accepted if self.batch else self.taken

    def trained_on(self, calls: Collection[str] = ()) -> list[Request]:
        """The finished requests that belong to the batch: all, or those that these calls have generated."""
        accepted = self._accepted
        requests = [r for call in calls for r in self.made.get(call, ())] if calls else self.requests
        return [r for r in requests if r.finished and (accepted is None or r.id in accepted)]
