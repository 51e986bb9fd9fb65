"""RollPacker's reward scheduler: rewards per sample, adaptive timeouts of test cases, a judge beside the actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from rlsim.base.schema import Schema
from rlsim.policies.parts import JudgePlacement, Rewiring
from rlsim.sim.reward import RewardControl, RewardKind
from rlsim.units import Seconds
from rlsim.workflow.graph import Workflow


class RewardBeside(Schema, Rewiring):
    """Log-probs and values do not wait for rewards: training is the first to need them."""

    def rewired(self, workflow: Workflow) -> Workflow:
        return workflow.without_barriers()


class AsyncReward(Schema, Rewiring):
    """Every finished response goes to its reward call at once, while others still decode; only training waits."""

    def rewired(self, workflow: Workflow) -> Workflow:
        """Generation to reward by the sample, and no barrier behind the rewards."""
        return workflow.without_barriers().streaming(["generate"], ["reward"])


class AdaptiveTimeout(Schema, RewardControl):
    """A test case may run a little longer than the longest correct response has needed for it so far."""

    least: Annotated[Seconds, Field(gt=0)] = 2.0
    factor: float = Field(default=1.5, ge=1, le=1000)

    _anchor_s: dict[tuple[int, int], float] = PrivateAttr(default_factory=dict)

    def timeout_s(self, kind: RewardKind, prompt: int, test: int, limit_s: float) -> float:
        """Between `least` and the system's limit; that limit where no correct response has run the test case yet."""
        anchor_s = self._anchor_s.get((prompt, test))
        if kind != "sandbox" or anchor_s is None:
            return limit_s
        return min(max(self.least, self.factor * anchor_s), limit_s)

    def observe(self, kind: RewardKind, prompt: int, run_s: Sequence[float], correct: bool) -> None:
        """Raise the anchors of a prompt's test cases."""
        if kind == "sandbox" and correct:
            for test, seconds in enumerate(run_s):
                key = prompt, test
                self._anchor_s[key] = max(self._anchor_s.get(key, 0.0), seconds)


class ColocatedJudge(Schema, JudgePlacement):
    """The judge shares the actor's GPUs; layers that stay in host memory are copied in as they are needed."""

    sharing: Literal["mps", "time_slicing"] = "mps"
    interference: float = Field(default=0.3, ge=0, le=1)
    offload: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"

    @property
    def slowdown(self) -> float:
        """How much longer an iteration takes while the other has work on the same GPU."""
        return 2.0 if self.sharing == "time_slicing" else 1.0 + self.interference
