"""Systems whose rollout never stops (`rlsim.sim.continuous`), each as its authors state its rule.

B is the prompts that a step trains on. A step of rlsim lies between two weight syncs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.policies.parts import Rewiring
from rlsim.sim.continuous import Continuous, OpenView, Ready, Update
from rlsim.sim.request import UpdatedKv
from rlsim.workflow.graph import Workflow

#: Of a share of prompts that is a whole number but for its binary digits.
ROUNDING = 1e-9


#: Of prompts beyond the bound, rounded up to whole updates: a step trains on them all the same; or it keeps places for
#: those under way that reach the bound, and waits for them; or they are dropped, for good or to be generated again
#: before new ones. But for the first no step trains on one beyond it.
Stale = Literal["train", "wait", "drop", "regenerate"]
Order = Literal["oldest", "ready", "longest", "freshest"]


class BoundedStaleness(Schema, Continuous):
    """A prompt begins only while all admitted so far are at most B · (version + 1 + η).

    That is AReaL's rule (Fu et al. 2025), and ROLL Flash's: with all that are under way, wait or are trained on at most
    (1 + α) · B. Taken in the order of their launch, prompts are never older than η updates, rounded up: with a bound of
    half an update half a batch is one update old (ROLL's `ReplayBuffer.get_batch`). New weights interrupt what
    is generated; with `recompute` the KV cache is thrown away and computed again under the new weights.
    """

    eta: float = Field(default=4, ge=0, le=1000)
    order: Order = "oldest"
    stale: Stale = "train"
    concurrent: int | None = Field(default=None, ge=1)
    concurrent_batches: int | None = Field(default=None, ge=1)
    queue: int | None = Field(default=None, ge=1)
    interrupt: bool = True
    updated_kv: UpdatedKv = "recompute"
    rolling: bool = False

    @property
    def ahead(self) -> int:
        return math.ceil(self.eta)

    def left(self, view: OpenView) -> int:
        """How many prompts may begin."""
        if self.queue is not None and view.waiting >= self.queue:
            return 0
        room = math.floor(view.prompts * (view.version + 1 + self.eta) + ROUNDING) - view.admitted
        if self.concurrent is not None:
            room = min(room, self.concurrent - view.running)
        if self.concurrent_batches is not None:
            room = min(room, self.concurrent_batches * view.prompts - view.running)
        return max(room, 0)

    def room(self, view: OpenView) -> int | Mapping[int, int]:
        return self.left(view)

    def update(self) -> Update:
        responses: Literal["interrupt", "drain"] = "interrupt" if self.interrupt else "drain"
        return Update(responses, self.updated_kv, "each" if self.rolling else "together")

    def rank(self, ready: Ready) -> float:
        match self.order:
            case "oldest":
                return ready.version
            case "freshest":
                return -ready.version
            case "longest":
                return -max(ready.lengths)
        return ready.number

    def usable(self, ready: Ready, staleness: int) -> bool:  # noqa: ARG002
        return self.stale == "train" or staleness <= self.ahead

    def relaunches(self) -> bool:
        return self.stale == "regenerate"

    def awaited(self, staleness: int) -> bool:
        return self.stale == "wait" and staleness >= self.ahead


class SyncQuota(Schema, Continuous):
    """veRL's rule (`fully_async_policy`): between two syncs at most (1 + threshold) · B prompts, less those left over.

    Left over are the prompts that were running or waiting when the last sync came; one that does not
    count gives its place to another. Without `partial_rollout` a sync
    waits for the responses under way, and none begins meanwhile.
    """

    staleness_threshold: float = Field(default=0.5, ge=0, le=1000)
    per_replica: int | None = Field(default=16, ge=1)
    partial_rollout: bool = True
    updated_kv: UpdatedKv = "recompute"

    def update(self) -> Update:
        return Update("interrupt" if self.partial_rollout else "drain", self.updated_kv)

    @property
    def ahead(self) -> int:
        return math.ceil(self.staleness_threshold)

    def room(self, view: OpenView) -> int:
        most = math.floor((1 + self.staleness_threshold) * view.prompts + ROUNDING)
        room = most - view.left_at_update - view.launched_since_update
        if self.per_replica is not None:
            room = min(room, self.per_replica * view.replicas - view.running)
        return max(room, 0)


class Windows(Schema, Rewiring):
    """Training takes a step's batch in equal parts as they come, each an update or more; a sync ends the step."""

    parts: int = Field(default=4, ge=1, le=100_000)

    def rewired(self, workflow: Workflow) -> Workflow:
        return workflow.in_windows(self.parts)


class RolloutLogProbs(Schema, Rewiring):
    """The rollout engine's log-probs serve as those of the old policy: the actor's call for them falls away."""

    def rewired(self, workflow: Workflow) -> Workflow:
        old = [c.name for c in workflow.calls if c.kind == "inference" and c.model == "actor"]
        return workflow.without(old)
