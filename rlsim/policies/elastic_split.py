"""An elastic split: replicas that run out of work help the trainer until the next weights come.

Where generation and training have GPUs of their own, a bound of staleness, or the end of a batch, leaves replicas with
little to do while the trainer works. Their last responses go together onto few replicas; the GPUs of the others become
further data-parallel replicas of the trainer. They take its weights, accumulate gradients, and generate again from the
next weights on. The optimizer states stay where they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from rlsim.policies.laminar import RIDGE
from rlsim.policies.parts import Rewiring
from rlsim.policies.rlhfuse import memory_bound_batch
from rlsim.schema import Schema
from rlsim.sim.control import ControlContext, Release, RolloutControl, RolloutView
from rlsim.workflow.graph import Workflow


class ElasticSplit(Schema, RolloutControl, Rewiring):
    """While no prompt may begin, keep as many replicas as the running responses need, and lend the others to training.

    Training takes responses as they come: in the parts of a batch that it has, or each on its own.
    """

    lend: bool = Field(default=True, description="if not, training takes responses as they come on its own GPUs alone")
    per_replica: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="responses on one replica that stays; auto: as many as take twice as long to decode as one, and "
        "whose KV cache it can hold at full length",
    )

    _context: ControlContext = PrivateAttr()

    def rewired(self, workflow: Workflow) -> Workflow:
        """By the sample from generation to training, which may have replicas on GPUs that generation leaves idle."""
        if not workflow.windows:
            workflow = workflow.streaming(["generate", "inference", "reward"], ["inference", "reward", "train"])
        return replace(workflow, elastic=self.lend)

    def setup(self, context: ControlContext) -> None:
        self._context = context

    def on_finish(self, view: RolloutView) -> Release | None:
        """Those with the fewest responses leave."""
        if not self.lend or view.launching or not view.nodes:
            return None
        running, tp = max(view.unfinished(), 1), view.tp(view.nodes[0])
        stay = math.ceil(running / self._most(tp, sum(map(view.context_tokens, view.nodes)) / running))
        if stay * tp >= sum(map(view.gpus, view.nodes)):
            return None
        replicas = sorted(view.replicas(), key=lambda replica: (-len(replica.requests), replica.index))
        return Release(tuple(replica.index for replica in replicas[stay:])) if replicas[stay:] else None

    def _most(self, tp: int, tokens: float) -> int:
        """Responses that a replica of so many GPUs may have, of so many tokens each."""
        if self.per_replica != "auto":
            return self.per_replica
        context = self._context
        room_tokens = context.costs.capacity_pages(tp) * context.page_tokens
        fits = room_tokens // (context.prompt_tokens + context.cap_tokens)
        return max(min(memory_bound_batch(context, tp, max(tokens, 1.0), RIDGE), fits), 1)
