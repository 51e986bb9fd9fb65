"""Runs a workflow under a plan: every call of every step as a process that waits for what it needs and its GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import simpy

from rlsim.cost.step import StepCost
from rlsim.errors import PolicyError
from rlsim.hardware import Cluster
from rlsim.sim.batching import Batching, PromptFeed, Settled, StepBatch
from rlsim.sim.control import (
    Controls,
    Launch,
    Prompt,
    RolloutControl,
    RolloutCosts,
    RolloutReport,
    ScoringReport,
)
from rlsim.sim.elastic import ElasticCall, Pieces
from rlsim.sim.flow import BATCH, Flow
from rlsim.sim.pool import GpuPool
from rlsim.sim.recorder import Recorder, Span
from rlsim.sim.replica import ChunkListener
from rlsim.sim.request import EngineConfig, Request
from rlsim.sim.responses import Responses
from rlsim.sim.reward import RewardControl, RewardDesk, Scoring
from rlsim.sim.rollout import Rollout, Routing
from rlsim.sim.scorer import Scorer
from rlsim.sim.service import Service
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan


class CallTimes(Protocol):
    """Durations of calls other than generation and reward; rlsim.cost provides them."""

    def parts(
        self, call: Call, placement: Placement, responses: Responses, rollout_tp: int
    ) -> Sequence[tuple[str, float]]:
        """What the call spends its time on, one after the other: names and seconds. The rollout goes on at that TP."""

    def pieces(self, call: Call) -> Pieces:
        """The same call done in pieces, as samples come."""


class Judge(NamedTuple):
    """The engine of a model that scores responses."""

    tp: int
    cost: StepCost
    crowded: StepCost  # while other work runs on its GPUs
    slowdown: float  # how many times as long that work takes while the judge is busy
    capacity_pages: int
    config: EngineConfig
    handover_s: float = 0.0  # of a rollout replica's time, for each chunk of a response that it hands over


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
    samples: tuple[int, ...] = ()  # that each data-parallel replica worked on, if it took them as they came


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
    settled: Settled
    waiting: int  # prompts that wait to be launched again afterwards
    released_gpu_s: float  # GPU time that generation gave up before its end


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

    `requests(prompts, samples, first_id)` gives the requests of a launch. `batching` says what is launched and trained
    on, `control` decides during generation, `reward` about reward calls. Steps follow each other as the workflow's
    edges allow; a call holds all GPUs of its placement from start to end, but for edges of the grain `sample`:
    such a call works on samples as they come, on whichever of its replicas' GPUs are free. `scorers` are the engines of
    the calls that take responses by the chunk, by call name.
    """

    workflow: Workflow
    plan: Plan
    cluster: Cluster
    control: RolloutControl
    initial_tp: int
    feed: PromptFeed
    requests: Callable[[Sequence[Prompt], int, int], list[Request]]
    costs: RolloutCosts
    times: CallTimes
    scoring: Scoring
    config: EngineConfig
    cap_tokens: int
    steps: int
    batching: Batching = field(default_factory=Batching)
    reward: RewardControl = field(default_factory=RewardControl)
    judge: Judge | None = None
    scorers: Mapping[str, Judge] = field(default_factory=dict)
    crowded: Callable[[int], StepCost] | None = None  # a rollout replica's steps while others work on its GPUs
    routing: Routing = "contiguous"

    def run(self) -> Outcome:
        """Simulate all steps."""
        with _few_collections():
            return _Run(self).outcome


class _Step:
    """What is under way in one step."""

    def __init__(self, env: simpy.Environment, what: Simulation) -> None:
        self.flow = Flow(env, what.workflow, what.feed.responses)
        self.batching = what.batching
        self.version = 0  # of the weights that generate: how many updates they have had
        self.paused: frozenset[int] = frozenset()  # requests that go on in a later step
        self.batch: StepBatch | None = None
        self.rollout: Rollout | None = None
        self.requests: list[Request] = []
        self.ids = 0
        self.offered: set[int] = set()  # responses that reward calls have been given
        self.scorers: dict[str, Scorer] = {}  # by call that takes chunks
        self.scored: set[str] = set()  # those of these calls that are done
        self.chunk_tokens = 0
        self.generates_at = float("nan")  # when its rollout began

    def responses(self) -> Responses:
        return Responses.of(
            self.requests,
            self.batch.accepted if self.batch else None,
            self.version,
            self.paused if self.batching.pauses else None,
        )


