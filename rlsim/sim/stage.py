"""One generation stage: what is generated, where, and who decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlsim.cost.step import StepCost
from rlsim.sim.borrowing import Borrowing
from rlsim.sim.control import Launch, RolloutControl
from rlsim.sim.costs import RolloutCosts
from rlsim.sim.environment import Environments
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import ChunkListener
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
    micro_batches: int = 1  # of what each replica begins with, one after the other
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
    environments: Environments | None = None  # that run tool calls; None where no request has any
    recorder: Recorder = field(default_factory=Recorder)
