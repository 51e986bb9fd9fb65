"""Relaxed synchrony, stage by stage: a step may train on what older weights than those it trains have generated.

- `one_step_off` (veRL's recipe, NeMo-RL, AsyncFlow): while a batch is trained on, the next one is generated on GPUs of
  its own, with the weights from before that update.
- `colocated_async` (agent-lightning, veRL's `colocate_async`): more groups are under way than a step needs; the others
  are paused while the first ones are trained on.
- `partial_rollout` (Kimi k1.5, veRL on NPUs): long responses are generated over several steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, PrivateAttr

from rlsim.base.refusals import refuse
from rlsim.base.schema import Schema
from rlsim.errors import ConfigError, unknown_name
from rlsim.policies.frameworks import Group, any_call, on_groups
from rlsim.policies.parts import Placing, PlanContext, Rewiring
from rlsim.sim.batching import Batching, Progress, PromptFeed, Unfinished
from rlsim.sim.control import Launch, Prompt
from rlsim.units import Tokens
from rlsim.workflow.graph import Workflow
from rlsim.workflow.plan import Plan


class Keeping(Schema, Batching):
    """Base of batchings that keep so many prompts under way: each step resumes what it finds, and adds new ones."""

    _kept: list[Prompt] = PrivateAttr(default_factory=list)

    def filled(self, feed: PromptFeed, prompts: int) -> Launch:
        """All that wait, and new prompts up to so many."""
        resume, self._kept = tuple(self._kept), []
        return Launch(feed.take(max(prompts - len(resume), 0)), feed.responses, resume=resume)

    def keep(self, unfinished: Sequence[Unfinished]) -> Sequence[Prompt]:
        """All of them."""
        self._kept = [one.prompt for one in unfinished]
        return self._kept

    def waiting(self) -> int:
        return len(self._kept)


class Split(Schema, Placing):
    """Generation on the first GPUs, everything else on the rest, spread there as the experiment's `training` says.

    By default generation has the GPUs of the first kind where there are several kinds, else half of all.
    """

    rollout_gpus: int | None = Field(default=None, ge=1)
    rollout: float | None = Field(default=None, gt=0, lt=1)
    apart: Mapping[str, int] = {}

    def plan(self, context: PlanContext) -> Plan:
        gpus = context.gpus
        count = self.rollout_gpus or (round(self.rollout * len(gpus)) if self.rollout else self._first_pool(context))
        models = {call.model for call in context.workflow.calls}
        for name in self.apart.keys() - models:
            raise ConfigError(f"split.apart: {unknown_name('model of the workflow', name, models)}")
        rest = len(gpus) - sum(self.apart.values())
        refuse("split", gpus=rest, count=count)
        groups: list[Group] = [(gpus[:count], lambda call: call.kind == "generate")]
        for name, number in self.apart.items():
            groups.append((gpus[rest : rest + number], lambda call, name=name: call.model == name))  # type: ignore[misc]
            rest += number
        return on_groups(context, [*groups, (gpus[count : len(gpus) - sum(self.apart.values())], any_call)])

    def _first_pool(self, context: PlanContext) -> int:
        kinds = [context.cluster.gpu_at(gpu).name for gpu in context.gpus]
        same = [kind == kinds[0] for kind in kinds]
        return round(0.5 * len(kinds)) if all(same) else same.index(False)


class Lagged(Schema, Rewiring):
    """Every generation uses weights that are older by so many updates than those that its batch trains."""

    lag: int = Field(default=1, ge=0, le=1_000)

    def rewired(self, workflow: Workflow) -> Workflow:
        """Generation waits for the weights of so many steps before, and the next weights wait for it to have begun."""
        kinds = {call.name: call.kind for call in workflow.calls}
        syncs = [e for e in workflow.edges if (kinds[e.source], kinds[e.target]) == ("sync", "generate")]
        refuse("lagged", name=workflow.name, syncs=syncs)
        edges = (replace(e, lag=self.lag + 1, exact=True) if e in syncs else e for e in workflow.edges)
        return replace(workflow, edges=tuple(edges))


class ActiveGroups(Keeping):
    """So many times the prompts that a step needs stay under way; the step trains on the first to finish."""

    active: float = Field(default=2.0, ge=1, le=100)

    def launch(self, feed: PromptFeed) -> Launch:
        """All that are paused, and new prompts up to `active` times the batch."""
        return self.filled(feed, round(self.active * feed.prompts))


class PartialRollout(Keeping):
    """A step generates until most responses are finished, or all have had their tokens; the rest goes on in the next.

    A batch of prompts stays under way: each step launches as many new ones as the last one trained on. It trains on the
    prompts that are complete, all their responses, when its generation ends; at least one is.
    """

    share: float | None = Field(default=None, gt=0, le=1)
    budget: Annotated[Tokens, Field(ge=1)] | None = None
    splits: int | None = Field(default=None, ge=1)

    _splits: dict[int, int] = PrivateAttr(default_factory=dict)  # by position of a prompt: how often it was kept

    def launch(self, feed: PromptFeed) -> Launch:
        """All that are not complete yet, and new prompts in the place of those that were."""
        return replace(self.filled(feed, feed.prompts), budget_tokens=self.budget or 0)

    def ends(self, progress: Progress) -> bool:
        """By share: enough are finished, a prompt is complete, and none is left that has been split often enough."""
        if self.budget is not None or not progress.complete:
            return False
        enough = progress.finished >= (0.8 if self.share is None else self.share) * progress.launched - 1e-9
        most = math.inf if self.splits is None else self.splits
        return enough and all(self._splits.get(prompt.position, 0) < most for prompt in progress.unfinished)

    def keep(self, unfinished: Sequence[Unfinished]) -> Sequence[Prompt]:
        """All of them, split once more."""
        self._splits = {u.prompt.position: self._splits.get(u.prompt.position, 0) + 1 for u in unfinished}
        return super().keep(unfinished)
