"""A real rollout's simulation: the same requests on rlsim's own engine, with the costs that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evidence.validate.rollout_steps import PAGE_TOKENS, Fitted
from rlsim.cost.profile import ProfileStep
from rlsim.cost.transfer import IN_PLACE, NO_HOST_KV, HostKv, SwitchCost, SwitchWay, kv_rank_bytes, kv_send_s
from rlsim.models.hardware import Link
from rlsim.sim.control import Reconfigure, RolloutControl, RolloutView
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.rollout import run_rollout
from rlsim.sim.stage import GenerationStage


@dataclass(frozen=True)
class Case:
    """One layout: from `tp`, at `switch_at` unfinished responses to `switch_to`, if that is not 0."""

    name: str
    tp: int
    switch_to: int = 0
    switch_at: int = 0


class MeasuredCosts:
    """`RolloutCosts` of a node of two processes, from what was measured on them."""

    def __init__(self, fitted: Fitted, capacity_tokens: int) -> None:
        self.fitted = fitted
        self._pages = capacity_tokens // PAGE_TOKENS
        self._steps = {tp: profile(skew=fitted.skew) for tp, profile in fitted.profiles.items()}

    def step(self, tp: int) -> ProfileStep:
        return self._steps[tp]

    def capacity_pages(self, tp: int) -> int:
        """The pool has as many more slots as ranks share a replica."""
        return self._pages * tp

    def host_kv(self, tp: int) -> HostKv:  # noqa: ARG002
        return NO_HOST_KV

    def switch(
        self,
        gpus: int,  # noqa: ARG002
        from_tp: int,
        to_tp: int,  # noqa: ARG002 - measured from 1 to 2 only
        contexts: Sequence[int],
        sequences: int,  # noqa: ARG002
        kv: str,  # noqa: ARG002
        first_use: bool,  # noqa: ARG002
        way: SwitchWay = IN_PLACE,  # noqa: ARG002
    ) -> SwitchCost:
        """Control, slicing of the weights included, and the KV at the measured rate; there are no graphs."""
        runtime = self.fitted.runtime
        assert runtime.migrate_bytes_per_s is not None
        moved = kv_rank_bytes(self.fitted.model, sum(contexts), from_tp)
        return SwitchCost(0.0, moved / runtime.migrate_bytes_per_s, 0.0, runtime.switch_control_s)

    def transfer_s(self, contexts: Sequence[int], from_tp: int, to_tp: int, same_node: bool) -> float:  # noqa: ARG002
        link = Link(name="processes", bytes_per_s=self.fitted.runtime.migrate_bytes_per_s or math.inf, latency_s=0.0)
        return kv_send_s(self.fitted.model, link, float(sum(contexts)), min(from_tp, to_tp))


class SwitchAt(RolloutControl):
    """Changes the layout once, when `remaining` responses or fewer are unfinished."""

    def __init__(self, remaining: int, tp: int) -> None:
        self._remaining, self._tp = remaining, tp

    def on_finish(self, view: RolloutView) -> Reconfigure | None:
        if view.nodes and view.unfinished() <= self._remaining and view.tp(0) != self._tp:
            return Reconfigure(0, self._tp)
        return None


@dataclass(frozen=True)
class Simulated:
    """What rlsim says of a run, in seconds."""

    makespan_s: float
    finished_s: Mapping[int, float]
    pause_s: float
    prefill_s: float  # of all replicas


def simulate(case: Case, lengths: Sequence[tuple[int, int]], costs: MeasuredCosts, budget_tokens: int) -> Simulated:
    """The run of `case` by rlsim's engine: one node of two GPUs."""
    requests = [Request(i, i, prompt, response) for i, (prompt, response) in enumerate(lengths)]
    recorder = Recorder()
    rollout = run_rollout(
        GenerationStage(
            requests=requests,
            mesh=[(0, 1)],
            tp=case.tp,
            costs=costs,
            config=EngineConfig(page_tokens=PAGE_TOKENS, max_num_batched_tokens=budget_tokens, watermark=0.0),
            control=SwitchAt(case.switch_at, case.switch_to) if case.switch_to else RolloutControl(),
            cap_tokens=max(response for _, response in lengths),
            recorder=recorder,
            used_tps={0: {1, 2}},
        )
    )
    return Simulated(
        makespan_s=float(rollout.env.now),
        finished_s={request.id: request.finished_at for request in requests},
        pause_s=sum(switch[4].total_s for switch in rollout.switches),
        prefill_s=sum(span.end_at - span.start_at for span in recorder.spans if span.kind == "prefill"),
    )
