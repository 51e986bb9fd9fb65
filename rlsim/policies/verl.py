"""veRL: colocated, synchronous, static (Sheng et al., EuroSys 2025), and its recipe of dynamic sampling (DAPO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rlsim.base.schema import Schema
from rlsim.errors import ConfigError
from rlsim.sim.batching import Batching
from rlsim.sim.control import ControlContext, RolloutControl


class VeRL(Schema, RolloutControl):
    """`gpus / tp` independent replicas; requests are spread up front and the layout never changes."""

    tp: int | Literal["best"] = "best"

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        """For `tp: best`, every degree that fits (one, where the plan says it)."""
        return [{"tp": tp} for tp in context.feasible_tps] if self.tp == "best" else ()

    def initial_tp(self, context: ControlContext) -> int:
        """The given degree; raises if it does not divide the node or the model does not fit."""
        if self.tp == "best":
            raise ConfigError("tp: best must be resolved by running every feasible degree")
        return context.check_tp(self.tp)


class DynamicSampling(Schema, Batching):
    """Drop prompts without variance in their rewards, which teach nothing (DAPO, Yu et al. 2025), and launch others."""

    def counts(self, rewards: Sequence[float]) -> bool:
        """Only prompts whose rewards differ."""
        return max(rewards) > min(rewards)