class _Run:
    def __init__(self, what: Simulation) -> None:
        self.what = what
        self.env = simpy.Environment()
        self.pool = GpuPool(self.env)
        self.outcome = Outcome()
        self.used_tps: dict[int, set[int]] = {}
        self.tp = self.planned_tp = what.initial_tp  # that the last rollout began with; that the next one is to
        self.last_tp: dict[int, int] = {}  # by node, at the end of the last rollout
        self.desk = RewardDesk(self.env, what.scoring, what.reward)
        self.steps = [_Step(self.env, what) for _ in range(what.steps)]
        self.updates = 0  # of the rollout's weights, so far
        self.updating = _updating(what.workflow)
        self.chunked = sum(any(e.grain == "chunk" for e in what.workflow.into(c.name)) for c in what.workflow.calls)
        #: By prompt position: responses that go on in a later step, and the version of the weights of theirs.
        self.paused: dict[int, tuple[int, list[Request]]] = {}
        if not any(call.kind == "generate" for call in what.workflow.calls):
            self._take_given()
        self.done: dict[tuple[str, int], simpy.Process] = {}
        for step in range(what.steps):
            for name in what.workflow.order():
                self.done[name, step] = self.env.process(self._call(what.workflow.call(name), step))
        for step, state in enumerate(self.steps):
            self._run_until([self.done[c.name, step] for c in what.workflow.calls], step)
            self.outcome.step_ends.append(self.env.now)
            self.outcome.responses.append(state.responses())
            state.requests, state.rollout = [], None

    def _take_given(self) -> None:
        """Responses that nobody generates: they are there from the start."""
        for step, state in enumerate(self.steps):
            state.version = step
            for request in self._launched(state, Batching().launch(self.what.feed)):
                request.generated, request.finished_at = request.response_tokens, self.env.now
            settled = Settled("", len(state.requests), 0, 0)
            self.outcome.rollouts.append(RolloutSummary(step, 0, 0, 0, settled, 0, 0.0))

    def _run_until(self, calls: Sequence[simpy.Process], step: int) -> None:
        try:
            self.env.run(until=simpy.AllOf(self.env, calls))
        except RuntimeError as error:
            if self.env.peek() != float("inf"):
                raise
            raise PolicyError(
                f"step {step} comes to a halt: its batch cannot become complete, and nothing more is launched "
                "(was something aborted that it needs?)"
            ) from error

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, call: Call, step: int) -> Generator[simpy.Event, Any, None]:
        placement, edges = self.what.plan.of(call.name), self.what.workflow.into(call.name)
        for edge in edges:
            if edge.grain == "stage" and step >= edge.lag and (call.kind != "reward" or edge.lag):
                yield self.done[edge.source, step - edge.lag]
        if call.kind == "reward":
            record = yield from self._reward(call, step, placement)
        elif any(edge.grain == "chunk" for edge in edges):
            record = yield from self._in_chunks(call, step, placement)
        elif any(edge.grain == "sample" for edge in edges):
            record = yield from self._in_pieces(call, step, placement)
        else:
            record = yield from self._at_once(call, step, placement)
        self.outcome.calls.append(record)
        self.updates += call.name in self.updating

    def _at_once(self, call: Call, step: int, placement: Placement) -> Generator[simpy.Event, Any, CallRecord]:
        """All of a call, on all its GPUs."""
        env, state = self.env, self.steps[step]
        ready_at = env.now
        yield self.pool.acquire(placement.gpus)
        start_at, held = env.now, set(placement.gpus)
        parts: tuple[tuple[str, float], ...] = ()
        if call.kind == "generate":
            held -= yield from self._generate(call, step, placement)
        else:
            parts = tuple(self.what.times.parts(call, placement, state.responses(), self.planned_tp))
            yield env.timeout(sum(seconds for _, seconds in parts))
            Recorder(self.outcome.spans, step).add(placement.gpus, start_at, env.now, call.name)
            if state.flow.wants(call.name):
                state.flow.deliver(call.name, self._batch(state))
                state.flow.close(call.name)
        self.pool.release(held)
        gpus = len(placement.gpus)
        return CallRecord(step, call.name, call.kind, call.model, ready_at, start_at, env.now, gpus, parts)

    def _in_pieces(self, call: Call, step: int, placement: Placement) -> Generator[simpy.Event, Any, CallRecord]:
        """A call on samples as they come, then what it does once at the end."""
        env, flow = self.env, self.steps[step].flow
        inbox, pieces = flow.inboxes[call.name], self.what.times.pieces(call)
        yield inbox.first
        ready_at = env.now
        recorder, state = Recorder(self.outcome.spans, step), self.steps[step]

        def slowdown(gpus: tuple[int, ...]) -> float:
            beside = [(self.what.scorers[name].slowdown, s.busy_gpus) for name, s in state.scorers.items()]
            if self.what.judge and self.desk.judge:
                beside.append((self.what.judge.slowdown, self.desk.judge.busy_gpus))
            return max((factor for factor, busy in beside if not busy.isdisjoint(gpus)), default=1.0)

        work = ElasticCall(env, self.pool, placement.replicas(), pieces, inbox, recorder, call.name, slowdown)
        work.on_done = lambda samples: flow.deliver(call.name, samples)
        yield work.done
        flow.close(call.name)
        if pieces.finish:
            yield self.pool.acquire(placement.gpus)
            start = env.now
            yield env.timeout(sum(seconds for _, seconds in pieces.finish))
            recorder.add(placement.gpus, start, env.now, call.name)
            self.pool.release(placement.gpus)
        start_at = work.started_at if work.started_at == work.started_at else env.now
        parts: dict[str, float] = dict(work.parts_s)
        for name, seconds in pieces.finish:
            parts[name] = parts.get(name, 0.0) + seconds
        gpus, samples = len(placement.gpus), tuple(work.samples)
        return CallRecord(
            step, call.name, call.kind, call.model, ready_at, start_at, env.now, gpus, tuple(parts.items()), samples
        )

    def _in_chunks(self, call: Call, step: int, placement: Placement) -> Generator[simpy.Event, Any, CallRecord]:
        """Prefill responses while they are generated; over when all of the batch are scored."""
        env, state, engine = self.env, self.steps[step], self.what.scorers[call.name]
        flow, inbox = state.flow, state.flow.inboxes[call.name]
        yield inbox.first
        ready_at = env.now
        if not placement.shared:
            yield self.pool.acquire(placement.gpus)
        start_at, rollout = env.now, state.rollout
        beside = rollout if placement.shared and rollout and not rollout.done.triggered else None
        scorer = state.scorers[call.name] = Scorer(
            env,
            placement.replicas(engine.tp),
            engine.crowded if beside else engine.cost,
            engine.capacity_pages,
            engine.config,
            Recorder(self.outcome.spans, step, call.name, placement.shared),
            on_busy=beside.share if beside else None,
        )
        if beside and beside.done.callbacks is not None:
            beside.done.callbacks.append(lambda _: scorer.set_cost(engine.cost))
        left, complete = 0, env.event()

        def scored(request: Request) -> None:
            nonlocal left
            left -= 1
            flow.deliver(call.name, [request])
            if not left and inbox.closed.triggered:
                complete.succeed()

        def submit(samples: Sequence[Request]) -> None:
            nonlocal left
            left += len(samples)
            for sample in samples:
                scorer.complete(sample, scored)

        inbox.listen(submit, scorer.chunks)
        yield inbox.closed
        scorer.keep_only(frozenset(request.id for request in inbox.samples))
        if left:
            yield complete
        scorer.close()
        flow.close(call.name)
        if not placement.shared:
            self.pool.release(placement.gpus)
        self._report_scored(state, call.name, step)
        parts = (("compute", scorer.mean_busy_s),)
        gpus = len(placement.gpus)
        return CallRecord(step, call.name, call.kind, call.model, ready_at, start_at, env.now, gpus, parts)

    def _report_scored(self, state: _Step, name: str, step: int) -> None:
        """Tell the control, after the last of the calls that take chunks."""
        state.scored.add(name)
        if len(state.scored) == self.chunked:
            tokens = sum(r.generated - r.resumed_tokens for r in state.requests)
            stage_s = self.env.now - state.generates_at
            self.what.control.on_scored(ScoringReport(step, state.chunk_tokens, stage_s, tokens))

    def _reward(self, call: Call, step: int, placement: Placement) -> Generator[simpy.Event, Any, CallRecord]:
        """Score responses as they are offered; over when all of the batch have their rewards."""
        env, state, desk = self.env, self.steps[step], self.desk
        inbox, flow = state.flow.inboxes[call.name], state.flow
        yield inbox.first
        start_at = env.now
        judge = desk.judge = self._judge(call, step, placement)
        missing: set[int] = set()  # of the batch, once it is known
        complete = env.event()

        def scored(request: Request) -> None:
            flow.deliver(call.name, [request])
            if state.batch and state.rollout and state.batch.scored(request):
                state.rollout.ask()
            if request.id in missing:
                missing.discard(request.id)
                if not missing:
                    complete.succeed()

        def submit(samples: Sequence[Request]) -> None:
            for sample in samples:
                desk.submit(sample, scored)

        inbox.listen(submit)
        yield inbox.closed
        batch = self._batch(state)
        desk.withdraw(frozenset(r.id for r in inbox.samples) - frozenset(r.id for r in batch))
        missing |= {request.id for request in batch if not request.scored}
        if missing:
            yield complete
        if judge:
            judge.close()
        flow.close(call.name)
        gpus = len(placement.gpus)
        return CallRecord(step, call.name, call.kind, call.model, start_at, start_at, env.now, gpus, ())

    def _batch(self, state: _Step) -> list[Request]:
        accepted = state.batch.accepted if state.batch else None
        return [r for r in state.requests if r.finished and (accepted is None or r.id in accepted)]

    def _judge(self, call: Call, step: int, placement: Placement) -> Service | None:
        """The judge of a step. Where it begins beside a rollout, it slows that and what follows down, and is slowed."""
        judge, rollout = self.what.judge, self.steps[step].rollout
        if judge is None:
            return None
        beside = placement.shared and rollout is not None and not rollout.done.triggered
        return Service(
            self.env,
            placement.replicas(judge.tp),
            judge.crowded if beside else judge.cost,
            judge.capacity_pages,
            judge.config,
            Recorder(self.outcome.spans, step, call.name, placement.shared),
            self.what.cluster.node_of,
            on_busy=rollout.share if beside and rollout else None,
        )

    # ---- generation -------------------------------------------------------------------------------------------------

    def _generate(self, call: Call, step: int, placement: Placement) -> Generator[simpy.Event, Any, set[int]]:
        """Run the generation stage; returns the GPUs that it gave up before its end."""
        what, state, flow = self.what, self.steps[step], self.steps[step].flow
        mesh = placement.rollout_mesh(what.cluster)
        state.version = self.updates
        batch = state.batch = StepBatch(what.batching, what.feed, lambda samples: flow.deliver(BATCH, samples))
        requests = self._launched(state, batch.first)
        resumed = [r for r in requests if r.resumed] if batch.first.resume else []
        generating = [r for r in resumed if not r.finished]
        yield from self._lay_out(step, mesh, len(requests) - len(resumed) + len(generating))
        rewards = {c.name for c in what.workflow.calls if c.kind == "reward"}
        streams = any(e.grain == "sample" and e.target in rewards for e in what.workflow.edges if e.source == call.name)
        listens = streams or flow.wants(BATCH) or not batch.certain

        def launch(more: Launch) -> Sequence[Request]:
            if more.resume:
                raise PolicyError(f"step {step}: only the first launch of a step may resume what was kept")
            return self._launched(state, more)

        def finished(responses: Sequence[Request]) -> None:
            batch.finished(responses)
            if streams:
                self._offer(call, state, responses)

        rollout = state.rollout = Rollout(
            self.env,
            mesh=mesh,
            tp=self.tp,
            requests=[r for r in requests if not r.resumed] if resumed else requests,
            costs=what.costs,
            config=what.config,
            control=what.control if batch.certain else Controls([batch, what.control]),
            cap_tokens=what.cap_tokens,
            recorder=Recorder(self.outcome.spans, step),
            on_release=self.pool.release,
            routing=what.routing,
            used_tps=self.used_tps,
            open=batch.open,
            launcher=launch,
            on_finish=finished if listens else None,
            on_drained=lambda: self._offer(call, state, [r for r in state.requests if r.finished]),
            crowded=what.crowded,
            label=batch.first.label,
            resumed=generating,
            chunks=self._chunks(call, state),
        )
        start = state.generates_at = self.env.now
        self._go_on(call, state, generating)
        if len(generating) < len(resumed):
            finished([r for r in resumed if r.finished])
            rollout.ask()
        yield rollout.done
        settled = batch.close()
        if not batch.certain:
            state.paused = frozenset(r.id for kept in batch.paused.values() for r in kept)
            self.paused |= {at: (state.version, kept) for at, kept in batch.paused.items()}
            for request in state.requests:
                request.aborted = not request.finished and request.id not in state.paused
        if flow.wants(call.name):
            self._offer(call, state, self._batch(state))
        flow.close(call.name)
        flow.close(BATCH)
        self._note(step, start, rollout, settled)
        rollout.close()
        return set(rollout.released_at)

    def _launched(self, state: _Step, launch: Launch) -> list[Request]:
        """The requests of a launch, told to the step's batch: new ones, then those that go on."""
        requests = self.what.requests(launch.prompts, launch.samples, state.ids)
        if baselines := self.what.workflow.baseline_responses:  # the last of each prompt's
            for i, request in enumerate(requests):
                request.baseline = i % launch.samples >= launch.samples - baselines
        for prompt in launch.resume:
            if prompt.position not in self.paused:
                raise PolicyError(f"the prompt at position {prompt.position} was not kept: it cannot be resumed")
            began, kept = self.paused.pop(prompt.position)
            requests += [r.resume(state.ids + len(requests) + i, began, state.version) for i, r in enumerate(kept)]
        state.ids += len(requests)
        state.requests += requests
        if state.batch:
            state.batch.launched(requests, [*launch.prompts, *launch.resume])
        return requests

    def _chunks(self, call: Call, state: _Step) -> ChunkListener | None:
        """Who takes responses by the chunk; None if nobody does."""
        planned, calls = state.flow.chunked(call.name)
        if not planned:
            return None
        state.chunk_tokens = self.what.control.chunk_tokens(planned)
        handover_s = sum(self.what.scorers[name].handover_s for name in calls)
        return ChunkListener(state.chunk_tokens, handover_s, lambda c: state.flow.deliver_chunks(call.name, c))

    def _go_on(self, call: Call, state: _Step, resumed: Sequence[Request]) -> None:
        """Hand over what responses from earlier steps have already."""
        there = [(r, r.generated) for r in resumed if r.generated]
        if there and state.chunk_tokens:
            state.flow.deliver_chunks(call.name, there)

    def _offer(self, call: Call, state: _Step, responses: Sequence[Request]) -> None:
        """Give reward calls those of these responses that they have not seen."""
        if not state.flow.wants(call.name):
            return
        new = [request for request in responses if request.id not in state.offered]
        state.offered.update(request.id for request in new)
        if new:
            state.flow.deliver(call.name, new)

    def _note(self, step: int, start: float, rollout: Rollout, settled: Settled) -> None:
        """Write down how a rollout went, and let the control choose the next one's layout."""
        end = self.env.now
        for at, node, from_tp, to_tp, time in rollout.switches:
            self.last_tp[node] = to_tp
            self.outcome.switches.append(
                SwitchRecord(step, at, node, from_tp, to_tp, time.weights_s, time.kv_s, time.graph_s, time.control_s)
            )
        preemptions = sum(replica.preemptions for replica in rollout.replicas)
        peak = max(replica.peak_tokens for replica in rollout.replicas)
        released = sum(end - at for at in rollout.released_at.values())
        waiting = self.what.batching.waiting()
        self.outcome.rollouts.append(RolloutSummary(step, self.tp, preemptions, peak, settled, waiting, released))
        lengths = tuple(r.generated for r in rollout.requests if r.finished)
        report = RolloutReport(step, self.tp, end - start, preemptions, lengths, settled.label)
        wanted = self.what.control.next_tp(report)
        self.planned_tp = self.tp if wanted is None else wanted

    def _lay_out(self, step: int, mesh: Sequence[tuple[int, ...]], requests: int) -> Generator[simpy.Event, Any, None]:
        """Pause the nodes that are not in the layout which the step starts with; the weight sync brought the weights.

        Going back to the layout of the step before is free if its decode graphs were kept; a newly planned one is not.
        """
        what, start, longest_s = self.what, self.env.now, 0.0
        planned, self.tp = self.planned_tp != self.tp, self.planned_tp
        for node, gpus in enumerate(mesh):
            last_tp = self.last_tp.get(node, self.tp)
            if last_tp != self.tp and (planned or not what.config.first_layout_kept):
                first_use = self.tp not in self.used_tps.get(node, ())
                cost = what.costs.switch(last_tp, self.tp, (), -(-requests // len(mesh)), "recompute", first_use)
                record = SwitchRecord(step, start, node, last_tp, self.tp, 0.0, 0.0, cost.graph_s, cost.control_s)
                self.outcome.switches.append(record)
                pause_s = cost.graph_s + cost.control_s
                Recorder(self.outcome.spans, step).add(gpus, start, start + pause_s, "switch", self.tp)
                longest_s = max(longest_s, pause_s)
        self.last_tp = dict.fromkeys(range(len(mesh)), self.tp)
        yield self.env.timeout(longest_s)


def _updating(workflow: Workflow) -> frozenset[str]:
    """The calls that give the rollout new weights: the syncs before generation, else those that train its model."""
    generate = {call.name: call.model for call in workflow.calls if call.kind == "generate"}
    syncs = {e.source for e in workflow.edges if e.target in generate and workflow.call(e.source).kind == "sync"}
    trains = (call.name for call in workflow.calls if call.kind == "train" and call.model in generate.values())
    return frozenset(syncs or trains)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: a run makes many small objects and no cycles worth looking for (a fifth of its time)."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 200_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
