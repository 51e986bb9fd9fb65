"""veRL: colocated, synchronous, static (Sheng et al., EuroSys 2025). The tuned baseline is `tp: best`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from rlsim.errors import CapacityError, ConfigError
from rlsim.schema import Schema
from rlsim.sim.control import ControlContext, RolloutControl


class VeRL(Schema, RolloutControl):
    """`gpus / tp` independent replicas; requests are spread up front and the layout never changes."""

    tp: int | Literal["best"] = Field(
        default="best", description="tensor-parallel degree; best: the fastest feasible one"
    )

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        """For `tp: best`, every degree that fits."""
        return [{"tp": tp} for tp in context.feasible_tps] if self.tp == "best" else ()

    def initial_tp(self, context: ControlContext) -> int:
        """The given degree; raises if it does not divide the node or the model does not fit."""
        if self.tp == "best":
            raise ConfigError("tp: best must be resolved by running every feasible degree")
        return checked_tp(self.tp, context)


def checked_tp(tp: int, context: ControlContext) -> int:
    """`tp` if the node can run it; raises `ConfigError` if it does not divide the node, `CapacityError` if too few."""
    if tp < 1 or context.gpus_per_node % tp:
        raise ConfigError(f"tp {tp} does not divide the {context.gpus_per_node} GPUs of a node")
    if tp not in context.feasible_tps:
        raise CapacityError(context.infeasible.get(tp, f"tp {tp} is not feasible"))
    return tp
