"""What a simulation is given, one system on one trace with one seed; what its calls share, and what is under way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import simpy

from rlsim.cost.step import StepCost
from rlsim.models.hardware import AnyCluster
from rlsim.sim.batching import Batching, PromptFeed, StepBatch
from rlsim.sim.control import Launch, Prompt, RolloutControl, RolloutCosts
from rlsim.sim.elastic import ElasticCall, Pieces
from rlsim.sim.environment import EnvironmentConfig, Environments
from rlsim.sim.flow import Flow
from rlsim.sim.gpus import Borrowing, GpuPool, HybridReplicas
from rlsim.sim.outcome import Outcome, Responses
from rlsim.sim.request import NAN, EngineConfig, Request
from rlsim.sim.reward import RewardControl, RewardFunction
from rlsim.sim.rollout import Rollout
from rlsim.sim.server import RewardModelEngine, StreamingScorer
from rlsim.sim.stage import Routing
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan


class Relay(NamedTuple):
    """Times of new weights that every replica takes on its own from host memory."""

    push_s: float  # until the trainer has put them there, and goes on
    spread_s: float  # from then on until every node has them
    pull_s: Callable[[int], float]  # by TP: a replica's, which stands still


class CallTimes(Protocol):
    """Durations of calls other than generation and reward; rlsim.cost provides them."""

    def parts(
        self, call: Call, placement: Placement, samples: Sequence[Request], rollout_tp: int, windows: int = 1
    ) -> Sequence[tuple[str, float]]:
        """What the call spends its time on, one after the other: names and seconds. The rollout goes on at that TP.

        It works on these samples, those of one of so many windows of a step; a weight sync on none.
        """

    def pieces(self, call: Call) -> Pieces:
        """The same call done in pieces, as samples come."""

    def relay(self, call: Call) -> Relay:
        """A weight sync by way of host memory."""


@dataclass(frozen=True)
class Simulation:
    """One system on one trace with one seed.

    `requests(prompts, samples, first_id)` gives the requests of a launch. `batching` says what is launched and trained
    on, `control` decides during generation, `reward` about reward calls. Steps follow each other as the workflow's
    edges allow. A call holds all GPUs of its placement from start to end, but a `Release` frees some early, windows
    give all back in between, rewards take none (the generation before holds what a judge shares), and edges of the
    grain `sample` let a call work on samples as they come, on whichever of its replicas' GPUs are free. `scorers`:
    engines of the calls that take responses by the chunk, by call name.
    """

    workflow: Workflow
    plan: Plan
    cluster: AnyCluster
    control: RolloutControl
    initial_tp: int
    feasible_tps: tuple[int, ...]  # degrees that a step may begin with
    feed: PromptFeed
    requests: Callable[[Sequence[Prompt], int, int], list[Request]]
    costs: RolloutCosts  # of the first call that generates
    times: CallTimes
    scoring: RewardFunction
    config: EngineConfig
    cap_tokens: int
    steps: int
    batching: Batching = field(default_factory=Batching)
    reward: RewardControl = field(default_factory=RewardControl)
    judge: RewardModelEngine | None = None
    scorers: Mapping[str, RewardModelEngine] = field(default_factory=dict)
    crowded: Callable[[int], StepCost] | None = None  # a rollout replica's steps while others work on its GPUs
    routing: Routing = "contiguous"
    hybrid: HybridReplicas | None = None  # that generation may have on GPUs of training
    environment: EnvironmentConfig | None = None  # of tool calls; None where no request has any
    seed: int = 0  # of what environments draw
    #: What further calls that generate cost, and the TP that they begin with.
    others: Mapping[str, tuple[RolloutCosts, int]] = field(default_factory=dict)


class Machine:
    """Clock, GPUs and record of a run: what all its calls share."""

    def __init__(self, what: Simulation) -> None:
        self.what = what
        self.env = simpy.Environment()
        self.pool = GpuPool(self.env)
        self.outcome = Outcome()
        self.borrowing = Borrowing(self.env, self.pool, what.hybrid) if what.hybrid else None
        self.environments = Environments(self.env, what.environment, what.seed) if what.environment else None
        self.elastic: list[ElasticCall] = []  # training at work that may borrow GPUs

    def backlog_s(self) -> float:
        """How long training that may borrow GPUs will be at work, on its own, on what waits for it."""
        self.elastic = [work for work in self.elastic if not work.done.triggered]
        return sum(work.backlog_s for work in self.elastic)


@dataclass(eq=False)
class StepState:
    """What is under way in one step."""

    flow: Flow
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
    trained: list[dict[str, simpy.Event]] = field(default_factory=list)  # of each window: train calls have worked on it
    offered: set[int] = field(default_factory=set)  # responses that reward calls have been given
    scorers: dict[str, StreamingScorer] = field(default_factory=dict)  # by call that takes chunks
    scored: set[str] = field(default_factory=set)  # those of these calls that are done
    residents: dict[int, str] = field(default_factory=dict)  # by GPU: whose weights calls in pieces have left there
    chunk_tokens: int = 0
    generates_at: float = NAN  # when its rollout began
    judge_ready_at: float = 0.0  # when the judge's weights are there

    def responses(self) -> Responses:
        return Responses(self.requests, self._accepted, self.version, self.paused, self.trained_version)

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
