"""How a run generates: what all ways have, and a rollout for each step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import simpy

from rlsim.base.hooks import misused
from rlsim.cost.transfer import IN_PLACE, SwitchWay
from rlsim.errors import PolicyError
from rlsim.sim.batching import Batching, LaunchCounts, StepBatch
from rlsim.sim.control import Controls, Launch, RolloutCosts, RolloutReport
from rlsim.sim.flow import batch_of
from rlsim.sim.outcome import RolloutSummary, SwitchRecord
from rlsim.sim.recorder import Recorder
from rlsim.sim.replica import ChunkListener
from rlsim.sim.request import Request
from rlsim.sim.rollout import Rollout
from rlsim.sim.simulation import Machine, StepState
from rlsim.sim.stage import GenerationStage, nobody
from rlsim.workflow.graph import Call
from rlsim.workflow.plan import Placement


class Generation:
    """What every way to generate has: the version of the weights, and how a rollout begins and is written down."""

    scores = False  # whether it has responses scored, before a step takes them

    def __init__(self, machine: Machine, costs: RolloutCosts, tp: int) -> None:
        self.version = 0  # of the rollout's weights: updates so far
        self.planned_tp = tp  # that the next rollout is to begin with
        self._costs = costs
        self._env, self._what, self._outcome, self._pool = machine.env, machine.what, machine.outcome, machine.pool
        self._machine, self._borrowing = machine, machine.borrowing
        self._noted = [0] * 7  # what `_summary` counts of the rollout, so far

    def _rollout(
        self,
        call: Call,
        step: int,
        mesh: Sequence[tuple[int, ...]],
        numbers: Iterator[int] | None = None,
        **how: Any,
    ) -> Rollout:
        """Begin one, with these fields of its stage beside those that are the same for all."""
        what, outcome, self._noted = self._what, self._outcome, [0] * 7
        stage = GenerationStage(
            mesh=mesh,
            costs=self._costs,
            config=what.config,
            cap_tokens=what.cap_tokens,
            routing=what.routing,
            backlog_s=self._machine.backlog_s,
            borrowing=self._borrowing,
            environments=self._machine.environments,
            recorder=Recorder(outcome.spans, step, stays=outcome.stays, call=call.name, numbers=numbers),
            **how,
        )
        return Rollout(self._env, stage)

    def _summary(
        self, step: int, tp: int, rollout: Rollout, launches: LaunchCounts, waiting: int, released_gpu_s: float
    ) -> RolloutSummary:
        """What came to pass in a rollout since the last summary; its switches are noted down."""
        schedulers = [replica.scheduler for replica in rollout.replicas]
        counted = [sum(map(attrgetter(of), schedulers)) for of in ("preemptions", "hit_tokens", "loaded_tokens")]
        so_far = [*counted, rollout.moved, rollout.released, rollout.aborted, len(rollout.switches)]
        preemptions, hits, loaded, *acted, _ = (now - then for now, then in zip(so_far, self._noted, strict=True))
        self._outcome.switches += [SwitchRecord(step, *one) for one in rollout.switches[self._noted[-1] :]]
        self._noted = so_far
        peak = max(replica.take_peak() for replica in rollout.replicas)
        borrowed_gpu_s = self._borrowing.take_gpu_s() if self._borrowing else 0.0
        counts = (launches, waiting, released_gpu_s, hits, loaded, borrowed_gpu_s, *acted)
        return RolloutSummary(step, tp, preemptions, peak, *counts)


class StepGeneration(Generation):
    """A rollout for each step: what it launches, the layout it starts with, what becomes of its responses."""

    def __init__(self, machine: Machine, costs: RolloutCosts, tp: int) -> None:
        super().__init__(machine, costs, tp)
        what = self._what
        self._tp = tp  # that the last one began with
        self._last_tp: dict[int, int] = {}  # by node, at the end of the last rollout
        self._ways: dict[int, SwitchWay] = {}  # by node: how it switched last
        self._used_tps: dict[int, set[int]] = {}
        #: Calls whose responses rewards take as they come.
        self._streaming = {
            e.source
            for e in what.workflow.edges
            if e.grain == "sample" and what.workflow.call(e.target).kind == "reward"
        }
        #: By prompt position: responses that go on in a later step, and the version of the weights of theirs.
        self._paused: dict[int, tuple[int, list[Request]]] = {}

    def take_given(self, states: Sequence[StepState]) -> None:
        """Responses that nobody generates: they are there from the start."""
        for step, state in enumerate(states):
            state.version = step
            for request in self._launched(state, Batching().launch(self._what.feed), ""):
                request.generated, request.finished_at = request.response_tokens, self._env.now
            launches = LaunchCounts("", len(state.requests), 0, 0)
            self._outcome.rollouts.append(RolloutSummary(step, 0, 0, 0, launches, 0, 0.0))

    def run(
        self, call: Call, step: int, state: StepState, placement: Placement
    ) -> Generator[simpy.Event, Any, set[int]]:
        """Run the generation stage; returns the GPUs that it gave up before its end."""
        what, flow = self._what, state.flow
        mesh = placement.rollout_mesh(what.cluster, self.planned_tp)
        trained = any(one.kind == "train" and one.model == call.model for one in what.workflow.calls)
        state.version = version = self.version if trained else state.trained_version  # what nobody trains is never old
        accept = partial(flow.deliver, batch_of(call.name))
        batch = state.batch = StepBatch(what.batching, what.feed, accept, version, self._share(call, state))
        requests = self._launched(state, batch.first, call.name, call.baselines)
        resumed = [r for r in requests if r.resumed] if batch.first.resume else []
        generating = [r for r in resumed if not r.finished]
        yield from self._lay_out(step, mesh, len(requests) - len(resumed) + len(generating))
        new = [r for r in requests if not r.resumed] if resumed else requests

        def launch(more: Launch) -> Sequence[Request]:
            if more.resume:
                raise PolicyError(f"step {step}: only the first launch of a step may resume what was kept")
            return self._launched(state, more, call.name, call.baselines)

        def finished(responses: Sequence[Request]) -> None:
            batch.finished(responses)
            if call.name in self._streaming:
                self._offer(call, state, responses)

        def drained() -> None:
            self._offer(call, state, [r for r in state.requests if r.finished])

        def released(gpus: Iterable[int]) -> None:
            self._pool.release(gpus)
            flow.fetch()

        listens = call.name in self._streaming or flow.wants(batch_of(call.name)) or not batch.certain
        rollout = state.rollout = self._rollout(
            call,
            step,
            mesh,
            state.replicas,
            requests=new,
            tp=self._tp,
            control=what.control if batch.certain else Controls([batch, what.control]),
            label=batch.first.label,
            resumed=generating,
            used_tps=self._used_tps,
            version=version,
            open=batch.open,
            launcher=launch,
            on_finish=finished if listens else None,
            on_abort=batch.lost if what.environment and what.environment.on_failure != "repeat" else nobody,
            on_drained=drained if what.batching.needs_rewards else nobody,
            on_release=released,
            crowded=what.crowded,
            chunks=self._chunks(call, state),
            micro_batches=placement.micro_batches,
        )
        start = state.generates_at = self._env.now
        if state.chunk_tokens and (there := [(r, r.generated) for r in generating if r.generated]):
            flow.deliver_chunks(call.name, there)
        if len(generating) < len(resumed):
            finished([r for r in resumed if r.finished])
            rollout.ask()
        yield rollout.done
        if self._borrowing:
            self._borrowing.end()
        launches = batch.close()
        if not batch.certain:
            state.paused = frozenset(r.id for kept in batch.paused.values() for r in kept)
            self._paused |= {at: (state.version, kept) for at, kept in batch.paused.items()}
            for request in state.requests:
                request.aborted = not request.finished and request.id not in state.paused
        if flow.wants(call.name):
            self._offer(call, state, state.trained_on([call.name]))
        flow.close(call.name)
        flow.close(batch_of(call.name))
        if len(what.workflow.generating) > 1:  # another call may generate with other weights, or have done so
            for request in state.made[call.name]:
                request.end_run(version, request.generated)
        self._note(step, start, rollout, launches)
        rollout.close()
        return set(rollout.released_at)

    def _share(self, call: Call, state: StepState) -> Launch | None:
        """What a call generates of a step's launch; None: all of it."""
        workflow, feed = self._what.workflow, self._what.feed
        if len(workflow.generating) == 1:
            return None
        whole = state.launch = state.launch or self._what.batching.launcher.launch(feed)
        own = workflow.samples(call.name, feed.responses - workflow.baseline_responses)
        prompts = [prompt._replace(first_sample=prompt.first_sample + own.start) for prompt in whole.prompts]
        return replace(whole, prompts=tuple(prompts), samples=len(own))

    def _launched(self, state: StepState, launch: Launch, call: str, baselines: int = 0) -> list[Request]:
        """The requests of a call's launch, told to the step's batch: new ones, then those that go on."""
        requests = self._what.requests(launch.prompts, launch.samples, state.ids)
        if baselines:  # the last of each prompt's
            for i, request in enumerate(requests):
                request.baseline = i % launch.samples >= launch.samples - baselines
        for prompt in launch.resume:
            if prompt.position not in self._paused:
                what = f"the prompt at position {prompt.position} was not kept: it cannot be resumed"
                raise misused(self._what.batching.launcher, "launch", what)
            version, kept = self._paused.pop(prompt.position)
            requests += [r.resume(state.ids + len(requests) + i, version) for i, r in enumerate(kept)]
        state.ids += len(requests)
        state.requests += requests
        state.made.setdefault(call, []).extend(requests)
        if state.batch:
            state.batch.launched(requests, launch)
        return requests

    def _chunks(self, call: Call, state: StepState) -> ChunkListener | None:
        """Who takes responses by the chunk; None if nobody does."""
        planned, calls = state.flow.chunked(call.name)
        if not planned:
            return None
        state.chunk_tokens = self._what.control.chunk_tokens(planned)
        handover_s = sum(self._what.scorers[name].handover_s for name in calls)

        def deliver(chunks: Sequence[tuple[Request, int]]) -> None:
            state.flow.deliver_chunks(call.name, [chunk for chunk in chunks if not chunk[0].parent])

        return ChunkListener(state.chunk_tokens, handover_s, deliver)

    def _offer(self, call: Call, state: StepState, responses: Sequence[Request]) -> None:
        """Give reward calls those of these responses that they have not seen."""
        if not state.flow.wants(call.name):
            return
        new = [request for request in responses if request.id not in state.offered]
        state.offered.update(request.id for request in new)
        if new:
            state.flow.deliver(call.name, new)

    def _note(self, step: int, start: float, rollout: Rollout, launches: LaunchCounts) -> None:
        """Write down how a rollout went, and let the control choose the next one's layout."""
        end = self._env.now
        self._last_tp.update((node, to_tp) for _, node, _, to_tp, _ in rollout.switches)
        self._ways |= {node.number: node.way for node in rollout.nodes if node.way}
        released_gpu_s = sum(end - at for at in rollout.released_at.values())
        waiting = self._what.batching.waiting()
        summary = self._summary(step, self._tp, rollout, launches, waiting, released_gpu_s)
        self._outcome.rollouts.append(summary)
        lengths = tuple(r.generated for r in rollout.requests if r.finished)
        loads = tuple((r.prompt_tokens, r.generated - r.resumed_tokens) for r in rollout.requests)
        coming = self._what.batching.launcher.upcoming(self._what.feed)
        tps = self._what.feasible_tps
        report = RolloutReport(
            step, self._tp, end - start, summary.preemptions, lengths, launches.label, coming, loads, tps
        )
        wanted = self._what.control.next_tp(report)
        self.planned_tp = self._tp if wanted is None else wanted

    def _lay_out(self, step: int, mesh: Sequence[tuple[int, ...]], requests: int) -> Generator[simpy.Event, Any, None]:
        """Pause the nodes that are not in the layout which the step starts with; the weight sync brought the weights.

        Going back to the layout of the step before is free if its decode graphs were kept; a newly planned one is not,
        nor is one whose engine was ended.
        """
        what, start, longest_s = self._what, self._env.now, 0.0
        planned, self._tp = self.planned_tp != self._tp, self.planned_tp
        for node, gpus in enumerate(mesh):
            last_tp = self._last_tp.get(node, self._tp)
            way = self._ways.get(node, IN_PLACE)
            if last_tp != self._tp and (planned or way.restart or not what.config.first_layout_kept):
                first_use = self._tp not in self._used_tps.get(node, ())
                share = -(-requests * len(gpus) // sum(map(len, mesh)))
                cost = self._costs.switch(len(gpus), last_tp, self._tp, (), share, "recompute", first_use, way)
                cost = replace(cost, weights_s=0.0, peak_bytes=0.0)
                self._outcome.switches.append(SwitchRecord(step, start, node, last_tp, self._tp, cost))
                Recorder(self._outcome.spans, step).add(gpus, start, start + cost.total_s, "switch", self._tp)
                longest_s = max(longest_s, cost.total_s)
        self._last_tp = dict.fromkeys(range(len(mesh)), self._tp)
        yield self._env.timeout(longest_s)
