"""Runs a workflow under a plan: every call of every step as a process that waits for its parents and its GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import simpy

from rlsim.hardware import Cluster
from rlsim.sim.control import RolloutControl, RolloutCosts
from rlsim.sim.pool import GpuPool
from rlsim.sim.recorder import Recorder, Span
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.responses import Responses
from rlsim.sim.rollout import Rollout, Routing
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan


class CallTimes(Protocol):
    """Durations of calls other than generation; rlsim.cost provides them."""

    def parts(
        self, call: Call, placement: Placement, responses: Responses, rollout_tp: int
    ) -> Sequence[tuple[str, float]]:
        """What the call spends its time on, one after the other: names and seconds."""


class CallRecord(NamedTuple):
    """One call of one step: when it was ready, ran and ended (simulated seconds), and what its time went to."""

    step: int
    call: str
    kind: str
    model: str
    ready_at: float
    start_at: float
    end_at: float
    gpus: int
    parts: tuple[tuple[str, float], ...]


class SwitchRecord(NamedTuple):
    """One change of a node's tensor-parallel degree."""

    step: int
    at: float
    node: int
    from_tp: int
    to_tp: int
    weights_s: float
    kv_s: float
    graph_s: float
    control_s: float


class RolloutSummary(NamedTuple):
    """What one generation stage came to besides its responses."""

    step: int
    initial_tp: int
    preemptions: int
    peak_kv_tokens: int  # of the fullest replica


@dataclass
class Outcome:
    """Everything that happened in a run."""

    spans: list[Span] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    switches: list[SwitchRecord] = field(default_factory=list)
    rollouts: list[RolloutSummary] = field(default_factory=list)
    responses: list[Responses] = field(default_factory=list)  # by step
    step_ends: list[float] = field(default_factory=list)  # moment when all calls of a step are done


@dataclass(frozen=True)
class Simulation:
    """One system on one trace with one seed.

    `launch(step)` gives the requests of a step. `control` decides during generation. Steps follow each other as the
    workflow's edges allow; a call holds all GPUs of its placement from start to end.
    """

    workflow: Workflow
    plan: Plan
    cluster: Cluster
    control: RolloutControl
    initial_tp: int
    launch: Callable[[int], list[Request]]
    costs: RolloutCosts
    times: CallTimes
    config: EngineConfig
    cap_tokens: int
    steps: int
    routing: Routing = "contiguous"

    def run(self) -> Outcome:
        """Simulate all steps."""
        with _few_collections():
            return _Run(self).outcome


class _Run:
    def __init__(self, what: Simulation) -> None:
        self.what = what
        self.env = simpy.Environment()
        self.pool = GpuPool(self.env)
        self.outcome = Outcome()
        self.used_tps: dict[int, set[int]] = {}
        self.last_tp: dict[int, int] = {}  # nodes that switched during the last generation stage, and where to
        self.responses: dict[int, Responses] = {}
        self.done: dict[tuple[str, int], simpy.Process] = {}
        for step in range(what.steps):
            for name in what.workflow.order():
                self.done[name, step] = self.env.process(self._call(what.workflow.call(name), step))
        for step in range(what.steps):
            self.env.run(until=simpy.AllOf(self.env, [self.done[c.name, step] for c in what.workflow.calls]))
            self.outcome.step_ends.append(self.env.now)
            self.outcome.responses.append(self.responses.pop(step))

    def _call(self, call: Call, step: int) -> Generator[simpy.Event, Any, None]:
        env, placement = self.env, self.what.plan.of(call.name)
        for edge in self.what.workflow.into(call.name):
            if step >= edge.lag:
                yield self.done[edge.source, step - edge.lag]
        ready_at = env.now
        yield self.pool.acquire(placement.gpus)
        start_at = env.now
        parts: tuple[tuple[str, float], ...] = ()
        held = set(placement.gpus)
        if call.kind == "generate":
            held -= yield from self._generate(step, placement)
        else:
            parts = tuple(self.what.times.parts(call, placement, self.responses[step], self.what.initial_tp))
            yield env.timeout(sum(seconds for _, seconds in parts))
            if placement.gpus:
                Recorder(self.outcome.spans, step).add(placement.gpus, start_at, env.now, call.name)
        self.pool.release(held)
        self.outcome.calls.append(
            CallRecord(step, call.name, call.kind, call.model, ready_at, start_at, env.now, len(placement.gpus), parts)
        )

    def _generate(self, step: int, placement: Placement) -> Generator[simpy.Event, Any, set[int]]:
        """Run the generation stage; returns the GPUs that it gave up before its end."""
        what = self.what
        mesh, requests = placement.nodes(what.cluster), what.launch(step)
        if not what.config.first_layout_kept:
            yield from self._return_to_first_layout(step, mesh, len(requests))
        rollout = Rollout(
            self.env,
            mesh=mesh,
            tp=what.initial_tp,
            requests=requests,
            costs=what.costs,
            config=what.config,
            control=what.control,
            cap_tokens=what.cap_tokens,
            recorder=Recorder(self.outcome.spans, step),
            on_release=self.pool.release,
            routing=what.routing,
            used_tps=self.used_tps,
        )
        yield rollout.done
        self.responses[step] = Responses.of(rollout.requests)
        for at, node, from_tp, to_tp, time in rollout.switches:
            self.last_tp[node] = to_tp
            self.outcome.switches.append(
                SwitchRecord(step, at, node, from_tp, to_tp, time.weights_s, time.kv_s, time.graph_s, time.control_s)
            )
        self.outcome.rollouts.append(
            RolloutSummary(
                step,
                what.initial_tp,
                sum(replica.preemptions for replica in rollout.replicas),
                max(replica.peak_tokens for replica in rollout.replicas),
            )
        )
        rollout.close()
        return set(rollout.released_at)

    def _return_to_first_layout(
        self, step: int, mesh: Sequence[tuple[int, ...]], requests: int
    ) -> Generator[simpy.Event, Any, None]:
        """Pause the nodes that ended the last step in another layout; the weight sync has brought their weights."""
        what, start, longest_s = self.what, self.env.now, 0.0
        for node, last_tp in self.last_tp.items():
            if last_tp != what.initial_tp:
                cost = what.costs.switch(last_tp, what.initial_tp, (), -(-requests // len(mesh)), "recompute", False)
                record = SwitchRecord(
                    step, start, node, last_tp, what.initial_tp, 0.0, 0.0, cost.graph_s, cost.control_s
                )
                self.outcome.switches.append(record)
                pause_s = cost.graph_s + cost.control_s
                Recorder(self.outcome.spans, step).add(mesh[node], start, start + pause_s, "switch", what.initial_tp)
                longest_s = max(longest_s, pause_s)
        self.last_tp.clear()
        yield self.env.timeout(longest_s)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: a run makes many small objects and no cycles worth looking for (a fifth of its time)."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 200_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
