"""REAL (Mei et al., MLSys 2025): the execution plan is searched before training begins."""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.policies.parts import Placing, PlanContext, PlanSearch, Rewiring
from rlsim.workflow.graph import Workflow
from rlsim.workflow.plan import Plan


class REAL(Schema, Placing, Rewiring):
    """Search meshes and strategies for all calls under the light estimator, then keep that plan.

    Its runtime starts a call when its data and GPUs are there: log-probs and values do not wait for rewards.
    """

    method: Literal["descent", "mcmc"] = "descent"
    evaluations: int = Field(default=250_000, ge=1, le=1_000_000_000)
    seed: int = Field(default=0, ge=0)
    pipelined_generation: bool = True
    most_plans: Annotated[float, Field(ge=1)] | None = None
    context_parallel: bool = False

    def rewired(self, workflow: Workflow) -> Workflow:
        """Edges that carry data or parameters only."""
        return workflow.without_barriers()

    def plan(self, context: PlanContext) -> Plan:
        most, spaces = self.most_plans or inf, (self.pipelined_generation, self.context_parallel)
        return context.search(PlanSearch(self.method, self.evaluations, self.seed, *spaces, most))
