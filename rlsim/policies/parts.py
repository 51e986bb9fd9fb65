"""What a line of YAML may stand for besides a rollout control, a batching or a reward control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Union

from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError, shown
from rlsim.hardware import Cluster
from rlsim.models import Model
from rlsim.sim.batching import Batching
from rlsim.sim.control import ControlContext, RolloutControl
from rlsim.sim.reward import RewardControl
from rlsim.workflow.graph import Workflow
from rlsim.workflow.plan import Placement, Plan


class Rewiring:
    """Changes the workflow: the grain of its edges, and which of its calls wait for others."""

    def rewired(self, workflow: Workflow) -> Workflow:
        """The workflow as this part wants it."""
        raise NotImplementedError


class ChunkStreaming(Rewiring):
    """Gives edges the grain `chunk`, and says what streaming costs."""

    @property
    def handover_s(self) -> float:
        """Seconds that a generating replica takes for each chunk it hands over."""
        raise NotImplementedError

    @property
    def slowdown(self) -> float:
        """How many times as long an iteration takes while generation and a scoring model work on the same GPU."""
        raise NotImplementedError


class JudgePlacement:
    """Puts an LLM judge on the GPUs of the other calls, instead of keeping GPUs for it."""

    #: Share of the judge's layers in host memory; `auto`: as many as a prefill iteration hides the copying of.
    offload: Literal["auto"] | float

    @property
    def slowdown(self) -> float:
        """How many times as long an iteration takes while the other has work on the same GPU."""
        raise NotImplementedError


@dataclass(frozen=True)
class PlanContext:
    """What a placement learns: the calls, the GPUs and the limits, no lengths."""

    workflow: Workflow
    cluster: Cluster
    gpus: tuple[int, ...]  # those that no judge is kept on
    models: Mapping[str, Model]  # by role
    training: Callable[[int], TrainStrategy]  # how the experiment spreads a call over so many GPUs
    style: TrainStrategy  # the same without the degrees: micro-batches, ZeRO stage, recomputation, offload
    reward: Placement  # of reward calls
    check: Callable[[Plan], None]  # raises `CapacityError` for a plan that does not fit
    #: The best plan that a method finds: its name, evaluations, seed, whether generation may be pipelined.
    search: Callable[[str, int, int, bool], Plan]


class Placing:
    """Says on which GPUs each call runs and how it is spread over them. Without one, all calls share all GPUs."""

    def plan(self, context: PlanContext) -> Plan:
        """The placement of every call; raises `ConfigError` or `CapacityError` if there is none."""
        raise NotImplementedError


class Composition:
    """Several parts under one name: a published system."""

    def parts(self) -> Sequence[Part]:
        """The parts, each as a line of YAML would make it."""
        raise NotImplementedError

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        """Parameters to try where the system is to be tuned, as `RolloutControl.alternatives`."""
        return ()


def flattened(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, every composition replaced by what it is made of.

    Raises `ConfigError` for a composition that is made of anything else than parts, or of itself.
    """
    for part in parts:
        if isinstance(part, Composition):
            yield from _inner(part, ())
        else:
            yield part


def _inner(composition: Composition, around: tuple[type, ...]) -> Iterator[Part]:
    name, found = f"{type(composition).__name__}.parts()", composition.parts()
    if type(composition) in around:
        raise ConfigError(f"{name}: it is made of itself")
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ConfigError(f"{name} returned {shown(found)}, expected a list of parts")
    for part in found:
        if isinstance(part, type) and issubclass(part, KINDS):
            raise ConfigError(f"{name} returned the class {part.__name__}, expected parts: {part.__name__}(…)")
        if not isinstance(part, KINDS):
            raise ConfigError(f"{name} returned {shown(part)}, which is no part of a system: none of {KIND_NAMES}")
        if isinstance(part, Composition):
            yield from _inner(part, (*around, type(composition)))
        else:
            yield part


KINDS = (RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Placing, Composition)
KIND_NAMES = ", ".join(kind.__name__ for kind in KINDS)
Part = Union[RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Placing, Composition]  # noqa: UP007
