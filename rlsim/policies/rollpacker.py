"""RollPacker (also published as Flexes): tail batching, planner, reward scheduler and stream trainer together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from rlsim.base.schema import Schema
from rlsim.policies.parts import Composition, Part
from rlsim.policies.planner import Planner
from rlsim.policies.reward_scheduler import RewardScheduler
from rlsim.policies.stream_trainer import StreamTrainer
from rlsim.policies.tail_batching import TailBatching
from rlsim.sim.control import ControlContext


class RollPacker(Schema, Composition):
    """The whole system; its parts stand alone as `tail_batching`, `reward_scheduler`, `planner` and `stream`."""

    eta: float = Field(default=1.25, ge=1, le=100, description="see `tail_batching`")
    start_tp: int | Literal["best"] = Field(default="best", description="see `planner`")

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        return Planner(start_tp=self.start_tp).alternatives(context)

    def parts(self) -> Sequence[Part]:
        return TailBatching(eta=self.eta), RewardScheduler(), Planner(start_tp=self.start_tp), StreamTrainer()
