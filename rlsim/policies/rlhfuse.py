"""RLHFuse (Zhong et al., NSDI 2025): inter-stage fusion, plain and as RollPacker's authors strengthen it.

Once few sequences are left they are migrated onto few replicas, and the freed GPUs start the inference calls of
responses that are finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from rlsim.policies.parts import Composition, Part, Rewiring
from rlsim.policies.reward_scheduler import AsyncReward
from rlsim.policies.verl import VeRL
from rlsim.schema import Schema
from rlsim.sim.control import Action, ControlContext, Migrate, Release, RolloutControl, RolloutView
from rlsim.workflow.graph import Workflow


class TailConsolidation(Schema, RolloutControl):
    """Migrate the last sequences onto as few replicas as can hold them at full length, and release the others."""

    remaining: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="share of the responses that are left when it happens"
    )
    max_batch: int = Field(default=64, ge=1, description="sequences on one replica, so that decoding stays fast")

    _context: ControlContext = PrivateAttr()

    def setup(self, context: ControlContext) -> None:
        """The machine's KV capacity."""
        self._context = context

    def on_finish(self, view: RolloutView) -> list[Action] | None:
        """Once, when the share that is left is small enough; again if not all could be released then."""
        left = view.unfinished()
        if left > self.remaining * view.total:
            return None
        replicas = sorted(view.replicas(), key=lambda r: -len(r.requests))
        tp = replicas[0].tp if replicas else 1
        room = self._context.costs.capacity_pages(tp) * self._context.page_tokens
        needed = sum(r.prompt_tokens + view.cap_tokens for replica in replicas for r in replica.requests)
        keep = max(math.ceil(needed / room), math.ceil(left / self.max_batch), 1)
        if keep >= len(replicas):
            return None
        staying, leaving = replicas[:keep], replicas[keep:]
        load = [len(replica.requests) for replica in staying]
        actions: list[Action] = []
        for replica in leaving:
            if replica.requests:
                to = min(range(keep), key=load.__getitem__)
                load[to] += len(replica.requests)
                actions.append(Migrate(tuple(r.id for r in replica.requests), staying[to].index))
        return [*actions, Release(tuple(replica.index for replica in leaving))]


class FusedInference(Schema, Rewiring):
    """Reward and log-prob calls take each response as soon as it is finished."""

    def rewired(self, workflow: Workflow) -> Workflow:
        """Generation to reward and inference by the sample."""
        return workflow.streaming(["generate"], ["reward", "inference"])


class FusedTraining(Schema, Rewiring):
    """Training too takes responses as they come."""

    def rewired(self, workflow: Workflow) -> Workflow:
        """Everything up to training by the sample."""
        return workflow.streaming(["generate", "inference", "reward"], ["inference", "reward", "train"])


class RLHFuse(Schema, Composition):
    """Static TP, tail consolidation, inference fused with the tail of generation."""

    tp: int | Literal["best"] = Field(default="best", description="tensor-parallel degree, as of `verl`")
    remaining: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.2, description="see `tail_consolidation`")

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        """As `verl`."""
        return VeRL(tp=self.tp).alternatives(context)

    def parts(self) -> Sequence[Part]:
        """As published."""
        return VeRL(tp=self.tp), TailConsolidation(remaining=self.remaining), FusedInference()


class StrengthenedRLHFuse(RLHFuse):
    """RLHFuse with rewards by the sample and training on the freed GPUs, as RollPacker is compared with."""

    def parts(self) -> Sequence[Part]:
        """RLHFuse, asynchronous reward and streamed training."""
        return *super().parts(), AsyncReward(), FusedTraining()
