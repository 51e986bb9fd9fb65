"""What a rollout control sees, and what it may ask for.

A control is asked each time responses finish. It gets a read-only view of the rollout at that moment (never a
response's length) and returns actions; the engine carries them out. docs/engine.md says exactly when each takes
effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from rlsim.cost.step import StepCost
from rlsim.cost.transfer import SwitchCost
from rlsim.errors import CapacityError, ConfigError, PolicyError

KvHandling = Literal["migrate", "recompute"]


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Give a whole node a new tensor-parallel degree, and say what becomes of the KV cache."""

    node: int
    tp: int
    kv: KvHandling = "migrate"


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move requests to another replica."""

    requests: tuple[int, ...]
    to: int
    kv: KvHandling = "migrate"


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the GPUs of these replicas; their requests go to those that stay, to be recomputed."""

    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop these requests unfinished."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the rollout; what is unfinished is handed back with its tokens."""


class Prompt(NamedTuple):
    """One prompt in training order."""

    position: int  # counted from 0 over all epochs: a prompt comes again in the next one at another position
    first_sample: int = 0  # samples generated for it before, in vain


@dataclass(frozen=True, slots=True)
class Launch:
    """Generate `samples` new responses to each of these prompts. `label` names the kind of round in the results.

    `resume`: prompts that the batching kept (`Batching.keep`); their responses go on where they were. Only the first
    launch of a step may resume.
    """

    prompts: tuple[Prompt, ...]
    samples: int
    label: str = ""
    resume: tuple[Prompt, ...] = ()


Action = Reconfigure | Migrate | Release | Abort | Launch | Stop


class RequestView(NamedTuple):
    """An unfinished request as a scheduler may know it."""

    id: int
    position: int  # of its prompt in training order: responses to one prompt share it
    prompt_tokens: int
    generated_tokens: int
    has_kv: bool  # running: its context is in the KV cache

    @property
    def context_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica and its unfinished requests, in the order they were admitted, then those waiting."""

    index: int  # names the replica in actions
    node: int
    tp: int
    gpus: tuple[int, ...]
    requests: tuple[RequestView, ...]


class RolloutCosts(Protocol):
    """What the engine needs to know about the machine; rlsim.cost provides it, tests make their own."""

    def step(self, tp: int) -> StepCost:
        """Iteration times of a replica at this TP."""

    def capacity_pages(self, tp: int) -> int:
        """KV pages of a replica at this TP."""

    def switch(
        self,
        gpus: int,
        from_tp: int,
        to_tp: int,
        contexts: Sequence[int],
        sequences: int,
        kv: KvHandling,
        first_use: bool,
    ) -> SwitchCost:
        """Pause of so many GPUs of a node with `sequences` unfinished requests, some holding `contexts` tokens of KV.

        With `kv` "recompute" the KV costs nothing here: the engine prefills it again. `first_use`: this run has not
        used `to_tp` on this node before, so its communication groups must be created.
        """

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:
        """Time of moving the KV of these contexts from one replica to another."""


class RolloutView(Protocol):
    """The rollout at one moment, read-only. Building the details costs time, so they are made when asked for."""

    @property
    def now_s(self) -> float:
        """Seconds since the rollout began."""

    @property
    def label(self) -> str:
        """The kind of round, as the step's batching calls it."""

    @property
    def cap_tokens(self) -> int:
        """The longest a response can get."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that have active replicas and are not switching."""

    @property
    def finished_nodes(self) -> tuple[int, ...]:
        """Those of `nodes` on which responses have just finished."""

    @property
    def finished(self) -> int:
        """Responses finished so far."""

    @property
    def total(self) -> int:
        """Requests launched in this rollout."""

    @property
    def finished_tokens(self) -> tuple[int, int]:
        """Lengths of the shortest and the longest response finished so far; (0, 0) before the first."""

    def finished_lengths(self) -> Sequence[int]:
        """Lengths of the responses finished so far, in that order."""

    def unfinished(self, node: int | None = None) -> int:
        """Requests neither finished nor aborted, on one node or on all. Cheap."""

    def generated(self, node: int) -> Mapping[int, int]:
        """How many of the node's unfinished requests have generated how many tokens. Cheap."""

    def context_tokens(self, node: int) -> int:
        """Prompt and generated tokens of all unfinished requests of the node. Cheap."""

    def gpus(self, node: int) -> int:
        """How many of the node's GPUs generate; they all have one layout."""

    def tp(self, node: int) -> int:
        """The node's present tensor-parallel degree."""

    def used_tps(self, node: int) -> frozenset[int]:
        """Degrees that this node has used before in the run: their communication groups exist."""

    def replicas(self, node: int | None = None) -> tuple[ReplicaView, ...]:
        """The active replicas of one node or of all, with their requests."""


#: Why a layout that says how generation uses its GPUs is refused, where the plan does so too.
PLANNED = (
    "the plan says how generation uses its GPUs (replicas of {}): leave tp out of the plan's generation, or the layout "
    "out of the system"
)


