"""Everything that an experiment names, loaded, and what follows from it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlsim.base import catalogue
from rlsim.base.reading import is_file, shipped
from rlsim.base.refusals import refuse, said
from rlsim.cost.calibration import Calibration, carried_to, load_calibration
from rlsim.cost.layout import ReplicaLayout
from rlsim.cost.memory import kv_shape
from rlsim.cost.roofline import for_model
from rlsim.cost.speculation import Drafts
from rlsim.cost.step import PLAIN_KV, Conditions
from rlsim.errors import CalibrationError, ConfigError, about, unknown_name
from rlsim.experiment.schema import Experiment, TraceSpec
from rlsim.experiment.workflows import TraceScoring, workflow_of
from rlsim.models.hardware import AnyCluster, Cluster, MixedCluster, load_any_cluster, node_types
from rlsim.models.model import Model, load_model
from rlsim.sim.environment import EnvironmentConfig
from rlsim.sim.request import EngineConfig
from rlsim.trace import StepSampler, Trace, TraceMeta, limits, make_trace, mix, read_trace
from rlsim.trace.turns import response_tokens, scale_turns
from rlsim.workflow import Workflow
from rlsim.workflow.memory import BatchSize

#: Steps whose micro-batches must fit, where the limits count sequences.
CHECKED = 8


class Kind(NamedTuple):
    """What costs of GPUs of one kind follow from: the cluster as they know it, and their calibration."""

    cluster: Cluster
    calibration: Calibration


@dataclass(frozen=True)
class LoadedExperiment:
    """Everything that an experiment names, loaded. Raises `RlsimError`s that say what does not exist or fit."""

    experiment: Experiment
    cluster: AnyCluster
    model: Model  # as the rollout engine serves it
    calibrations: Mapping[str, Calibration]  # by GPU
    trace: Trace
    trace_paths: tuple[Path, ...]
    models: Mapping[str, Model]  # as they are trained, by role: actor, reference, critic, reward
    judge_model: Model | None
    trace_note: str  # of prompts that are left out, if any
    draft_model: Model | None  # of the rollout's speculation
    served: Mapping[str, Model] = field(default_factory=dict)  # those that generate, as engines serve them, by role

    @classmethod
    def of(cls, experiment: Experiment, folder: Path, label: str = "experiment") -> LoadedExperiment:
        """Load what the experiment names; relative paths start at `folder`, the working directory or the catalogue."""
        named = experiment.trace.path or ()
        paths = tuple(find_trace(name, folder) for name in ((named,) if isinstance(named, str) else named))
        judge = experiment.workflow.reward.judge
        actor = find_model(experiment.model, folder)  # a reference and a critic are as large unless they are given
        models = dict.fromkeys(("actor", "reference", "critic"), actor)
        models |= {role: find_model(name, folder) for role, name in experiment.models.items()}
        cluster = load_any_cluster(experiment.cluster, source=f"{label}: cluster")
        cluster = cluster.joined_at(experiment.costs.network, experiment.costs.link)
        lengths = mix([read_trace(path) for path in paths]) if paths else _fixed_lengths(experiment)
        trace, note = _with_room(_scaled(lengths, experiment.trace), experiment.trace, label)
        loaded = cls(
            experiment,
            cluster,
            actor,
            _calibrations(experiment, cluster, folder, f"{label}: calibration"),
            trace,
            paths,
            {role: model.as_critic() if role in ("critic", "reward") else model for role, model in models.items()},
            find_model(judge.model, folder) if judge else None,
            note,
            find_model(spec.model, folder) if (spec := experiment.engine.speculation) and spec.model else None,
        )
        return loaded._with_models_that_do(label)

    def _with_models_that_do(self, label: str) -> LoadedExperiment:
        """The same without windows that no sequence outgrows.

        Raises `ConfigError` for a model in use whose context the longest prompt and the cap exceed, or whose layers the
        cost models lack.
        """
        longest, cap = self.longest_sequence, self.experiment.trace.cap
        for model in self._models_in_use:
            refuse("context", shown=label, model=model, longest=longest, cap=cap, prompt=self.longest_prompt)
        engine = self.experiment.engine
        share = next(iter(self.calibrations.values())).window_share
        roles = {"actor": self.model} | {one.model: self.models[one.model] for one in self.algorithm.generating}
        served = {
            role: model.within(longest).served(engine.precision, engine.kv_precision, share(model.model_type))
            for role, model in roles.items()
        }
        rollout = served["actor"]
        judge = self.judge_model and self.judge_model.served(window_share=share(self.judge_model.model_type))
        refuse(
            "loaded",
            shown=label,
            experiment=self.experiment,
            caching=self.engine.enable_prefix_caching,
            rollout=rollout,
            plain_kv=kv_shape(rollout, 1) == PLAIN_KV,
            trace=self.trace,
            needed=self.launched_responses,
        )
        if len(self.calibrations) == 1:  # of several kinds of GPU only those that generate and train count
            (calibration,) = self.calibrations.values()
            priced = [("engine", model) for model in served.values()]
            for what, model in [*priced, *([("workflow.reward.judge", self.judge_model)] if self.judge_model else [])]:
                with about(f"{label}: {what}", CalibrationError):
                    for_model(model, calibration)
            with about(f"{label}: training", CalibrationError):
                calibration.check_precision(self.experiment.training.precision)
        models = {role: model.within(longest).served("bf16") for role, model in self.models.items()}
        return replace(self, model=rollout, models=models, judge_model=judge, served=served)

    @property
    def _models_in_use(self) -> list[Model]:
        used = {call.model for call in self.algorithm.calls}
        own = [model for role, model in self.models.items() if role in used]
        return [*own, self.judge_model] if self.judge_model else own

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trace and the shapes of the models leave out, and what groups of GPUs with sequences of their own do
        not share."""
        own = [f"{model.name}: {model.note}" for model in self._models_in_use if model.note]
        found = said(
            shipped("says.yaml")["loaded"],
            model=self.model,
            engine=self.experiment.engine,
            spec=self.drafts and self.drafts.speculation,
            first=self.drafts and self.drafts.speculation.under(Conditions()),
            environment=self.environment,
            idle=not self.environment and self.experiment.environment != EnvironmentConfig(),
            plain_kv=kv_shape(self.model, 1) == PLAIN_KV,
        )
        return tuple(dict.fromkeys(filter(None, (self.trace_note, *own, *found))))

    def kind(self, gpus: Sequence[int], what: str = "a call") -> Kind:
        """What these GPUs cost; raises `ConfigError`, about `what` they are for, if they are of several kinds."""
        cluster = self.cluster.around(gpus, what)
        return Kind(cluster, self.calibrations[cluster.gpu.name])

    @cached_property
    def engine(self) -> EngineConfig:
        """The rollout engine's settings, what is not given as the calibration's engine has it."""
        engine = self.experiment.engine.with_prefix_hits(next(iter(self.calibrations.values())).prefix_hits)
        groups = engine.data_parallel_attention
        if groups > 1:  # each has a KV cache and limits of its own: see `notes`
            limits = {limit: groups * getattr(engine, limit) for limit in ("max_num_seqs", "max_num_batched_tokens")}
            engine = engine.model_copy(update={"enable_prefix_caching": False, **limits})
        return engine

    @cached_property
    def replica(self) -> ReplicaLayout:
        """How the GPUs of a rollout replica share the model beyond TP."""
        engine = self.experiment.engine
        return ReplicaLayout(
            ep=engine.ep, attention_dp=engine.data_parallel_attention, imbalance=engine.expert_imbalance
        )

    @cached_property
    def drafts(self) -> Drafts | None:
        """What the rollout speculates with, if it does."""
        spec = self.experiment.engine.speculation
        if spec is None or not spec.num_speculative_tokens:
            return None
        return Drafts.of(spec, self.model, self.draft_model)

    @cached_property
    def scoring(self) -> TraceScoring:
        """What the trace says about rewards; of times and judges nothing where no call is a reward."""
        spec = self.experiment.workflow.reward
        if not any(call.kind == "reward" for call in self.algorithm.calls):
            spec = spec.model_copy(update={"from_trace": False})
        return TraceScoring(self.trace, spec, self._cut[1])

    @cached_property
    def algorithm(self) -> Workflow:
        """The calls of a step, as no system has changed them yet."""
        return workflow_of(self.experiment.workflow, self.models)

    @property
    def launched_responses(self) -> int:
        """Responses to each prompt: those that are trained on and those that they are compared with (ReMax)."""
        return self.experiment.workflow.responses + self.algorithm.baseline_responses

    @cached_property
    def batch(self) -> BatchSize:
        spec, capped, training = self.experiment.workflow, self._cut[0], self.experiment.training
        counted = any(getattr(training, f"{of}micro_batch_sequences") for of in ("", "log_prob_", "critic_"))
        return BatchSize(
            spec.prompts * spec.responses,
            float(self.prompt_lengths.mean()) + float(capped.mean()),
            min(self.longest_prompt + int(capped.max()), self.longest_sequence),
            training.mini_batches,
            spec.prompts * self.algorithm.baseline_responses,
            self.experiment.trace.max_model_len or self.longest_sequence,
            *([self.drawn_steps] if counted or training.pp > 1 else []),
        )

    @cached_property
    def drawn_steps(self) -> npt.NDArray[np.int64]:
        """Prompt and response together of some steps (steps × sequences, tokens), the same for every seed that runs:
        what fits is not a matter of one draw's luck."""
        sampler = self.sampler(0)
        steps = [sampler.step(number) for number in range(CHECKED)]
        return np.array([step.prompt_tokens + step.response_tokens for step in steps])

    @property
    def mean_response_tokens(self) -> float:
        """The mean length of a response under the cap (tokens)."""
        return float(self._cut[0].mean())

    @cached_property
    def longest_prompt(self) -> int:
        """The longest prompt of the trace (tokens)."""
        return int(self.prompt_lengths.max())

    @cached_property
    def longest_response(self) -> int:
        """The longest that a response can get (tokens): up to the cap, and to what its prompt leaves."""
        trace = self.experiment.trace
        return int(limits(self.prompt_lengths, trace.cap, trace.max_model_len).max())

    @property
    def longest_sequence(self) -> int:
        """The longest prompt and response together (tokens)."""
        longest, trace = self.longest_prompt + self.experiment.trace.cap, self.experiment.trace
        return min(longest, trace.max_model_len or longest)

    @property
    def response_lengths(self) -> npt.NDArray[np.int64]:
        """The trace's lengths as they are generated, under the cap (tokens)."""
        return self._cut[0]

    @cached_property
    def prompt_lengths(self) -> pd.Series[int]:
        """The trace's prompts (tokens)."""
        return _prompt_tokens(self.trace, self.experiment.trace)

    @cached_property
    def _cut(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The trace's lengths as they are generated, and which responses do not end."""
        trace = self.experiment.trace
        most_turns = self.experiment.environment.max_turns
        return self.trace.cut(limits(self.prompt_lengths, trace.cap, trace.max_model_len), most_turns)

    def sampler(self, seed: int) -> StepSampler:
        workflow, trace = self.experiment.workflow, self.experiment.trace
        return StepSampler(
            self.trace,
            workflow.prompts,
            self.launched_responses,
            trace.cap,
            seed,
            default_prompt_tokens=trace.default_prompt_tokens,
            max_model_len=trace.max_model_len,
            max_turns=self.experiment.environment.max_turns,
            default_tool_s=self.experiment.environment.default_tool_s,
        )

    @property
    def environment(self) -> EnvironmentConfig | None:
        """What runs the tool calls of trajectories; None where the trace has none."""
        return self.experiment.environment if "turns" in self.trace.frame else None


def _prompt_tokens(trace: Trace, spec: TraceSpec) -> pd.Series[int]:
    known, default = trace.frame.get("prompt_tokens"), spec.default_prompt_tokens
    return pd.Series(default, trace.frame.index) if known is None else known.fillna(default)


def _scaled(trace: Trace, spec: TraceSpec) -> Trace:
    """The trace with all lengths as many times as long as the experiment says."""
    times = {"response_tokens": spec.scale, "prompt_tokens": spec.prompt_scale}
    scaled = {
        name: (trace.frame[name] * factor).round().clip(lower=1).astype(trace.frame[name].dtype)
        for name, factor in times.items()
        if factor != 1.0 and name in trace.frame
    }
    if spec.scale != 1.0 and "turns" in trace.frame:
        scaled["turns"] = trace.frame["turns"].map(lambda turns: scale_turns(turns, spec.scale))
        own = [turns and response_tokens(turns) for turns in scaled["turns"]]
        scaled["response_tokens"] = pd.Series(own, trace.frame.index).fillna(scaled["response_tokens"]).astype("int64")
    cap = trace.meta.cap_tokens and max(round(trace.meta.cap_tokens * spec.scale), 1)
    known = trace.meta.known_tokens and max(round(trace.meta.known_tokens * spec.scale), 1)
    meta = trace.meta.model_copy(update={"cap_tokens": cap, "known_tokens": known})
    return Trace(trace.frame.assign(**scaled), meta) if scaled else trace


def _with_room(trace: Trace, spec: TraceSpec, label: str) -> tuple[Trace, str]:
    """The trace without prompts that are too long or leave no room for a response, as trainers filter their data; what
    to say of it."""
    tokens, most, room = _prompt_tokens(trace, spec), spec.max_prompt_tokens, spec.max_model_len
    name, does, limit = "max_model_len", "fill", room
    if most is not None and (room is None or most < room):
        name, does, limit, room = "max_prompt_tokens", "exceed", most, most + 1
    if room is None or (fits := tokens < room).all():
        return trace, ""
    said = f"trace.{name}, {limit:,} tokens"
    refuse("prompts", shown=label, fits=fits, trace=trace, does=does, limit=said)
    prompts = trace.frame["prompt_id"]
    note = f"{prompts[~fits].nunique():,} of {prompts.nunique():,} prompts are left out: they {does} {said}"
    return Trace(trace.frame[fits].reset_index(drop=True), trace.meta), note


def _fixed_lengths(experiment: Experiment) -> Trace:
    """As many responses as a step takes, all of one length; one more of each prompt for a baseline (ReMax)."""
    spec, workflow = experiment.trace, experiment.workflow
    samples = workflow.responses + 1
    prompt, sample = np.divmod(np.arange(workflow.prompts * samples), samples)
    columns = {"prompt_id": prompt, "sample_id": sample, "prompt_tokens": spec.default_prompt_tokens}
    return make_trace(pd.DataFrame({**columns, "response_tokens": spec.fixed}), TraceMeta(name=f"fixed-{spec.fixed}"))


def _calibrations(experiment: Experiment, cluster: AnyCluster, folder: Path, label: str) -> dict[str, Calibration]:
    """The calibration of every kind of GPU; raises `ConfigError` if one is missing, or is for another GPU."""
    given, kinds, nodes = experiment.calibration, cluster.kinds, node_types()
    if isinstance(given, str):
        each = ": …, ".join(kinds)
        refuse("calibration of several", shown=label, cluster=cluster, kinds=kinds, each=each, given=given)
        given = {kinds[0]: given}
    named = {nodes[kind].gpu.name if kind in nodes else kind: name for kind, name in given.items()}
    found: dict[str, Calibration] = {}
    for kind in kinds:
        refuse("calibrations", shown=label, kind=kind, named=named, cluster=cluster)
        groups = cluster.groups if isinstance(cluster, MixedCluster) else (cluster,)
        nodes_of_kind = next(one for one in groups if one.gpu.name == kind)
        read = carried_to(load_calibration(beside(named[kind], folder)), nodes_of_kind)
        read = read.drawn(experiment.draw, experiment.costs)
        found[kind] = read.scheduled(experiment.engine.async_scheduling).with_experts(experiment.engine.moe_backend)
        refuse("calibration", CalibrationError, shown=label, of=found[kind], kind=kind, cluster=cluster)
    return found


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
    if own := next(filter(is_file, (folder / path, path)), None):
        return own
    shipped = catalogue.names("traces", ".parquet")
    short = path.name.removesuffix(".parquet")
    if short in shipped and path.parent.name in ("", "traces"):
        return shipped[short]
    if path.suffix in (".parquet", ".csv", ".jsonl", ".gz") or len(path.parts) > 1:
        raise ConfigError(f"trace.path: {name}: no such file")
    raise unknown_name("trace", name, shipped)
