"""RollPacker's parallelism planner: the tensor-parallel degree of each round, driven by KV-cache preemptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, PrivateAttr

from rlsim.errors import ConfigError
from rlsim.schema import Schema
from rlsim.sim.control import ControlContext, RolloutControl, RolloutReport


class Planner(Schema, RolloutControl):
    """Double TP when preemptions rise, halve it when there are none for some steps."""

    start_tp: int | Literal["best"] = Field(default="best", description="first degree; best: the fastest feasible one")
    rise: float = Field(
        default=1.05, ge=1, le=1000, description="growth of preemptions from step to step that doubles TP"
    )
    quiet_steps: int = Field(default=4, ge=1, le=100_000, description="steps in a row without preemption that halve TP")

    _feasible: tuple[int, ...] = PrivateAttr(default=())
    _last: dict[str, int] = PrivateAttr(default_factory=dict)  # preemptions of the last round of each kind
    _quiet: int = PrivateAttr(default=0)

    def alternatives(self, context: ControlContext) -> Sequence[Mapping[str, object]]:
        """For `start_tp: best`, every degree that fits."""
        return [{"start_tp": tp} for tp in context.feasible_tps] if self.start_tp == "best" else ()

    def setup(self, context: ControlContext) -> None:
        """Which degrees there are inside a node."""
        self._feasible = context.feasible_tps

    def initial_tp(self, context: ControlContext) -> int:
        """The profiled best."""
        if self.start_tp == "best":
            raise ConfigError("start_tp: best must be resolved by running every feasible degree")
        return context.check_tp(self.start_tp)

    def next_tp(self, report: RolloutReport) -> int | None:
        """After each step, by its preemptions and those of the last round of its kind: long rounds have fewer."""
        tp, last = report.tp, self._last.get(report.label, report.preemptions)
        self._last[report.label] = report.preemptions
        self._quiet = 0 if report.preemptions else self._quiet + 1
        if report.preemptions > self.rise * last:
            tp *= 2
        elif self._quiet >= self.quiet_steps:
            tp //= 2
            self._quiet = 0
        return tp if tp in self._feasible else report.tp
