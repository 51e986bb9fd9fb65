"""What is under way in one step."""

from __future__ import annotations

from rlsim.sim.batching import Batching, StepBatch
from rlsim.sim.flow import Flow
from rlsim.sim.request import Request
from rlsim.sim.responses import Responses
from rlsim.sim.rollout import Rollout
from rlsim.sim.scorer import StreamingScorer


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
        self.ids = 0
        self.offered: set[int] = set()  # responses that reward calls have been given
        self.scorers: dict[str, StreamingScorer] = {}  # by call that takes chunks
        self.scored: set[str] = set()  # those of these calls that are done
        self.chunk_tokens = 0
        self.generates_at = float("nan")  # when its rollout began
        self.judge_ready_at = 0.0  # when the judge's weights are there

    def responses(self) -> Responses:
        """The step's responses as columns, as later calls see them."""
        return Responses.of(
            self.requests,
            self.batch.accepted if self.batch else None,
            self.version,
            self.paused if self.batching.pauses else None,
            self.trained_version,
        )

    def trained_on(self) -> list[Request]:
        """The finished requests that belong to the batch."""
        accepted = self.batch.accepted if self.batch else None
        return [r for r in self.requests if r.finished and (accepted is None or r.id in accepted)]
