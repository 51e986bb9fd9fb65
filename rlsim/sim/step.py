"""What is under way in one step."""

from __future__ import annotations

from collections.abc import Sequence, Set

import simpy

from rlsim.sim.batching import Batching, StepBatch
from rlsim.sim.flow import Flow
from rlsim.sim.request import Request
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


class StepState:
    """What is under way in one step."""

    def __init__(self, flow: Flow, batching: Batching, trained_version: int) -> None:
        self.flow = flow
        self.batching = batching
        self.trained_version = trained_version  # of the weights that the step trains: the updates before it
        self.version = 0  # of the weights that generate: how many updates they have had
        self.paused: frozenset[int] = frozenset()  # requests that go on in a later step
        self.batch: StepBatch | None = None
        self.rollout: Rollout | None = None
        self.requests: list[Request] = []
        self.taken: set[int] | None = None  # those trained on, where a rollout for all steps generates them
        self.ids = 0
        self.trained: list[Countdown] = []  # of each window: the train calls that are to work on it
        self.offered: set[int] = set()  # responses that reward calls have been given
        self.scorers: dict[str, StreamingScorer] = {}  # by call that takes chunks
        self.scored: set[str] = set()  # those of these calls that are done
        self.chunk_tokens = 0
        self.generates_at = float("nan")  # when its rollout began
        self.judge_ready_at = 0.0  # when the judge's weights are there

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

    def trained_on(self) -> list[Request]:
        """The finished requests that belong to the batch."""
        accepted = self._accepted
        return [r for r in self.requests if r.finished and (accepted is None or r.id in accepted)]
