"""What a line of YAML may stand for besides a rollout control, a batching or a reward control."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Union

from rlsim.sim.batching import Batching
from rlsim.sim.control import ControlContext, RolloutControl
from rlsim.sim.reward import RewardControl
from rlsim.workflow.graph import Workflow


class Rewiring:
    """Changes the workflow: the grain of its edges."""

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


class Composition:
    """Several parts under one name: a published system."""

    def parts(self) -> Sequence[Part]:
        """The parts, each as a line of YAML would make it."""
        raise NotImplementedError

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        """Parameters to try where the system is to be tuned, as `RolloutControl.alternatives`."""
        return ()


def flattened(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, every composition replaced by what it is made of."""
    for part in parts:
        if isinstance(part, Composition):
            yield from flattened(part.parts())
        else:
            yield part


KINDS = (RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Composition)
Part = Union[RolloutControl, Batching, RewardControl, Rewiring, JudgePlacement, Composition]  # noqa: UP007
