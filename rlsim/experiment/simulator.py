"""Runs the systems of an experiment: connects their calls, says where these run, and simulates."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from rlsim.base.refusals import refuse
from rlsim.base.usercode import blamed
from rlsim.cost.speculation import Speculation
from rlsim.cost.step import Lookups
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.engines import scorer_of, streamed_calls
from rlsim.experiment.frames import Frames, check_steps, frames_of
from rlsim.experiment.placed import PlacedExperiment, SearchAheadError
from rlsim.experiment.planning import PlanSpace
from rlsim.experiment.refusals import check_calls, endless
from rlsim.experiment.steadiness import Window
from rlsim.experiment.systems import System, SystemSpec
from rlsim.experiment.times import ExperimentTimes, check_elastic, check_hybrid, hybrid_of
from rlsim.policies.parts import PlanSearch
from rlsim.sim.batching import PromptFeed
from rlsim.sim.continuous import Continuous
from rlsim.sim.control import Prompt, RolloutCosts, asked
from rlsim.sim.drawn import AcceptanceDraws
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import Request
from rlsim.sim.run import simulate
from rlsim.sim.server import RewardModelEngine
from rlsim.sim.simulation import Simulation
from rlsim.trace import StepSampler
from rlsim.workflow import Plan, Workflow
from rlsim.workflow.memory import MARGIN
from rlsim.workflow.search import Budget

#: What of a control is about the replicas of one engine.
_DECIDING = ("on_finish", "on_timer", "next_tp", "dispatch")


class Simulator:
    """Runs systems on one loaded experiment.

    `search`: whether plans may be searched for, which may take minutes; if not, a system that needs one raises
    `rlsim.experiment.placed.SearchAheadError`.
    """

    def __init__(self, loaded: LoadedExperiment, *, search: bool = True) -> None:
        self.loaded, self.search = loaded, search
        self.found: dict[tuple[Any, ...], Plan] = {}  # plans, none searched for twice; others may be put here
        self.sampler = cache(loaded.sampler)
        self._placed: dict[str, PlacedExperiment] = {}

    def workflow(self, system: System) -> Workflow:
        """The calls of a step as a system connects them; raises `ConfigError` if it cannot."""
        graph = system.rewired(self.loaded.algorithm)
        check_calls(self.loaded, system, graph)
        return graph

    def overlap(self, system: System) -> int:
        """Steps that may run beside another, or that generation may be ahead of training."""
        launcher = system.batching.launcher
        return max(self.workflow(system).overlap, launcher.ahead if isinstance(launcher, Continuous) else 0)

    def window(self, system: System) -> Window:
        """The steps of a system that means count; raises `ConfigError` if a warm-up leaves none."""
        workflow = self.loaded.experiment.workflow
        least_tokens = self.loaded.longest_response if workflow.steps_at_cap else 0
        window = Window(self.workflow(system).overlap, workflow.warmup, least_tokens)
        window.check(workflow.steps)
        return window

    def check_all(self, spec: SystemSpec) -> None:
        """Raises `RlsimError` if a system, or one that it stands for, cannot run or does not fit.

        `SearchAheadError` if that depends on a plan and none is to be searched for; before, its parts are made.
        """
        with blamed(spec.shown):
            for alternative, _ in spec.alternatives(self.placed(spec.make()).context):
                self.check(alternative.make())

    def check_free(self, spec: SystemSpec, *, worst: bool = False) -> None:
        """As `check_all`; `CapacityError` also where a plan, at the `worst`, leaves less than `MARGIN` of a GPU."""
        self.check_all(spec)
        placed = self.placed(spec.make())
        placed.check(placed.plan, worst=worst, margin=MARGIN)

    def check(self, system: System) -> None:
        """Raises `RlsimError` if the system cannot run or does not fit."""
        placed = self.placed(system)
        for call in placed.workflow.calls:
            shares = call.kind not in ("generate", "sync") and placed.shares_generation(call.name)
            parts = placed.generation.micro_batches if call.kind == "generate" else 1
            known = {"workflow": placed.workflow, "training": self.loaded.experiment.training, "micro_batches": parts}
            refuse("beside", call=call, endless=endless(system), shares_gpus=shares, **known)
        _ = placed.judge  # raises if it does not fit
        self.scorers(system)
        system.control.setup(placed.context)
        tp = system.initial_tp(placed.context)
        self._others(system)
        check_elastic(placed, tp)
        check_hybrid(placed, system, tp)

    def placed(self, system: System | None = None) -> PlacedExperiment:
        """Where a system runs; systems that connect and place their calls and place the judge alike share it.

        Without a system: where the algorithm's calls run if nothing is placed or streamed.
        """
        workflow = self.loaded.algorithm if system is None else self.workflow(system)
        judge = system.judge if system and self.loaded.scoring.judged.any() else None
        placing, streaming = (system.placing, system.streaming) if system else (None, None)
        key = repr((judge, placing, streaming, workflow))
        if key not in self._placed:
            self._placed[key] = PlacedExperiment(self.loaded, workflow, judge, placing, streaming, planner=self._plan)
        return self._placed[key]

    def _plan(self, placed: PlacedExperiment, how: PlanSearch) -> Plan:
        key = (repr(placed.workflow), *how)
        if key not in self.found:
            if not self.search:
                raise SearchAheadError
            plans = PlanSpace(placed, how.pipelined_generation, how.context_parallel, how.most_plans)
            space, found = plans.search(how.method, Budget(evaluations=how.evaluations), seed=how.seed)
            self.found[key] = space.plan(found.plan)
        return self.found[key]

    def lookups(self) -> Lookups:
        """The shapes whose costs were looked up so far, wherever systems ran."""
        return Lookups().merge(placed.lookups() for placed in self._placed.values())

    def scorers(self, system: System) -> dict[str, RewardModelEngine]:
        """The engines of the calls that take responses by the chunk; raises `CapacityError` if one does not fit."""
        placed, streaming = self.placed(system), system.streaming
        if streaming is None:
            return {}
        return {
            call.name: scorer_of(self.loaded, call, placed.plan.of(call.name), streaming)
            for call in streamed_calls(placed.workflow)
        }

    def tables(self, spec: SystemSpec, seed: int, *, bounded: bool = True) -> Frames:
        """The tables of one run, without the columns that name it; the bound of generation only if `bounded`."""
        system, sampler, collected = spec.make(), self.sampler(seed), gc.get_threshold()
        # A run makes many small objects and no cycles worth looking for, which takes a fifth of its time.
        gc.set_threshold(max(collected[0], 1_000_000), *collected[1:])
        try:
            with blamed(spec.shown):
                outcome = self.simulate(system, sampler)
            placed = self.placed(system)
            largest = max([rollout.initial_tp for rollout in outcome.rollouts], default=0)
            together = math.inf if endless(system) else max(map(len, outcome.responses))
            bound = placed.bound(largest, together) if bounded else None
            sides = placed.gpus_of("generate"), placed.gpus_of("train")
            frames = frames_of(outcome, sampler, bound, self.loaded.cluster.gpus, self.window(system), *sides)
        finally:
            gc.set_threshold(*collected)
        check_steps(frames, spec.shown)
        return frames

    def simulate(self, system: System, sampler: StepSampler) -> Outcome:
        loaded, placed = self.loaded, self.placed(system)
        experiment, spec = loaded.experiment, loaded.experiment.workflow
        context = replace(placed.context, seed=sampler.seed)
        system.control.setup(context)
        tp = system.initial_tp(context)
        what = Simulation(
            workflow=placed.workflow,
            plan=placed.plan,
            cluster=loaded.cluster,
            control=system.control,
            initial_tp=tp,
            feasible_tps=context.feasible_tps,
            feed=PromptFeed(spec.prompts, loaded.launched_responses),
            requests=_Requests(sampler, system.control.length_error, experiment.engine.speculation),
            costs=placed.rollout_costs,
            times=ExperimentTimes(placed),
            scoring=loaded.scoring,
            config=loaded.engine,
            cap_tokens=loaded.longest_response,
            steps=spec.steps,
            batching=system.batching,
            reward=system.reward,
            judge=placed.judge,
            scorers=self.scorers(system),
            crowded=placed.crowded if any(placement.shared for placement in placed.plan.placements.values()) else None,
            routing=experiment.routing,
            hybrid=hybrid_of(placed, tp),
            environment=loaded.environment,
            seed=sampler.seed,
            others=self._others(system),
        )
        return simulate(what)

    def _others(self, system: System) -> dict[str, tuple[RolloutCosts, int]]:
        """The engines of further calls that generate; raises `RlsimError` if one does not fit, or is decided about."""
        engines = self.placed(system).engines[1:]
        apart = any(one.generation != self.placed(system).generation for one in engines)
        deciding = " and ".join(type(part).__name__ for part in asked(system.control, *_DECIDING))
        refuse("engines", graph=self.workflow(system), apart=apart, deciding=deciding)
        tps = [one.context.replica_gpus or system.initial_tp(one.context) for one in engines]
        return {one.generating: (one.rollout_costs, tp) for one, tp in zip(engines, tps, strict=True)}


class _Requests:
    """Makes the requests of a launch from a trace, with predicted lengths where there is a predictor."""

    def __init__(self, sampler: StepSampler, length_error: float | None, speculation: Speculation | None) -> None:
        self._sampler, self._error, self._drafts = sampler, length_error, speculation
        self._made: Counter[int] = Counter()  # by position
        self._rng = np.random.default_rng(sampler.seed)

    def __call__(self, prompts: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
        batch = self._sampler.draw([p.position for p in prompts], [p.first_sample for p in prompts], samples)
        columns = (batch.position, batch.prompt_tokens, batch.response_tokens, batch.row)
        rows = zip(*(c.tolist() for c in columns), strict=True)
        calls = self._sampler.tool_calls
        made = [
            Request(first_id + i, at, prompt, length, row=row, tool_calls=() if calls is None else calls[row])
            for i, (at, prompt, length, row) in enumerate(rows)
        ]
        if self._drafts is not None and self._drafts.drawn:
            for request in made:
                seed = self._sampler.seed, request.position, self._made[request.position]
                request.acceptance = AcceptanceDraws(seed, self._drafts.correlation)
                self._made[request.position] += 1
        if self._error is not None:
            factors = np.exp(self._error * self._rng.standard_normal(len(made)))
            for request, factor in zip(made, factors.tolist(), strict=True):
                request.predicted_tokens = request.response_tokens * factor
        return made