@dataclass(frozen=True)
class ControlContext:
    """What a control learns once, before the run: the machine and the limits, no lengths."""

    costs: RolloutCosts
    feasible_tps: tuple[int, ...]  # degrees that divide `node_gpus` and fit the model with room for one full sequence
    infeasible: Mapping[int, str]  # the other degrees that divide a whole node, and why they are not feasible
    node_gpus: tuple[int, ...]  # of every node, how many GPUs generate
    cap_tokens: int
    page_tokens: int
    requests: int  # responses launched per step
    prompt_tokens: int  # longest prompt of the trace
    max_num_seqs: int = 1024  # responses that a replica runs at once
    replica_gpus: int | None = None  # of a rollout replica (TP × PP), where the plan says it

    @property
    def gpus(self) -> int:
        """GPUs that generate."""
        return sum(self.node_gpus)

    def check_tp(self, tp: int) -> int:
        """`tp` if every node can run it; else `CapacityError` (too small), or `ConfigError`: the plan says another
        degree, or it does not divide the GPUs of a node.
        """
        if self.replica_gpus not in (None, tp):
            raise ConfigError(f"{PLANNED.format(self.replica_gpus)}; the system's layout would begin with {tp}")
        if tp in self.infeasible:
            raise CapacityError(self.infeasible[tp])
        for gpus in self.node_gpus:
            if tp < 1 or gpus % tp:
                raise ConfigError(f"tp {tp} does not divide the {gpus} GPUs of a node")
        if tp not in self.feasible_tps:
            raise CapacityError(self.infeasible.get(tp, f"tp {tp} is not feasible"))
        return tp


@dataclass(frozen=True)
class RolloutReport:
    """What a control learns when a generation stage is over."""

    step: int
    tp: int  # that it began with
    gen_time_s: float
    preemptions: int
    lengths: tuple[int, ...]  # of the responses that were finished
    label: str  # the kind of round, see `Launch`
    next_label: str = ""  # the kind that comes next
    loads: tuple[tuple[int, int], ...] = ()  # prompt and generated tokens of all responses, finished or not


@dataclass(frozen=True)
class ScoringReport:
    """What a control learns when all calls that take responses by the chunk are done with a step."""

    step: int
    chunk_tokens: int  # that the rollout handed over
    stage_time_s: float  # from the start of generation
    response_tokens: int  # generated in the step


class RolloutControl:
    """Base of all rollout controls: never changes anything. Override what the system decides."""

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        """Parameters to try where the system is to be tuned: the fastest of them is run. None if it needs no tuning."""
        return ()

    def setup(self, context: ControlContext) -> None:
        """Called once before the first step: the place to profile."""

    def initial_tp(self, context: ControlContext) -> int:  # noqa: ARG002
        """The layout of the first step, and of every one unless `next_tp` says otherwise."""
        raise PolicyError(f"{type(self).__name__} does not say which layout it starts with: define initial_tp")

    def on_finish(self, view: RolloutView) -> Action | Iterable[Action] | None:  # noqa: ARG002
        """Some responses have just finished: return actions, or None to go on."""
        return None

    def next_tp(self, report: RolloutReport) -> int | None:  # noqa: ARG002
        """A generation stage is over: the layout that the next one starts with, or None to leave that as it is."""
        return None

    def chunk_tokens(self, planned: int) -> int:
        """A rollout begins whose responses go on by the chunk: the length of one; `planned`: what the workflow says."""
        return planned

    def on_scored(self, report: ScoringReport) -> None:
        """The calls that took a step's responses by the chunk are done."""

    @property
    def label(self) -> str:
        """The control's name in messages."""
        return type(self).__name__


class Controls(RolloutControl):
    """Several controls as one: each is asked in turn, and all that they want is done."""

    def __init__(self, parts: Sequence[RolloutControl]) -> None:
        self.parts = tuple(parts)
        self._deciding = [part for part in self.parts if decides(part)]
        self._asked: RolloutControl = self

    def setup(self, context: ControlContext) -> None:
        for part in self.parts:
            part.setup(context)

    def on_finish(self, view: RolloutView) -> Iterator[Action]:
        """The actions of all, those of the first first; none after a `Stop`."""
        for part in self._deciding:
            self._asked, answer = part, part.on_finish(view)
            for action in answer if isinstance(answer, Iterable) else () if answer is None else (answer,):
                yield action
                if isinstance(action, Stop):
                    return

    def next_tp(self, report: RolloutReport) -> int | None:
        """What the last of those that have an opinion says."""
        wanted = [tp for tp in [part.next_tp(report) for part in self.parts] if tp is not None]
        return wanted[-1] if wanted else None

    def chunk_tokens(self, planned: int) -> int:
        """What the last of those that change it says."""
        for part in self.parts:
            planned = part.chunk_tokens(planned)
        return planned

    def on_scored(self, report: ScoringReport) -> None:
        for part in self.parts:
            part.on_scored(report)

    @property
    def label(self) -> str:
        """The part that was asked last."""
        return type(self._asked).__name__


def decides(control: RolloutControl) -> bool:
    """Whether the control overrides `on_finish`; one that does not need not be asked."""
    if isinstance(control, Controls):
        return any(decides(part) for part in control.parts)
    method: Callable[..., object] = type(control).on_finish
    return method is not RolloutControl.on_finish
