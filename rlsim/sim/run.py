"""Runs a workflow under a plan: every call of every step as a process that waits for what it needs and its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from math import isnan
from operator import attrgetter
from typing import Any, TypeVar

import simpy

from rlsim.cost.step import StepCost
from rlsim.errors import PolicyError
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import ScoringReport
from rlsim.sim.elastic import ElasticCall
from rlsim.sim.flow import Flow, Inbox, closed
from rlsim.sim.generation import StepGeneration
from rlsim.sim.moment import until_over
from rlsim.sim.open_generation import OpenGeneration
from rlsim.sim.outcome import CallRecord, Outcome, Parts, Ran
from rlsim.sim.recorder import Recorder
from rlsim.sim.request import NAN, EngineConfig, Request
from rlsim.sim.reward import RewardDesk
from rlsim.sim.rollout import Rollout
from rlsim.sim.server import InferenceServer, RewardModelEngine, StreamingScorer
from rlsim.sim.simulation import Machine, Simulation, StepState
from rlsim.workflow.graph import Call, Edge, Workflow
from rlsim.workflow.plan import Placement

_T = TypeVar("_T")
_Process = Generator[simpy.Event, Any, _T]
_Runner = Callable[[Call, int, Placement], _Process[Ran]]


def simulate(simulation: Simulation) -> Outcome:
    """Simulate all steps. Raises `PolicyError` if a policy does what it may not, or a step comes to a halt."""
    return _Run(simulation).to_the_end()


class _Run(Machine):
    def __init__(self, what: Simulation) -> None:
        super().__init__(what)
        self.desk = RewardDesk(self.env, what.scoring, what.reward)
        self.judges: list[tuple[int, InferenceServer]] = []  # those that work, by step (NO_STEP: of all steps)
        self.steps = {
            step: StepState(Flow(self.env, what.workflow, what.feed.responses), step) for step in range(what.steps)
        }
        trains = [call.name for call in what.workflow.calls if call.kind == "train"]
        for state in self.steps.values():
            state.trained = [{name: self.env.event() for name in trains} for _ in range(what.workflow.windows)]
        self.updating = _updating(what.workflow)
        self.judging = self._judging()
        self.judged = set[int]()  # steps that have asked for these GPUs
        self.chunked = sum(any(e.grain == "chunk" for e in what.workflow.into(c.name)) for c in what.workflow.calls)
        self.generation: StepGeneration | OpenGeneration = StepGeneration(self, what.costs, what.initial_tp)
        generating = what.workflow.generating
        if not generating:
            self.generation.take_given(list(self.steps.values()))
        elif isinstance(what.batching.launcher, Continuous):
            self.generation = OpenGeneration(self, self.desk, generating[0], self._judge)
        engines: dict[tuple[str, Placement], StepGeneration | OpenGeneration] = {}  # by model and place
        self.generations = dict[str, StepGeneration | OpenGeneration]()  # by call
        for number, call in enumerate(generating):
            key = call.model, what.plan.of(call.name)
            if key not in engines:
                engines[key] = StepGeneration(self, *what.others[call.name]) if number else self.generation
            self.generations[call.name] = engines[key]
        several = len(generating) > 1
        #: By call: the calls that generate what it works on; none: all.
        self.takes = {c.name: what.workflow.takes(c.name) if several else () for c in what.workflow.calls}
        runners = {call.name: self._runner(call) for call in what.workflow.calls}
        self.done: dict[tuple[str, int], simpy.Process] = {}
        for step in range(what.steps):
            for name in what.workflow.order():
                self.done[name, step] = self.env.process(self._call(what.workflow.call(name), step, runners[name]))

    def to_the_end(self) -> Outcome:
        """Run all steps, and let go of each step's requests once it is over."""
        for step in range(self.what.steps):
            self._run_until([self.done[call.name, step] for call in self.what.workflow.calls], step)
            self.outcome.step_ends.append(self.env.now)
            state = self.steps.pop(step)
            if isinstance(self.generation, OpenGeneration) and not self.steps:
                self.generation.end(state)
            self.outcome.responses.append(state.responses())
            state.forget()
        self.outcome.assign_steps()
        self.outcome.spans.sort(key=attrgetter("start_at", "gpus"))
        return self.outcome

    def _run_until(self, calls: Sequence[simpy.Process], step: int) -> None:
        try:
            self.env.run(until=simpy.AllOf(self.env, calls))
        except RuntimeError as error:
            if self.env.peek() != float("inf"):
                raise
            left = ", ".join(call.name for call in self.what.workflow.calls if not self.done[call.name, step].triggered)
            raise PolicyError(
                f"step {step} comes to a halt: its batch cannot become complete, and nothing more is launched "
                "(was something aborted that it needs, or are GPUs of training borrowed and not given back?); calls "
                f"that wait: {left}"
            ) from error

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _runner(self, call: Call) -> _Runner:
        edges, generation = self.what.workflow.into(call.name), self.generations.get(call.name, self.generation)
        if isinstance(generation, OpenGeneration):
            if call.kind == "generate":
                return partial(self._from_queue, generation)
            if call.name in self.updating:
                return partial(self._update, generation)
        elif call.kind == "generate":
            return partial(self._generate, generation)
        if call.kind == "reward":
            return self._reward
        if any(edge.grain == "chunk" for edge in edges):
            return self._in_chunks
        if _streams(edges):
            return self._in_windows if self.what.workflow.windows else self._in_pieces
        return self._at_once

    def _call(self, call: Call, step: int, run: _Runner) -> _Process[None]:
        placement, edges = self.what.plan.of(call.name), self.what.workflow.into(call.name)
        for edge in edges:
            if edge.grain == "stage" and step >= edge.lag and (call.kind != "reward" or edge.lag):
                yield self.done[edge.source, step - edge.lag]
        for edge in self.what.workflow.edges:
            if edge.exact and edge.source == call.name:  # the last that may not have these weights yet
                yield self.done[edge.target, min(step + edge.lag - 1, self.what.steps - 1)]
            if edge.exact and 0 < edge.lag - 1 <= step and call.kind in ("inference", "train") and not _streams(edges):
                yield self.done[edge.source, step - edge.lag + 1]  # weights go out before the step's responses are used
        if call.kind == "train" and step:
            yield self.done[call.name, step - 1]  # steps are trained in their order, however soon a later one is ready
        ready_at = self.env.now
        ran = yield from run(call, step, placement)
        self.steps[step].flow.close(call.name)
        when = (ready_at if isnan(ran.ready_at) else ran.ready_at, ran.start_at, self.env.now)
        record = CallRecord(step, call.name, call.kind, call.model, *when, len(placement.gpus), ran.parts, ran.samples)
        self.outcome.calls.append(record)
        for generation in {self.generations[name] for name in self.updating.get(call.name, ())}:
            generation.version += 1

    def _at_once(
        self, call: Call, step: int, placement: Placement, window: Sequence[Request] | None = None, windows: int = 1
    ) -> _Process[Ran]:
        """All of a call, or its work on one of so many windows of the batch, on all its GPUs."""
        self._begins(call, step)
        yield self.pool.acquire(placement.gpus, call.kind, streams=window is not None)
        samples = self.steps[step].trained_on(self.takes[call.name]) if window is None else window
        start_at, parts = self.env.now, self._parts(call, placement, samples, windows)
        yield from self._occupy(call, step, placement.gpus, parts)
        self.steps[step].flow.deliver(call.name, samples)
        return Ran(start_at, parts)

    def _occupy(self, call: Call, step: int, gpus: tuple[int, ...], parts: Parts) -> _Process[None]:
        """Use GPUs that a call has for as long as that takes, and give them back."""
        start_at = self.env.now
        yield self.env.timeout(sum(seconds for _, seconds in parts))
        Recorder(self.outcome.spans, step).add(gpus, start_at, self.env.now, call.name)
        self.pool.release(gpus)

    def _generate(self, generation: StepGeneration, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """The generation stage of a step, from whose start on the judge has its GPUs."""
        judging = () if step in self.judged else self.judging  # which the first that generates brings
        self.judged.add(step)
        yield self.pool.acquire((*placement.gpus, *judging), call.kind)
        start_at = self.env.now
        if judging:
            self.env.process(self._keep_for_judge(step))
        released = yield from generation.run(call, step, self.steps[step], placement)
        self.pool.release({*placement.gpus} - released)
        return Ran(start_at)

    def _begins(self, call: Call, step: int) -> None:
        """A call of a step is ready: where it trains what generates, generation has the trainer's weights no more."""
        updated = self.updating.keys() & self.what.workflow.beside(call.name)[1]
        if self.borrowing and call.kind == "train" and updated:
            self.borrowing.trained = max(self.borrowing.trained, step + 1)

    def _from_queue(self, generation: OpenGeneration, call: Call, step: int, _: Placement) -> _Process[Ran]:
        """A step takes its batch from a rollout for all steps, at work on it since the step before had its own."""
        start_at = generation.served_at
        yield from generation.window(call, step, self.steps[step])
        return Ran(start_at, ready_at=start_at)

    def _update(self, generation: OpenGeneration, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """New weights for a rollout that goes on: the others' GPUs wait until its replicas stand still."""
        calls = self.what.workflow.calls
        rollout = {gpu for c in calls if c.kind == "generate" for gpu in self.what.plan.of(c.name).gpus}
        own = tuple(gpu for gpu in placement.gpus if gpu not in rollout)
        yield self.pool.acquire(own, call.kind)
        if generation.relays:
            relay, start_at = self.what.times.relay(call), self.env.now
            parts: Parts = (("weights", relay.push_s),)
            yield from self._occupy(call, step, own, parts)
            generation.publish(relay, call.name)
            return Ran(start_at, parts)
        parts = self._parts(call, placement, self.steps[step].trained_on(self.takes[call.name]))
        start_at = yield from generation.update(sum(seconds for _, seconds in parts))
        Recorder(self.outcome.spans, step).add(placement.gpus, start_at, self.env.now, call.name)
        self.pool.release(own)
        return Ran(start_at, parts)

    def _parts(self, call: Call, placement: Placement, batch: Sequence[Request], windows: int = 1) -> Parts:
        """The names and seconds of a call's work; a reward model works also on what the samples are compared with."""
        samples = [r for r in batch if call.model == "reward" or not r.baseline] if call.kind != "sync" else []
        return tuple(self.what.times.parts(call, placement, samples, self.generation.planned_tp, windows))

    def _in_pieces(self, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """A call on samples as they come, then what it does once at the end."""
        inbox = self.steps[step].flow.inboxes[call.name]
        yield inbox.first
        return (yield from self._elastic(inbox, call, step, placement))

    def _elastic(self, inbox: Inbox, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """The same on the samples of an inbox, of which some are there."""
        recorder, state, ready_at = Recorder(self.outcome.spans, step), self.steps[step], self.env.now
        self._begins(call, step)

        def slowdown(gpus: tuple[int, ...]) -> float:
            beside = [(self.what.scorers[name].slowdown, s.busy_gpus) for name, s in state.scorers.items()]
            if self.what.judge:
                beside += [(self.what.judge.slowdown, judge.busy_gpus) for _, judge in self.judges]
            return max((factor for factor, busy in beside if not busy.isdisjoint(gpus)), default=1.0)

        pieces = self.what.times.pieces(call)

        def generating() -> bool:
            return state.rollout is not None and not state.rollout.done.triggered

        what = (inbox, recorder, call, slowdown, generating, state.residents)
        work = ElasticCall(self.env, self.pool, placement.replicas(), pieces, *what)
        if pieces.guests:
            self.elastic.append(work)
        work.on_done = partial(state.flow.deliver, call.name)
        yield work.done
        state.flow.close(call.name)
        if finish := tuple(work.finish):
            yield self.pool.acquire(placement.gpus, call.kind)
            yield from self._occupy(call, step, placement.gpus, finish)
        _add(work.parts_s, finish)
        return Ran(min(work.started_at, self.env.now), tuple(work.parts_s.items()), tuple(work.samples), ready_at)

    def _in_windows(self, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """A call on equal parts of the batch, one after the other, each whole and on all GPUs, or in pieces.

        Where a prompt's responses stay together a part ends with the last of a prompt that it has begun. A short batch
        has fewer parts, or a smaller last one.
        """
        env, state, windows = self.env, self.steps[step], self.what.workflow.windows
        inbox = state.flow.inboxes[call.name]
        size = self.what.feed.prompts * self.what.feed.responses // windows
        ahead = any(edge.exact and edge.lag > 1 for edge in self.what.workflow.edges)
        yield inbox.at_least(size)
        ready_at, start_at, parts_s, taken = env.now, NAN, dict[str, float](), 0
        for window in range(windows):
            yield inbox.at_least((window + 1) * size)
            if inbox.closed.triggered and taken == len(inbox.samples):
                break
            if window:
                yield simpy.AllOf(env, state.trained[window - 1].values())
            end = min((window + 1) * size, len(inbox.samples))
            if self.what.workflow.group_advantage:
                end = _end_of_prompt(inbox.samples, end)
            samples, taken = inbox.samples[taken:end], end
            if ahead:
                yield from until_over(env)  # weights that are ready at this moment go out before responses are used
            if self.what.workflow.elastic and call.kind == "train":
                work = self._elastic(closed(env, samples), call, step, placement)
            else:
                work = self._at_once(call, step, placement, samples, windows)
            ran = yield from work
            start_at = ran.start_at if isnan(start_at) else start_at
            _add(parts_s, ran.parts)
            if call.kind == "train":
                state.trained[window][call.name].succeed()
        start_at = ready_at if isnan(start_at) else start_at  # of a batch of none
        return Ran(start_at, tuple(parts_s.items()), ready_at=ready_at)

    def _in_chunks(self, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """Prefill responses while they are generated; over when all of the batch are scored."""
        env, state, engine = self.env, self.steps[step], self.what.scorers[call.name]
        flow, inbox = state.flow, state.flow.inboxes[call.name]
        yield inbox.first
        ready_at = env.now
        if not placement.shared:
            yield self.pool.acquire(placement.gpus, call.kind)
        start_at, beside = env.now, self._beside(placement, step)
        served = self._served(engine, call, step, placement, beside)
        scorer = state.scorers[call.name] = StreamingScorer(*served, beside.share if beside else None)
        if beside and beside.done.callbacks is not None:
            beside.done.callbacks.append(lambda _: scorer.set_cost(engine.cost))
        scored = Inbox(env)
        scored.listen(partial(flow.deliver, call.name))

        def submit(samples: Sequence[Request]) -> None:
            for sample in samples:
                scorer.complete(sample, lambda request: scored.put([request]))

        inbox.listen(submit, scorer.chunks)
        yield inbox.closed
        scorer.keep_only(frozenset(request.id for request in inbox.samples))
        if len(scored.samples) < len(inbox.samples):
            yield scored.at_least(len(inbox.samples))
        scorer.close()
        flow.close(call.name)
        if not placement.shared:
            self.pool.release(placement.gpus)
        self._report_scored(state, call.name, step)
        return Ran(start_at, (("compute", scorer.mean_busy_s),), ready_at=ready_at)

    def _report_scored(self, state: StepState, name: str, step: int) -> None:
        """Tell the control, after the last of the calls that take chunks."""
        state.scored.add(name)
        if len(state.scored) == self.chunked:
            tokens = sum(r.generated - r.resumed_tokens for r in state.requests)
            stage_s = self.env.now - state.generates_at
            self.what.control.on_scored(ScoringReport(step, state.chunk_tokens, stage_s, tokens))

    def _reward(self, call: Call, step: int, placement: Placement) -> _Process[Ran]:
        """Score responses as they are offered, but for those that an earlier step has had scored, or a rollout for all
        steps; over when all of the batch have their rewards."""
        env, state, desk = self.env, self.steps[step], self.desk
        inbox, flow = state.flow.inboxes[call.name], state.flow
        yield inbox.first
        if state.judge_ready_at > env.now:
            yield env.timeout(state.judge_ready_at - env.now)
        while earlier := [judge for of, judge in self.judges if 0 <= of < step]:  # it answers for one step at a time
            yield earlier[0].closed
        start_at = env.now
        judge = None if self.generation.scores else self._judge(call, step, self._beside(placement, step))
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

        def offered(samples: Sequence[Request]) -> None:
            desk.submit([request for request in samples if not request.scored], judge, scored)
            for request in samples:
                if request.scored:
                    scored(request)

        inbox.listen(offered)
        yield inbox.closed
        batch = state.trained_on(self.takes[call.name])
        wanted = {request.id for request in batch}
        desk.withdraw([request for request in inbox.samples if request.id not in wanted], judge)
        missing |= {request.id for request in batch if not request.scored}
        if missing:
            yield complete
        if judge:
            judge.close()
            self.judges.remove((step, judge))
        return Ran(start_at, ready_at=start_at)

    def _served(
        self, engine: RewardModelEngine, call: Call, step: int, placement: Placement, beside: Rollout | None
    ) -> tuple[simpy.Environment, Sequence[tuple[int, ...]], StepCost, int, EngineConfig, Recorder]:
        """What serves a model that scores is made of; beside a rollout its iterations take longer."""
        outcome, cost = self.outcome, engine.crowded if beside else engine.cost
        recorder = Recorder(outcome.spans, step, call.name, placement.shared, outcome.stays, call.name)
        return self.env, placement.replicas(engine.tp), cost, engine.capacity_pages, engine.config, recorder

    def _judging(self) -> tuple[int, ...]:
        """GPUs of a judge that other calls work on too, while nothing is generated or scored."""
        plan, calls = self.what.plan, self.what.workflow.calls
        if self.what.judge is None:
            return ()
        own = {g for c in calls if c.kind == "reward" and not plan.of(c.name).shared for g in plan.of(c.name).gpus}
        return tuple(sorted(own & {g for c in calls if c.kind != "reward" for g in plan.of(c.name).gpus}))

    def _keep_for_judge(self, step: int) -> _Process[None]:
        """The judge has its GPUs from the start of generation, when its weights come, to the step's last score."""
        judge, calls = self.what.judge, [c.name for c in self.what.workflow.calls if c.kind == "reward"]
        if judge and judge.load_s:
            self.steps[step].judge_ready_at = self.env.now + judge.load_s
            recorder = Recorder(self.outcome.spans, step)
            recorder.add(self.judging, self.env.now, self.env.now + judge.load_s, calls[0])
        yield simpy.AllOf(self.env, [self.done[name, step] for name in calls])
        self.pool.release(self.judging)

    def _beside(self, placement: Placement, step: int) -> Rollout | None:
        """The step's rollout, if a call that begins now works on GPUs of it."""
        rollout = self.steps[step].rollout
        return rollout if placement.shared and rollout and not rollout.done.triggered else None

    def _judge(self, call: Call, step: int, beside: Rollout | None = None) -> InferenceServer | None:
        """A judge, of one step or of all. Beginning beside a rollout it slows that and what follows, and is slowed."""
        judge, placement = self.what.judge, self.what.plan.of(call.name)
        if judge is None:
            return None
        served = self._served(judge, call, step, placement, beside)
        service = InferenceServer(*served, self.what.cluster.node_of, beside.share if beside else None)
        self.judges.append((step, service))
        return service


def _add(parts_s: dict[str, float], parts: Parts) -> None:
    for name, seconds in parts:
        parts_s[name] = parts_s.get(name, 0.0) + seconds


def _streams(edges: Iterable[Edge]) -> bool:
    """Whether a call with these edges takes responses as they come."""
    return any(edge.grain == "sample" for edge in edges)


def _updating(workflow: Workflow) -> dict[str, set[str]]:
    """By call that gives weights to those that generate, these: syncs before them, else what trains the model."""
    found: dict[str, set[str]] = {}
    for call in workflow.generating:
        syncs = [name for name in workflow.beside(call.name)[0] if workflow.call(name).kind == "sync"]
        trains = [one.name for one in workflow.calls if one.kind == "train" and one.model == call.model]
        for name in syncs or trains:
            found.setdefault(name, set()).add(call.name)
    return found


def _end_of_prompt(samples: Sequence[Request], end: int) -> int:
    """Where the samples of the prompt end that is the last before `end`; those of a prompt stand side by side."""
    while 0 < end < len(samples) and samples[end].position == samples[end - 1].position:
        end += 1
    return end
