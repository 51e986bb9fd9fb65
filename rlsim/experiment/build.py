"""From a validated experiment to simulations: loads what it names and checks that it fits together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from rlsim import catalogue
from rlsim.cost.bound import GenerationBound
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.machine import Machine
from rlsim.errors import CatalogueError, ConfigError, unknown_name
from rlsim.experiment.rewards import TraceScoring
from rlsim.experiment.schema import Experiment
from rlsim.experiment.scorers import scorer_of, streamed_calls
from rlsim.experiment.site import Site
from rlsim.experiment.system import System
from rlsim.experiment.times import ExperimentTimes
from rlsim.experiment.workflows import workflow_of
from rlsim.hardware import Cluster, load_cluster
from rlsim.models import Model, load_model
from rlsim.reading import is_file
from rlsim.sim.batching import PromptFeed
from rlsim.sim.control import ControlContext, Prompt
from rlsim.sim.outcome import Outcome
from rlsim.sim.request import Request
from rlsim.sim.run import simulate
from rlsim.sim.service import ScoringEngine
from rlsim.sim.simulation import Simulation
from rlsim.trace import StepSampler, Trace, TraceMeta, make_trace, mix, read_trace
from rlsim.workflow import Workflow
from rlsim.workflow.memory import BatchSize


@contextmanager
def placing(shown: str, case: str) -> Iterator[None]:
    """Names that nothing has, in the block, are told with the experiment and the case that has them."""
    try:
        yield
    except CatalogueError as error:
        raise CatalogueError(f"{shown}: {f'case {case!r}: ' if case else ''}{error}") from None


@dataclass(frozen=True)
class Setup:
    """Everything that an experiment names, loaded. Raises `RlsimError`s that say what does not exist or fit."""

    experiment: Experiment
    cluster: Cluster
    model: Model
    calibration: Calibration
    trace: Trace
    trace_paths: tuple[Path, ...]
    models: Mapping[str, Model]  # by role: actor, reference, critic, reward
    judge_model: Model | None = None
    search: bool = (
        True  # whether plans may be searched for, which may take minutes; if not, that raises `SearchAheadError`
    )

    @classmethod
    def of(cls, experiment: Experiment, folder: Path, shown: str = "experiment") -> Setup:
        """Load what the experiment names; relative paths start at `folder`, the working directory or the catalogue."""
        named = experiment.trace.path or ()
        paths = tuple(find_trace(name, folder) for name in ((named,) if isinstance(named, str) else named))
        judge = experiment.workflow.reward.judge
        actor = find_model(experiment.model, folder)
        return cls(
            experiment,
            load_cluster(experiment.cluster, source=f"{shown}: cluster"),
            actor,
            load_calibration(beside(experiment.calibration, folder)),
            mix([read_trace(path) for path in paths]) if paths else _fixed_lengths(experiment),
            paths,
            _by_role(actor, {role: find_model(name, folder) for role, name in experiment.models.items()}),
            find_model(judge.model, folder) if judge else None,
        )

    @cached_property
    def scoring(self) -> TraceScoring:
        """What the trace says about rewards; nothing where a model scores."""
        spec = self.experiment.workflow.reward
        if not any(call.kind == "reward" for call in self.algorithm.calls):
            spec = spec.model_copy(update={"from_trace": False})
        return TraceScoring(self.trace, spec, self.experiment.trace.cap)

    @cached_property
    def _sites(self) -> dict[str, Site]:
        return {}

    def site(self, system: System | None = None) -> Site:
        """Where a system runs; systems that connect and place their calls and place the judge alike share it."""
        judge = system.judge if system and self.scoring.judged.any() else None
        placing = system.placing if system else None
        streaming = system.streaming if system else None
        workflow = self.workflow(system) if system else self.algorithm
        key = repr((judge, placing, streaming, workflow))
        return self._sites.setdefault(key, Site(self, workflow, judge, placing, streaming))

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
    def algorithm(self) -> Workflow:
        """The calls of a step, as no system has changed them yet."""
        return workflow_of(self.experiment.workflow, self.models)

    @property
    def launched_responses(self) -> int:
        """To each prompt: those that are trained on and those that they are compared with."""
        return self.experiment.workflow.responses + self.algorithm.baseline_responses

    @cached_property
    def batch(self) -> BatchSize:
        """What a step's calls work on."""
        experiment, spec, cap = self.experiment, self.experiment.workflow, self.experiment.trace.cap
        known = self.trace.frame.get("prompt_tokens")
        default = experiment.trace.default_prompt_tokens
        prompt = float(default) if known is None else float(known.fillna(default).mean())
        return BatchSize(
            spec.prompts * spec.responses,
            prompt + float(self.trace.response_tokens.clip(max=cap).mean()),
            self.longest_prompt + int(self.trace.response_tokens.clip(max=cap).max()),
            experiment.training.mini_batches,
            spec.prompts * self.algorithm.baseline_responses,
        )

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
            self.launched_responses,
            trace.cap,
            seed,
            default_prompt_tokens=trace.default_prompt_tokens,
        )

    def workflow(self, system: System) -> Workflow:
        """The calls of a step as a system connects them; raises `ConfigError` if it cannot."""
        training = self.experiment.training
        graph = system.rewired(self.algorithm)
        streamed = any(e.grain == "sample" and graph.call(e.target).kind == "train" for e in graph.edges)
        if streamed and graph.baseline_responses:
            raise ConfigError(f"{graph.name}: its training cannot take samples as they come")
        if graph.baseline_responses and system.batching.launches_its_own:
            raise ConfigError(
                f"{graph.name}: a batching that trains on the first responses to finish cannot tell the one of each "
                "prompt that the others are compared with"
            )
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

    def scorers(self, system: System) -> dict[str, ScoringEngine]:
        """The engines of the calls that take responses by the chunk; raises `CapacityError` if one does not fit."""
        graph, plan, streaming = self.workflow(system), self.site(system).plan, system.streaming
        longest = self.longest_prompt + self.experiment.trace.cap
        if streaming is None:
            return {}
        return {
            call.name: scorer_of(
                self.models[call.model],
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
        graph, plan, scorers = self.workflow(system), self.site(system).plan, self.scorers(system)
        system.control.setup(site.context)
        what = Simulation(
            workflow=graph,
            plan=plan,
            cluster=self.cluster,
            control=system.control,
            initial_tp=system.initial_tp(site.context),
            feed=PromptFeed(spec.prompts, self.launched_responses),
            requests=lambda prompts, samples, first_id: _requests(sampler, prompts, samples, first_id),
            costs=site.machine,
            times=ExperimentTimes(self.algorithm, site, experiment.training),
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
        )
        return simulate(what)


def _requests(sampler: StepSampler, prompts: Sequence[Prompt], samples: int, first_id: int) -> list[Request]:
    batch = sampler.draw([p.position for p in prompts], [p.first_sample for p in prompts], samples)
    columns = (batch.position, batch.prompt_tokens, batch.response_tokens, batch.row)
    rows = zip(*(c.tolist() for c in columns), strict=True)
    return [Request(first_id + i, at, prompt, length, row=row) for i, (at, prompt, length, row) in enumerate(rows)]


def _fixed_lengths(experiment: Experiment) -> Trace:
    """As many responses as a step takes, all of one length; one more of each prompt for a baseline (ReMax)."""
    spec, workflow = experiment.trace, experiment.workflow
    samples = workflow.responses + 1
    prompt, sample = np.divmod(np.arange(workflow.prompts * samples), samples)
    columns = {"prompt_id": prompt, "sample_id": sample, "prompt_tokens": spec.default_prompt_tokens}
    return make_trace(pd.DataFrame({**columns, "response_tokens": spec.fixed}), TraceMeta(name=f"fixed-{spec.fixed}"))


def _by_role(actor: Model, given: Mapping[str, Model]) -> dict[str, Model]:
    """The models of an experiment; a reference and a critic are as large as the actor unless they are given."""
    models = {"actor": actor, "reference": actor, "critic": actor, **given}
    scalar = {"scalar_head": True}
    return {r: m.model_copy(update=scalar) if r in ("critic", "reward") else m for r, m in models.items()}


def find_model(name: str, folder: Path) -> Model:
    """A model by its name in the catalogue, or its config.json (from the working directory or `folder`)."""
    return load_model(beside(name, folder))


def beside(name: str, folder: Path) -> str:
    """A name of the catalogue, or a file from the working directory or `folder`, which experiments name alike."""
    a_file = name.endswith((".json", ".yaml", ".yml"))
    return str(folder / name) if a_file and not is_file(Path(name)) and is_file(folder / name) else name


def find_trace(name: str, folder: Path) -> Path:
    """A trace by path (from `folder` or the working directory) or by its name in the catalogue."""
    path = Path(name)
    for candidate in (folder / path, path):
        if is_file(candidate):
            return candidate
    shipped = catalogue.names("traces", ".parquet")
    short = path.name.removesuffix(".parquet")
    if short in shipped and path.parent.name in ("", "traces"):
        return shipped[short]
    if path.suffix in (".parquet", ".csv", ".jsonl", ".gz") or len(path.parts) > 1:
        raise ConfigError(f"trace.path: {name}: no such file")
    raise unknown_name("trace", name, shipped)
