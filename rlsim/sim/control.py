"""What a rollout control sees, learns and answers; `rlsim.sim.actions` has most of what it may ask for.

A control is asked each time responses finish, and every so many seconds if it wants. It gets a read-only view of the
rollout at that moment (never a response's length) and returns actions; the engine carries them out. docs/engine.md says
exactly when each takes effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

from rlsim.base.hooks import Hooked, hook, is_number, is_whole
from rlsim.cost.transfer import WAYS
from rlsim.errors import CapacityError, ConfigError, PolicyError
from rlsim.sim.gpus import Borrowable as Borrowable
from rlsim.sim.gpus import KvHandling as KvHandling
from rlsim.sim.gpus import RolloutCosts as RolloutCosts
from rlsim.sim.view import ReplicaView as ReplicaView
from rlsim.sim.view import RequestView as RequestView
from rlsim.sim.view import RolloutView as RolloutView
from rlsim.sim.view import ToolCallView as ToolCallView


def are_numbers(ids: object) -> bool:
    """Whether it is a collection of whole numbers."""
    return isinstance(ids, Collection) and all(is_whole(number, 0) for number in ids)


#: What the fields of actions must be, by name.
_PROPER: Mapping[str, Callable[[Any], bool]] = {
    "node": lambda node: is_whole(node, 0),
    "tp": lambda tp: is_whole(tp, 0),
    "to": lambda to: is_whole(to, 0),
    "tokens": is_whole,
    "requests": are_numbers,
    "replicas": are_numbers,
    "kv": lambda kv: kv in get_args(KvHandling),
    "way": lambda way: way in WAYS,
}


class RefusedError(ValueError):
    """An action names what is not there, or what may not be; says why."""


class Action:
    """What a control asks for, base of all actions."""

    __slots__ = ()
    last: ClassVar[bool] = False  # nothing that is asked for after it at the same moment is done

    def proper(self) -> bool:
        """Whether its fields are of the right types; `carry_out` says whether what they name is there."""
        names = getattr(self, "__match_args__", None)  # a bare `Action` has none
        return names is not None and all(_PROPER[name](getattr(self, name)) for name in names)

    def carry_out(self, rollout: Any) -> None:
        """Do it, or begin to. Raises `RefusedError`."""
        raise NotImplementedError


class Prompt(NamedTuple):
    """One prompt in training order."""

    position: int  # counted from 0 over all epochs: a prompt comes again in the next one at another position
    first_sample: int = 0  # samples generated for it before, in vain


@dataclass(frozen=True, slots=True)
class Launch(Action):
    """Generate `samples` new responses to each of these prompts. `label` names the kind of round in the results.

    `resume`: prompts that the batching kept (`Batching.keep`); their responses go on where they were. Only the first
    launch of a step may resume. `budget_tokens`: each response, new or resumed, generates at most so many tokens and
    then pauses, without its KV cache (0: no limit). `to`: the replicas that generate them (none named: any); the
    requests of those that have stopped go to the others.
    """

    prompts: tuple[Prompt, ...]
    samples: int
    label: str = ""
    resume: tuple[Prompt, ...] = ()
    budget_tokens: int = 0
    to: tuple[int, ...] = ()

    def proper(self) -> bool:
        """Whether there are prompts, none is launched twice, and each has at least one response, too."""
        if not (is_whole(self.samples) and is_whole(self.budget_tokens, 0) and are_numbers(self.to)):
            return False
        if not (isinstance(self.prompts, Sequence) and isinstance(self.resume, Sequence)):
            return False
        prompts = [*self.prompts, *self.resume]
        are = all(isinstance(p, Prompt) and is_whole(p.position, 0) and is_whole(p.first_sample, 0) for p in prompts)
        return are and bool(prompts) and len({prompt.position for prompt in prompts}) == len(prompts)

    def carry_out(self, rollout: Any) -> None:
        rollout.launch(self)


def one_of(tps: Iterable[int]) -> str:
    """Degrees in a message."""
    return f"TP {', '.join(map(str, tps))}"


def divides_nodes(tp: int, node_gpus: Sequence[int]) -> bool:
    """Whether replicas of `tp` GPUs fill every node, or each as many whole nodes, all alike."""
    if tp < 1:
        return False
    if all(gpus % tp == 0 for gpus in node_gpus):
        return True
    return len(set(node_gpus)) == 1 and tp % node_gpus[0] == 0 and sum(node_gpus) % tp == 0


#: Why a layout that says how generation uses its GPUs is refused, where the plan does so too.
PLANNED = (
    "the plan says how generation uses its GPUs (replicas of {}): leave tp out of the plan's generation, or the layout "
    "out of the system"
)


_T = TypeVar("_T")


@dataclass(frozen=True)
class ControlContext:
    """What a control learns once, before the run: the machine and the limits, no lengths."""

    costs: RolloutCosts
    feasible_tps: tuple[int, ...]  # degrees that divide `node_gpus` and fit the model with room for one full sequence
    infeasible: Mapping[int, str]  # the other degrees that divide a whole node, and why they are not feasible
    node_gpus: tuple[int, ...]  # how many GPUs of every node generate
    cap_tokens: int  # the longest a response can get
    page_tokens: int  # tokens of a KV page
    requests: int  # responses launched per step
    prompt_tokens: int  # longest prompt of the trace
    max_num_seqs: int = 1024  # responses that a replica runs at once
    replica_gpus: int | None = None  # GPUs of a rollout replica (TP × PP), where the plan says it
    windows: int = 0  # equal parts in which training takes a step's batch; 0: it does not
    sequence_tokens: int = 0  # longest prompt and response together; 0: the longest of each
    seed: int = 0  # of the run, for what a control draws

    def __post_init__(self) -> None:
        if not self.sequence_tokens:
            object.__setattr__(self, "sequence_tokens", self.prompt_tokens + self.cap_tokens)

    @property
    def gpus(self) -> int:
        """GPUs that generate."""
        return sum(self.node_gpus)

    def kv_tokens(self, tp: int) -> int:
        """Tokens that the KV cache of a replica at this degree has room for."""
        return self.costs.capacity_pages(tp) * self.page_tokens

    def check_tp(self, tp: int) -> int:
        """`tp` if every node can run it, or whole nodes together; else `CapacityError` (too small), or `ConfigError`:
        the plan says another degree, or it divides neither the GPUs of a node nor the nodes.
        """
        try:
            return self._checked(tp)
        except (CapacityError, ConfigError) as error:
            raise type(error)(f"{error}; feasible: {one_of(self.feasible_tps)}") from None

    def _checked(self, tp: int) -> int:
        if self.replica_gpus not in (None, tp):
            raise ConfigError(f"{PLANNED.format(self.replica_gpus)}; the system's layout would begin with {tp}")
        if tp in self.infeasible:
            raise CapacityError(self.infeasible[tp])
        if not divides_nodes(tp, self.node_gpus):
            odd = next((gpus for gpus in self.node_gpus if tp < 1 or gpus % tp), self.node_gpus[0])
            raise ConfigError(
                f"tp {tp} does not divide the {odd} GPUs of a node or NVLink domain, and is not that of whole ones "
                f"that divide all {len(self.node_gpus)}"
            )
        if tp > max(self.node_gpus):
            needed, tokens = self.sequence_tokens, self.kv_tokens(tp)
            if tokens < needed:
                raise CapacityError(f"tp {tp} has room for {tokens:,} tokens of KV cache; a response needs {needed:,}")
            return tp
        if tp not in self.feasible_tps:
            self.costs.step(tp)  # says why
            raise ConfigError(f"tp {tp} is not feasible")
        return tp

    def check_switches(self, tps: Iterable[int]) -> None:
        """Raises `ConfigError` if replicas of one of these degrees cannot become ones of another during a run."""
        first, *others = tps
        for tp in others:
            self.costs.switch(self.node_gpus[0], first, tp, (), 0, "recompute", False)


@dataclass(frozen=True)
class RolloutReport:
    """What a control learns when a generation stage is over."""

    step: int  # from 0
    tp: int  # that it began with
    gen_time_s: float
    preemptions: int
    lengths: tuple[int, ...]  # of the responses that were finished
    label: str  # the kind of round, see `Launch`
    next_label: str = ""  # the kind that comes next
    loads: tuple[tuple[int, int], ...] = ()  # prompt and generated tokens of all responses, finished or not
    feasible_tps: tuple[int, ...] = ()  # degrees that the next step may begin with


@dataclass(frozen=True)
class ScoringReport:
    """What a control learns when all calls that take responses by the chunk are done with a step."""

    step: int
    chunk_tokens: int  # that the rollout handed over
    stage_time_s: float  # from the start of generation
    response_tokens: int  # generated in the step


def actions_of(answer: Action | Iterable[Action] | None) -> list[Action]:
    """What a control answered, as a list."""
    if answer is None:
        return []
    return list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else [answer]


def is_launch(launch: object, *_: object) -> bool:
    """Whether it is a proper launch."""
    return isinstance(launch, Launch) and launch.proper()


def _are_actions(answer: Action | Iterable[Action] | None, *_: object) -> bool:
    return all(isinstance(action, Action) and action.proper() for action in actions_of(answer))


def _are_shares(shares: object, *_: object) -> bool:
    if not isinstance(shares, Mapping):
        return shares is None
    return all(is_whole(index, 0) and are_numbers(ids) for index, ids in shares.items())


def are_parameters(choices: object, *_: object) -> bool:
    """Whether it is a list of sets of parameters, each by name."""
    return isinstance(choices, Sequence) and all(isinstance(choice, Mapping) for choice in choices)


CHOICES = "a list of mappings such as {'tp': 2}"
_ACTIONS = (
    "actions (Reconfigure, Migrate, Release, Borrow, Abort, Launch, Extend, Stop) or None, with whole numbers for "
    f"nodes, requests and tokens, and {' or '.join(get_args(KvHandling))} for kv"
)


class RolloutControl(Hooked):
    """Base of all rollout controls: never changes anything. Override what the system decides."""

    @hook(CHOICES, are_parameters)
    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        """Before the run: parameters to try where the system is to be tuned, as `[{"tp": 2}, {"tp": 4}]`.

        Every choice is made and run as a system of its own, and the one with the highest throughput stands for it. An
        empty list means that nothing is to be tuned.
        """
        return ()

    @hook()
    def setup(self, context: ControlContext) -> None:
        """Called once, before the first step: the place to profile the machine (`context.costs`)."""

    @hook(
        "a tensor-parallel degree that divides the GPUs of every node, or those of whole nodes",
        lambda tp, context: is_whole(tp) and divides_nodes(tp, context.node_gpus),
        lambda context: one_of(context.feasible_tps),
    )
    def initial_tp(self, context: ControlContext) -> int:  # noqa: ARG002
        """Called once, after `setup`: the tensor-parallel degree of every replica when a step begins, one of
        `context.feasible_tps`. It holds for all steps unless `next_tp` says otherwise. Defining it makes the control a
        layout, of which a system has exactly one.
        """
        raise PolicyError(f"{type(self).__name__} does not say which layout it starts with: define initial_tp")

    @hook(_ACTIONS, _are_actions)
    def on_finish(self, view: RolloutView) -> Action | Iterable[Action] | None:  # noqa: ARG002
        """Responses have just finished or paused, all of this moment together: return one action, several, or None.

        It is also asked (`view.finished_nodes` may be empty then) when a reward comes by which a batching decides, when
        a rollout that may borrow GPUs begins, has the weights there or is to give them back, and in continuous
        generation when prompts are ready, a step begins to take some or new weights are there.
        """
        return None

    @property
    @hook(
        "a number of seconds above 0, or None", lambda every_s: every_s is None or (is_number(every_s) and every_s > 0)
    )
    def every_s(self) -> float | None:
        """When a rollout begins: the seconds between two calls of `on_timer`; None: it is never called."""
        return None

    @hook(_ACTIONS, _are_actions)
    def on_timer(self, view: RolloutView) -> Action | Iterable[Action] | None:  # noqa: ARG002
        """`every_s` seconds of a rollout are over, counted from its beginning, and responses are unfinished: as
        `on_finish`. Where both are due at one moment, `on_finish` of all controls comes first.
        """
        return None

    @hook(
        "one of report.feasible_tps, or None",
        lambda tp, report: tp is None or (is_whole(tp) and tp in report.feasible_tps),
        lambda report: one_of(report.feasible_tps),
    )
    def next_tp(self, report: RolloutReport) -> int | None:  # noqa: ARG002
        """A step's generation is over: the tensor-parallel degree that the next one starts with, or None to leave that
        as it is.
        """
        return None

    @hook("a whole number of tokens, 1 or more", lambda tokens, *_: is_whole(tokens))
    def chunk_tokens(self, planned: int) -> int:
        """A rollout begins whose responses go on by the chunk: the tokens of a chunk; `planned`: what the workflow or
        the control before says.
        """
        return planned

    @property
    @hook("a number, 0 or more, or None", lambda error: error is None or is_number(error))
    def length_error(self) -> float | None:
        """Before the run: the error of a predictor of lengths, with which every `RequestView` has `predicted_tokens`.

        It is the standard deviation of the logarithm of predicted over true length; None: there is no predictor.
        """
        return None

    @hook("lists of responses by replica, or None", _are_shares)
    def dispatch(
        self,
        launched: Sequence[RequestView],  # noqa: ARG002
        replicas: Sequence[ReplicaView],  # noqa: ARG002
    ) -> Mapping[int, Sequence[int]] | None:
        """A step begins, continuous generation launches, or a launch is `to` active replicas (at nothing else): the ids
        that each of these replicas (by index) gets, in that order, each id once; or None to deal as the stage does.
        """
        return None

    @hook("a number, or None", lambda place, *_: place is None or is_number(place, -math.inf))
    def priority(self, request: RequestView) -> float | None:  # noqa: ARG002
        """A response comes to a replica's queue: its place there, the lowest number first and of equals who came first
        (the engines' priority scheduling); None is 0. What runs is not preempted for it.
        """
        return None

    @hook("a number of seconds, 0 or more, or None", lambda s, *_: s is None or is_number(s))
    def keep_kv_s(self, call: ToolCallView) -> float | None:  # noqa: ARG002
        """A trajectory leaves for a tool call: for how many seconds its KV cache is pinned at its replica, unless it is
        back before. 0: prefix caching keeps it until others need the room; None: as the environment says.
        """
        return None

    @hook()
    def on_scored(self, report: ScoringReport) -> None:
        """The calls that took a step's responses by the chunk are done with the step."""

    @property
    def author(self) -> RolloutControl:
        """Whose class and line a message names."""
        return self


class Controls(RolloutControl):
    """Several controls as one: each is asked in turn (`asked`), and the actions of all are done, up to a `Stop`."""

    def __init__(self, parts: Sequence[RolloutControl]) -> None:
        self.parts = tuple(parts)

    def setup(self, context: ControlContext) -> None:
        for part in self.parts:
            part.setup(context)

    def next_tp(self, report: RolloutReport) -> int | None:
        """What the last of those that have an opinion says."""
        return _first([part.next_tp(report) for part in self.parts][::-1])

    def chunk_tokens(self, planned: int) -> int:
        """What the last of those that change it says."""
        for part in self.parts:
            planned = part.chunk_tokens(planned)
        return planned

    @property
    def length_error(self) -> float | None:
        """That of the first that has a predictor."""
        return _first(part.length_error for part in self.parts)

    def priority(self, request: RequestView) -> float | None:
        """What the first of those that have an opinion says."""
        return _first(part.priority(request) for part in self.parts)

    def keep_kv_s(self, call: ToolCallView) -> float | None:
        """What the first of those that have an opinion says."""
        return _first(part.keep_kv_s(call) for part in self.parts)

    def on_scored(self, report: ScoringReport) -> None:
        for part in self.parts:
            part.on_scored(report)


def _first(answers: Iterable[_T | None]) -> _T | None:
    """The first that is an opinion."""
    return next((answer for answer in answers if answer is not None), None)


def asked(control: RolloutControl, *methods: str) -> list[RolloutControl]:
    """Those of the controls that this one is made of which override one of these methods: no other need be asked."""
    if isinstance(control, Controls):
        return [part for one in control.parts for part in asked(one, *methods)]
    own = any(getattr(type(control), method) is not getattr(RolloutControl, method) for method in methods)
    return [control] if own else []


def decides(control: RolloutControl) -> bool:
    """Whether the control decides anything while a rollout goes on."""
    return bool(asked(control, "on_finish", "on_timer"))
