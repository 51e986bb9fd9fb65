"""One generation stage, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import simpy

from rlsim.cost.step import StepCost
from rlsim.sim.borrowing import Borrowing
from rlsim.sim.control import Launch, RolloutControl, RolloutCosts
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import ChunkListener, Replica
from rlsim.sim.request import EngineConfig, Request

Routing = Literal["contiguous", "round_robin"]
#: To which replica a request goes that is launched while others run: each to the one with the least context, or with
#: the fewest requests.
Dispatch = Literal["least_context", "fewest_requests"]


@dataclass(kw_only=True, slots=True)
class GenerationStage:
    """One generation stage: what is generated, on which GPUs, and who decides and is told."""

    requests: Sequence[Request]
    mesh: Sequence[tuple[int, ...]]  # the GPUs of each node, on some perhaps more than on others
    tp: int  # that every node starts with
    costs: RolloutCosts
    config: EngineConfig
    cap_tokens: int  # the longest a response can get
    control: RolloutControl = field(default_factory=RolloutControl)
    asked_at_finish: bool = True  # each time responses finish; if not, the control is asked at an `ask` alone
    routing: Routing = "contiguous"
    dispatch: Dispatch = "least_context"
    label: str = ""  # the kind of round
    resumed: Sequence[Request] = ()  # further requests, with tokens from an earlier step
    used_tps: dict[int, set[int]] = field(default_factory=dict)  # by node, degrees of this run; the stage adds its own
    version: int = 0  # of the weights that it begins with: updates that they have had
    open: bool = False  # goes on when no request is left, as more may be launched; only a `Stop` ends it
    launcher: Callable[[Launch], Sequence[Request]] | None = None  # makes the requests of a `Launch`
    on_finish: Callable[[Sequence[Request]], None] | None = None  # is told of responses that are complete
    on_abort: Callable[[Sequence[Request]], None] | None = None  # is told of those that a control has dropped
    on_drained: Callable[[], None] | None = None  # is told each time that no request is left of an open stage
    on_idle: Callable[[], None] | None = None  # at the end of a moment: a replica has nothing left
    on_release: Callable[[Iterable[int]], None] | None = None  # is told of GPUs that are given up before the end
    crowded: Callable[[int], StepCost] | None = None  # step cost, by TP, of a replica whose GPUs are shared
    backlog_s: Callable[[], float] = lambda: 0.0  # of training that may borrow GPUs, see `RolloutView`
    batch_missing: Callable[[], float] | None = None  # see `RolloutView`; default: the share that is unfinished
    borrowing: Borrowing | None = None  # GPUs of training that it may have for a time
    chunks: ChunkListener | None = None  # is told of responses on their way
    recorder: Recorder = field(default_factory=Recorder)


class RolloutState:
    """Where a rollout stands: `Rollout` changes it, its control sees it as a `LiveView`."""

    def __init__(self, env: simpy.Environment, stage: GenerationStage) -> None:
        self.env = env
        self.started_at = env.now
        self._requests = {request.id: request for request in (*stage.requests, *stage.resumed)}
        self.launched = len(self._requests)  # so far
        self.cap_tokens = stage.cap_tokens
        self.backlog_s = stage.backlog_s
        self.label = stage.label
        self.borrowing = stage.borrowing
        self._batch_missing = stage.batch_missing
        self.own_nodes = len(stage.mesh)  # the first; the others are those of GPUs of training
        self.mesh = (*stage.mesh, *(stage.borrowing.there.mesh if stage.borrowing else ()))
        self.finished = 0  # responses finished so far
        self.finished_lengths: list[int] = []  # of these, where a control is asked
        self.finished_tokens = (0, 0)  # lengths of the shortest and the longest of them
        self._left = len(self._requests)
        self._left_on = dict.fromkeys(range(len(self.mesh)), 0)
        self._tp = dict.fromkeys(range(len(self.mesh)), stage.borrowing.there.tp if stage.borrowing else stage.tp)
        self._tp |= dict.fromkeys(range(self.own_nodes), stage.tp)
        self._used_tps = stage.used_tps
        self._active: dict[int, list[Replica]] = {node: [] for node in self._tp}
        self._switching: set[int] = set()
        self._just_finished: set[int] = set()
        self.lent: list[Replica] = []  # released, their GPUs not taken back
        self.launching = False  # prompts begin at this moment, or when the weights that are on their way have come

    @property
    def requests(self) -> list[Request]:
        """Those that it knows: all, in the order of their launch, but for what `Rollout.forget` was told."""
        return list(self._requests.values())

    @property
    def unfinished(self) -> int:
        """Requests neither finished nor aborted."""
        return self._left

    @property
    def size(self) -> int:
        """How many replicas the layouts of its own nodes have, without those that are lent, with those borrowed."""
        own = sum(len(gpus) // self._tp[node] for node, gpus in enumerate(self.mesh[: self.own_nodes]))
        return own - len(self.lent) + len(self.borrowed)

    @property
    def batch_missing(self) -> float:
        """Share of the step's batch that is still to come."""
        if self._batch_missing:
            return self._batch_missing()
        return self._left / self.launched if self.launched else 0.0

    @property
    def borrowed(self) -> list[Replica]:
        """The active replicas on GPUs of training."""
        return [replica for node in range(self.own_nodes, len(self.mesh)) for replica in self.active(node)]

    def active(self, node: int | None = None) -> list[Replica]:
        """Replicas that have not been told to stop, of one node or of all, by index."""
        return sorted(self.there(node), key=attrgetter("index"))

    def there(self, node: int | None = None) -> Iterator[Replica]:
        """The same in no particular order."""
        nodes = self._active if node is None else (node,)
        return (replica for n in nodes for replica in self._active[n] if replica.stopped is None)
