"""What a line of YAML may stand for besides a rollout control, a batching or a reward control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, Union

from pydantic import PrivateAttr

from rlsim.base.hooks import Hooked, hook, is_number, misused
from rlsim.base.schema import Schema
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import shown
from rlsim.models.hardware import AnyCluster
from rlsim.models.model import Model
from rlsim.sim.batching import Batching
from rlsim.sim.control import CHOICES, ControlContext, RolloutControl, are_parameters
from rlsim.sim.reward import RewardControl
from rlsim.workflow.graph import CallKind, Workflow
from rlsim.workflow.plan import Placement, Plan


class Informed(Schema, RolloutControl):
    """Base of rollout controls that go by what they learn before the run: the machine and the limits."""

    _context: ControlContext = PrivateAttr()

    def setup(self, context: ControlContext) -> None:
        self._context = context


class Rewiring(Hooked):
    """Changes the workflow: the grain of its edges, and which of its calls wait for others."""

    @hook("a rlsim.workflow.Workflow", lambda made, *_: isinstance(made, Workflow))
    def rewired(self, workflow: Workflow) -> Workflow:
        """Before the run: the workflow as this part wants it, made from the one that the experiment names."""
        raise NotImplementedError


class Streaming(Schema, Rewiring):
    """Calls of these kinds take responses as others have them, by the sample; none of them waits for another."""

    sources: tuple[CallKind, ...]
    targets: tuple[CallKind, ...]

    def rewired(self, workflow: Workflow) -> Workflow:
        return workflow.streaming(self.sources, self.targets)


class ChunkStreaming(Rewiring):
    """Gives edges the grain `chunk`, and says what streaming costs."""

    @property
    @hook("seconds: a number, 0 or more", is_number)
    def handover_s(self) -> float:
        """Seconds that a generating replica takes for each chunk it hands over."""
        raise NotImplementedError

    @property
    @hook("a number, 1 or more", lambda factor: is_number(factor, 1.0))
    def slowdown(self) -> float:
        """How many times as long an iteration takes while generation and a scoring model work on the same GPU."""
        raise NotImplementedError


class JudgePlacement(Hooked):
    """Puts an LLM judge on the GPUs of the other calls, instead of keeping GPUs for it."""

    #: Share of the judge's layers in host memory; `auto`: as many as a prefill iteration hides the copying of.
    offload: Literal["auto"] | float

    @property
    @hook("a number, 1 or more", lambda factor: is_number(factor, 1.0))
    def slowdown(self) -> float:
        """How many times as long an iteration takes while the other has work on the same GPU."""
        raise NotImplementedError


class PlanSearch(NamedTuple):
    """How a plan is searched for, and over which degrees beside data and tensor parallelism."""

    method: str
    evaluations: int
    seed: int
    pipelined_generation: bool
    context_parallel: bool
    most_plans: float = inf  # the fastest options of each call that are so many plans


@dataclass(frozen=True)
class PlanContext:
    """What a placement learns: the calls, the GPUs and the limits, no lengths."""

    workflow: Workflow
    cluster: AnyCluster
    gpus: tuple[int, ...]  # those that no judge is kept on
    models: Mapping[str, Model]  # by role
    training: Callable[[int], TrainStrategy]  # how the experiment spreads a call over so many GPUs
    style: TrainStrategy  # the same without the degrees: micro-batches, ZeRO stage, recomputation, offload
    degrees: Mapping[str, Any]  # the degrees alone: TP, PP, CP, EP, TP of experts
    reward: Placement  # of reward calls
    check: Callable[[Plan], None]  # raises `CapacityError` for a plan that does not fit
    search: Callable[[PlanSearch], Plan]  # the best plan that it finds


class Placing(Hooked):
    """Says on which GPUs each call runs and how it is spread over them. Without one, all calls share all GPUs."""

    @hook("a rlsim.workflow.plan.Plan", lambda made, *_: isinstance(made, Plan))
    def plan(self, context: PlanContext) -> Plan:
        """Before the run: the placement of every call; raises `ConfigError` or `CapacityError` if there is none."""
        raise NotImplementedError


class Composition(Hooked):
    """Several parts under one name: a published system."""

    @hook("a list of parts")  # checked in `flattened`, which says what is none
    def parts(self) -> Sequence[Part]:
        """When an experiment is read, and for every run: the parts, each as a line of YAML would make it."""
        raise NotImplementedError

    @hook(CHOICES, are_parameters)
    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        """Before the run: parameters to try where the system is to be tuned, as `RolloutControl.alternatives`."""
        return ()


def flattened(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, every composition replaced by what it is made of.

    Raises `PolicyError` for a composition that is made of anything else than parts, or of itself.
    """
    for part in parts:
        if isinstance(part, Composition):
            yield from _inner(part, ())
        else:
            yield part


def _inner(composition: Composition, around: tuple[type, ...]) -> Iterator[Part]:
    found = composition.parts()
    if type(composition) in around:
        raise misused(composition, "parts", "it is made of itself")
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise misused(composition, "parts", f"returned {shown(found)}, expected a list of parts")
    for part in found:
        if isinstance(part, type) and issubclass(part, KINDS):
            what = f"returned the class {part.__name__}, expected parts: {part.__name__}(…)"
            raise misused(composition, "parts", what)
        if not isinstance(part, KINDS):
            what = f"returned {shown(part)}, which is no part of a system: none of {KIND_NAMES}"
            raise misused(composition, "parts", what)
        if isinstance(part, Composition):
            yield from _inner(part, (*around, type(composition)))
        else:
            yield part


KINDS = (RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Placing, Composition)
KIND_NAMES = ", ".join(kind.__name__ for kind in KINDS)
Part = Union[RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Placing, Composition]  # noqa: UP007
