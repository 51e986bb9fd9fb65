"""From a validated experiment to simulations: loads what it names and checks that it fits together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlsim import catalogue
from rlsim.cost.bound import GenerationBound
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.machine import Machine
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import CapacityError, ConfigError, unknown_name
from rlsim.experiment.schema import Experiment
from rlsim.hardware import Cluster, load_cluster
from rlsim.models import Model, load_model
from rlsim.sim.control import ControlContext, RolloutControl
from rlsim.sim.request import Request
from rlsim.sim.responses import Responses
from rlsim.sim.simulation import Outcome, Simulation
from rlsim.trace import StepSampler, Trace, read_trace
from rlsim.workflow import Call, Placement, colocated, grpo


@dataclass(frozen=True)
class Setup:
    """Everything that an experiment names, loaded. Raises `RlsimError`s that say what does not exist or fit."""

    experiment: Experiment
    cluster: Cluster
    model: Model
    calibration: Calibration
    trace: Trace
    trace_path: Path

    @classmethod
    def of(cls, experiment: Experiment, folder: Path, shown: str = "experiment") -> Setup:
        """Load what the experiment names; relative paths start at `folder`, the working directory or the catalogue."""
        path = find_trace(experiment.trace.path, folder)
        model = experiment.model
        if model.endswith(".json") and not Path(model).exists() and (folder / model).exists():
            model = str(folder / model)
        return cls(
            experiment,
            load_cluster(experiment.cluster, source=f"{shown}: cluster"),
            load_model(model),
            load_calibration(experiment.calibration),
            read_trace(path),
            path,
        )

    @cached_property
    def machine(self) -> Machine:
        """Times and sizes; made once, since look-ups are cached in it."""
        experiment, engine, training = self.experiment, self.experiment.engine, self.experiment.training
        share = training.tp * training.pp * training.cp
        if self.cluster.gpus % share:
            raise ConfigError(
                f"training: tp × pp × cp = {share} does not divide the {self.cluster.gpus} GPUs of the cluster"
            )
        default_zero = 3 if training.backend == "fsdp" else 1
        train = TrainStrategy(
            dp=self.cluster.gpus // share,
            tp=training.tp,
            pp=training.pp,
            cp=training.cp,
            micro_batch_tokens=training.micro_batch_tokens,
            zero_stage=default_zero if training.zero_stage is None else training.zero_stage,
            recompute=training.recompute,
            offload=training.offload,
            sequence_parallel=training.tp > 1,
        )
        return Machine(
            self.model,
            self.cluster,
            self.calibration,
            train=train,
            inference=train,
            backend=training.backend,
            page_tokens=engine.page_tokens,
            max_batched_tokens=engine.max_num_batched_tokens,
            max_sequences=engine.max_num_seqs,
            memory_utilization=experiment.memory_utilization,
        )

    @cached_property
    def context(self) -> ControlContext:
        """What policies learn before a run."""
        experiment, workflow = self.experiment, self.experiment.workflow
        prompt_tokens = self._longest_prompt()
        feasible, infeasible = self.machine.feasible_tps(prompt_tokens + experiment.trace.cap)
        if not feasible:
            raise CapacityError(
                "no TP degree is feasible:\n" + "\n".join(f"TP{tp}: {why}" for tp, why in infeasible.items())
            )
        return ControlContext(
            costs=self.machine,
            feasible_tps=feasible,
            infeasible=infeasible,
            gpus_per_node=self.cluster.gpus_per_node,
            nodes=self.cluster.nodes,
            cap_tokens=experiment.trace.cap,
            page_tokens=experiment.engine.page_tokens,
            requests=workflow.prompts * workflow.responses,
            prompt_tokens=prompt_tokens,
        )

    def _longest_prompt(self) -> int:
        default = self.experiment.trace.default_prompt_tokens
        known = self.trace.frame.get("prompt_tokens")
        return default if known is None else int(known.fillna(default).max())

    @cached_property
    def bound(self) -> GenerationBound:
        """The generation stage at best."""
        steps = {tp: self.machine.step(tp) for tp in self.context.feasible_tps}
        return GenerationBound(
            steps, self.cluster.gpus, min(self.context.requests, self.experiment.engine.max_num_seqs)
        )

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

    def simulate(self, control: RolloutControl, sampler: StepSampler) -> Outcome:
        """One system on one seed's responses."""
        experiment, workflow = self.experiment, self.experiment.workflow
        graph = grpo(reference=workflow.reference, old_log_probs=workflow.old_log_probs)
        strategy = self.machine.train_strategy
        control.setup(self.context)
        return Simulation(
            workflow=graph,
            plan=colocated(graph, self.cluster, strategy, strategy),
            cluster=self.cluster,
            control=control,
            initial_tp=self.context.check_tp(control.initial_tp(self.context)),
            launch=lambda step: _requests(sampler, step),
            costs=self.machine,
            times=_Times(self),
            config=experiment.engine,
            cap_tokens=experiment.trace.cap,
            steps=workflow.steps,
            routing=experiment.routing,
        ).run()


class _Times:
    """The `CallTimes` of an experiment."""

    def __init__(self, setup: Setup) -> None:
        self._machine = setup.machine
        self._reward = setup.experiment.workflow.reward
        self._training = setup.experiment.training

    def parts(self, call: Call, placement: Placement, responses: Responses, rollout_tp: int) -> list[tuple[str, float]]:  # noqa: ARG002
        lengths = responses.total_tokens[responses.finished]  # what is incomplete is neither scored nor trained on
        if call.kind == "reward":
            rounds = -(-len(lengths) // self._reward.workers)
            return [("check", rounds * self._reward.time_per_response)]
        if call.kind == "sync":
            return [("weights", self._machine.sync_s(rollout_tp))]
        if call.kind == "train":
            time = self._machine.train_time(lengths, self._training.mini_batches, self._training.epochs)
        else:
            time = self._machine.inference_time(lengths)
        return [(name.removesuffix("_s"), value) for name, value in vars(time).items() if value]


def _requests(sampler: StepSampler, step: int) -> list[Request]:
    batch = sampler.step(step)
    columns = (batch.position, batch.prompt_tokens, batch.response_tokens)
    return [Request(i, *values) for i, values in enumerate(zip(*(c.tolist() for c in columns), strict=True))]


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
