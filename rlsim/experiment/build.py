"""From a validated experiment to simulations: loads what it names and checks that it fits together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlsim import catalogue
from rlsim.cost.bound import GenerationBound
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.machine import Machine
from rlsim.cost.train import TrainTime
from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.rewards import TraceScoring
from rlsim.experiment.schema import Experiment
from rlsim.experiment.scorers import beside_generation, scorer_of, streamed_calls
from rlsim.experiment.site import Site
from rlsim.experiment.system import System
from rlsim.hardware import Cluster, load_cluster
from rlsim.models import Model, load_model
from rlsim.sim.batching import PromptFeed
from rlsim.sim.control import ControlContext, Prompt
from rlsim.sim.elastic import Pieces
from rlsim.sim.request import Request
from rlsim.sim.responses import Responses
from rlsim.sim.simulation import Judge, Outcome, Simulation
from rlsim.trace import StepSampler, Trace, mix, read_trace
from rlsim.workflow import Call, Placement, Plan, Workflow, colocated, grpo


@dataclass(frozen=True)
class Setup:
    """Everything that an experiment names, loaded. Raises `RlsimError`s that say what does not exist or fit."""

    experiment: Experiment
    cluster: Cluster
    model: Model
    calibration: Calibration
    trace: Trace
    trace_paths: tuple[Path, ...]
    judge_model: Model | None = None

    @classmethod
    def of(cls, experiment: Experiment, folder: Path, shown: str = "experiment") -> Setup:
        """Load what the experiment names; relative paths start at `folder`, the working directory or the catalogue."""
        named = experiment.trace.path
        paths = tuple(find_trace(name, folder) for name in ((named,) if isinstance(named, str) else named))
        judge = experiment.workflow.reward.judge
        return cls(
            experiment,
            load_cluster(experiment.cluster, source=f"{shown}: cluster"),
            _find_model(experiment.model, folder),
            load_calibration(experiment.calibration),
            mix([read_trace(path) for path in paths]),
            paths,
            _find_model(judge.model, folder) if judge else None,
        )

    @cached_property
    def scoring(self) -> TraceScoring:
        """What the trace says about rewards."""
        return TraceScoring(self.trace, self.experiment.workflow.reward, self.experiment.trace.cap)

    @cached_property
    def _sites(self) -> dict[str, Site]:
        return {}

    def site(self, system: System | None = None) -> Site:
        """Where a system runs; systems that place the judge alike share it."""
        judge = system.judge if system and self.scoring.judged.any() else None
        streaming = system.streaming if system else None
        streamed = streamed_calls(self.workflow(system)) if system and streaming else ()
        return self._sites.setdefault(repr((judge, streaming)), Site(self, judge, streaming, streamed))

    def model_of(self, call: Call) -> Model:  # noqa: ARG002 - one model for all of them, so far
        """The model that a call runs."""
        return self.model

    @property
    def context(self) -> ControlContext:
        """What policies learn before a run, where nothing is colocated."""
        return self.site().context

    @property
    def machine(self) -> Machine:
        """Times and sizes, where nothing is colocated."""
        return self.site().machine

    @property
    def bound(self) -> GenerationBound:
        """The generation stage at best, where nothing is colocated."""
        return self.site().bound

    @cached_property
    def longest_prompt(self) -> int:
        """The longest prompt of the trace (tokens)."""
        default = self.experiment.trace.default_prompt_tokens
        known = self.trace.frame.get("prompt_tokens")
        return default if known is None else int(known.fillna(default).max())

    @cached_property
    def judged_tokens(self) -> int:
        """Mean length of prompt and capped response together, of those that a judge reads (tokens)."""
        judged, default = self.scoring.judged, self.experiment.trace.default_prompt_tokens
        known = self.trace.frame.get("prompt_tokens")
        prompt = float(default) if known is None else float(known[judged].fillna(default).mean())
        return round(prompt + float(self.trace.response_tokens[judged].clip(max=self.experiment.trace.cap).mean()))

    @cached_property
    def longest_answer(self) -> int:
        """The longest answer of a judge (tokens)."""
        known = self.trace.frame.get("judge_tokens")
        return 0 if known is None else int(known.fillna(0).max())

    def sampler(self, seed: int) -> StepSampler:
        """The responses of every step under one seed; the same for every system."""
        workflow, trace = self.experiment.workflow, self.experiment.trace
        return StepSampler(
            self.trace,
            workflow.prompts,
            workflow.responses,
            trace.cap,
            seed,
            default_prompt_tokens=trace.default_prompt_tokens,
        )

    def workflow(self, system: System) -> Workflow:
        """The calls of a step as a system connects them; raises `ConfigError` if it cannot."""
        spec, training = self.experiment.workflow, self.experiment.training
        graph = system.rewired(grpo(reference=spec.reference, old_log_probs=spec.old_log_probs))
        streamed = any(e.grain == "sample" and graph.call(e.target).kind == "train" for e in graph.edges)
        if streamed and (training.mini_batches > 1 or training.epochs > 1):
            raise ConfigError(
                "training on samples as they come makes one update a step; it needs training.mini_batches: 1 and "
                f"training.epochs: 1 (got {training.mini_batches} and {training.epochs})"
            )
        if system.batching.needs_rewards and not self.scoring.says_rewards:
            raise ConfigError(
                f"trace {self.trace.meta.name} has neither the column reward nor correct, which decide what is launched"
            )
        return graph

    def plan(self, system: System) -> Plan:
        """The GPUs of every call."""
        graph, site = self.workflow(system), self.site(system)
        strategy = site.machine.train_strategy
        return beside_generation(colocated(graph, site.gpus, strategy, strategy, site.reward_placement), graph)

    def scorers(self, system: System) -> dict[str, Judge]:
        """The engines of the calls that take responses by the chunk; raises `CapacityError` if one does not fit."""
        graph, plan, streaming = self.workflow(system), self.plan(system), system.streaming
        longest = self.longest_prompt + self.experiment.trace.cap
        if streaming is None:
            return {}
        return {
            call.name: scorer_of(
                self.model_of(call),
                plan.of(call.name),
                streaming,
                self.experiment,
                self.cluster,
                self.calibration,
                longest,
            )
            for call in streamed_calls(graph)
        }

    def simulate(self, system: System, sampler: StepSampler) -> Outcome:
        """One system on one seed's responses."""
        experiment, spec, site = self.experiment, self.experiment.workflow, self.site(system)
        graph, plan, scorers = self.workflow(system), self.plan(system), self.scorers(system)
        system.control.setup(site.context)
        return Simulation(
            workflow=graph,
            plan=plan,
            cluster=self.cluster,
            control=system.control,
            initial_tp=site.context.check_tp(system.layout.initial_tp(site.context)),
            feed=PromptFeed(spec.prompts, spec.responses),
            requests=lambda prompts, samples, first_id: _requests(sampler, prompts, samples, first_id),
            costs=site.machine,
            times=_Times(self, site),
            scoring=self.scoring,
            config=experiment.engine,
            cap_tokens=experiment.trace.cap,
            steps=spec.steps,
            batching=system.batching,
            reward=system.reward,
            judge=site.judge,
            scorers=scorers,
            crowded=site.crowded if any(placement.shared for placement in plan.placements.values()) else None,
            routing=experiment.routing,
        ).run()


class _Times:
    """The `CallTimes` of an experiment."""

    def __init__(self, setup: Setup, site: Site) -> None:
        self._machine = site.machine
        self._training = setup.experiment.training

    def parts(self, call: Call, placement: Placement, responses: Responses, rollout_tp: int) -> list[tuple[str, float]]:  # noqa: ARG002
        lengths = responses.total_tokens[responses.trained]
        if call.kind == "sync":
            return [("weights", self._machine.sync_s(rollout_tp))]
        if call.kind == "train":
            time = self._machine.train_time(lengths, self._training.mini_batches, self._training.epochs)
        else:
            time = self._machine.inference_time(lengths)
        return _named(time)

    def pieces(self, call: Call) -> Pieces:
        machine = self._machine
        strategy = machine.train_strategy
        # Every part fills and drains the pipeline: with several times as many micro-batches as stages that is little.
        tokens = strategy.micro_batch_tokens * (1 if strategy.pp == 1 else 4 * strategy.pp)
        train = call.kind == "train"
        load_s = machine.load_s(backward=train)
        finish = [*(_named(machine.update_time()) if train else ()), *([("offload", load_s)] if load_s else ())]
        return Pieces(lambda lengths: _named(machine.part_time(lengths, backward=train)), tokens, load_s, finish)


def _named(time: TrainTime) -> list[tuple[str, float]]:
    return [(name.removesuffix("_s"), value) for name, value in vars(time).items() if value]


def _requests(sampler: StepSampler, prompts: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
    batch = sampler.draw([p.position for p in prompts], [p.first_sample for p in prompts], samples)
    columns = (batch.position, batch.prompt_tokens, batch.response_tokens, batch.row)
    rows = zip(*(c.tolist() for c in columns), strict=True)
    return [Request(first_id + i, at, prompt, length, row=row) for i, (at, prompt, length, row) in enumerate(rows)]


def _find_model(name: str, folder: Path) -> Model:
    """A model by its name in the catalogue, or its config.json (from the working directory or `folder`)."""
    if name.endswith(".json") and not Path(name).exists() and (folder / name).exists():
        name = str(folder / name)
    return load_model(name)


def find_trace(name: str, folder: Path) -> Path:
    """A trace by path (from `folder` or the working directory) or by its name in the catalogue."""
    path = Path(name)
    for candidate in (folder / path, path):
        if candidate.is_file():
            return candidate
    shipped = catalogue.names("traces", ".parquet")
    short = path.name.removesuffix(".parquet")
    if short in shipped and path.parent.name in ("", "traces"):
        return shipped[short]
    if path.suffix in (".parquet", ".csv", ".jsonl", ".gz") or len(path.parts) > 1:
        raise ConfigError(f"trace.path: {name}: no such file")
    raise unknown_name("trace", name, shipped)
