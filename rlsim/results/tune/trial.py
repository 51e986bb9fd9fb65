"""What a change of a configuration brings: the changed configuration, read as `rlsim init` reads it, and run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rlsim.base.processes import TimeLimitError, at_most
from rlsim.base.schema import validate
from rlsim.errors import CapacityError, ConfigError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.frames import named
from rlsim.experiment.ledger import AssumedRecord, ledger_of
from rlsim.experiment.load import load_experiment, parse_overrides, with_settings
from rlsim.experiment.refusals import starts_of
from rlsim.experiment.schema import Experiment
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.steadiness import unsteady
from rlsim.experiment.summary import means
from rlsim.experiment.systems import PartSpec, SystemSpec
from rlsim.experiment.times import ExperimentTimes
from rlsim.frameworks import READERS, read
from rlsim.frameworks.draft import write_changes, written
from rlsim.frameworks.parts import Options
from rlsim.frameworks.sources import parsed
from rlsim.policies.registry import load_policy
from rlsim.results.tune.space import baseline_of

#: By the option of `rlsim init` that reads them.
FRAMEWORKS: Mapping[str, str] = {"": "", **{f"--from-{name}": name for name in READERS}}
#: A setting beside files: `key=value`, or a flag with its value, if it has one.
_SETTING = re.compile(r"(?:--|\+{1,2}|(?=[^=]*=))(?P<key>[A-Za-z_][\w.-]*)(?:[= ](?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Configuration:
    """Where settings come from: files and overrides of a framework, or an experiment (`framework` empty)."""

    framework: str
    sources: tuple[str, ...]
    options: Options
    version: str = "0.9"

    def experiment(self, changes: Mapping[str, Any]) -> Experiment:
        """The experiment of the configuration with some keys set to other values.

        Raises `ConfigError` for settings with which the framework or its engine would not start.
        """
        if not self.framework:
            settings = {**self._settings(changes, alone=True), "cases": {}}
            return load_experiment(self.sources[0], {**parse_overrides(self.sources[1:]), **settings})[0]
        overrides = (f"{key}={written(value)}" for key, value in changes.items())
        draft = read(self.framework, (*self.sources, *overrides), self.options, self.version)
        if draft.refused:
            raise StartError("; ".join(draft.refused))
        return validate(draft.data(), Experiment)

    def with_files(self, **files: Path) -> Configuration:
        """The configuration with a `calibration` or a `trace` of the user's own."""
        paths: dict[str, Any] = {name: str(path.resolve()) for name, path in files.items()}
        options = replace(self.options, **paths)
        if self.framework:
            return replace(self, options=options)
        keys = {"calibration": "calibration", "trace": "trace.path"}
        own = [f"{keys[name]}={path}" for name, path in paths.items()]
        return replace(self, sources=(*self.sources, *own), options=options)

    def write(self, changes: Mapping[str, Any], out: Path) -> tuple[list[str], list[str]]:
        """Write the first file with what was given beside it, and these changes, in place. Returns what of the given is
        in it, and what is to be given again: variables of a script, and choices that are no keys.

        Raises `ConfigError` where that does not read as the configuration with the changes.
        """
        file, *more = self.sources
        dotted = self.framework in ("verl", "skyrl")  # there, what has no dot is a variable
        found = {text: one for text in more if (one := _SETTING.fullmatch(text))}
        found = {text: one for text, one in found.items() if "." in one["key"] or (not dotted and one["key"].islower())}
        given = {self._key(one["key"]): parsed(one["value"] or "true") for one in found.values()}
        write_changes(Path(file), given | (dict(changes) if self.framework else self._settings(changes)), out)
        again = [text for text in more if text not in found]
        left_out, own = {"name", "description", "sources"}, replace(self, sources=(str(out), *again))
        if own.experiment({}).model_dump(exclude=left_out) != self.experiment(changes).model_dump(exclude=left_out):
            out.unlink()
            raise ConfigError(f"{out} would not read as what was computed: add the lines above to your command instead")
        return [*found], again

    def _key(self, name: str) -> str:
        return f"--{name}" if self.framework == "slime" and name != "program" else name

    def _settings(self, changes: Mapping[str, Any], *, alone: bool = False) -> dict[str, Any]:
        """The keys of an experiment for changes of its own and its system's settings; where these change, or `alone`,
        that is its only one."""
        own = {key.removeprefix("system."): value for key, value in changes.items() if key.startswith("system.")}
        others = {key: value for key, value in changes.items() if not key.startswith("system.")}
        experiment, _, _ = load_experiment(self.sources[0], list(self.sources[1:]))
        spec = baseline_of(experiment.systems, experiment.baseline)
        parts = [{part.policy: {**part.parameters, **_taken(part, own)}} for part in spec.parts]
        system = {"systems": [{"name": spec.name, "use": parts}], "baseline": spec.name}
        return {**others, **(system if own or alone else {})}


#: Calls of log-probs, as means of a trial.
LOG_PROBS = ("old_log_prob_s", "ref_log_prob_s")


class StartError(ConfigError):
    """Settings with which the framework, or its engine, would not start."""


@dataclass(frozen=True)
class Trial:
    """A run of a changed configuration on so many GPUs: its means, or why there are none, or why they do not count.

    Where money counts, its rate is one of a GPU (`each_gpu`). `took_s`: what simulating it took.
    """

    changes: Mapping[str, Any]
    means: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[AssumedRecord, ...] = ()
    problem: str = ""
    kind: Literal["", "start", "memory", "stale", "slow", "other"] = ""
    gpus: int = 0
    unsteady: str = ""  # why its throughput would not last
    each_gpu: bool = False
    took_s: float = field(default=0.0, compare=False)

    @property
    def rate(self) -> float:
        """Responses trained on per second; 0 where nothing ran, or nothing that counts."""
        rate = 0.0 if self.kind else self.means.get("responses_per_s", 0.0)
        return rate / self.gpus if self.each_gpu and rate else rate


@dataclass(frozen=True)
class Run:
    """How a changed configuration is run: on which draws of the trace, so many steps, in which world of costs.

    One whose steps overlap runs its own number of steps: fewer would show how its pipeline fills. `settings` are keys
    of the experiment that are set beside, such as an assumption at the end of its range. Without `rollout` nothing is
    generated: the other calls are priced by their formulas, each alone.
    """

    seed: int
    steps: int | None = None
    draw: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    rollout: bool = True


def tried(configuration: Configuration, changes: Mapping[str, Any], run: Run, most_s: float = math.inf) -> Trial:
    """The trial of some changes; what the framework refuses, memory does not hold with `MARGIN` kept free, or takes
    longer than `most_s` to simulate comes back as its problem."""
    try:
        with at_most(most_s):
            return _tried(configuration, changes, run)
    except (RlsimError, TimeLimitError) as error:
        kinds = {StartError: "start", CapacityError: "memory", TimeLimitError: "slow"}
        return Trial(changes, problem=str(error), kind=kinds.get(type(error), "other"))  # type: ignore[arg-type]


def _tried(configuration: Configuration, changes: Mapping[str, Any], run: Run) -> Trial:
    began = time.perf_counter()
    whole = configuration.experiment(changes)
    experiment = alone(whole, run)
    spec = baseline_of(experiment.systems, experiment.baseline)
    same = _known.get(key := experiment.model_dump_json(exclude={"name", "description", "sources"}))
    if same is not None and run.rollout:
        return replace(same, changes=changes)
    folder = configuration.options.folder
    simulator = simulator_of(whole, folder, run)
    if changes and (refused := starts_of(simulator.loaded, [spec])):
        raise StartError("; ".join(refused))
    (simulator.check_free if changes else simulator.check_all)(spec)
    if not run.rollout:
        return Trial(changes, _priced(simulator, spec, run.seed), gpus=simulator.loaded.cluster.gpus)
    tables = tables_of(simulator, spec, run.seed)
    steps = means(tables["steps"], ["system"])
    if steps.empty:
        return Trial(changes, problem=f"none of {experiment.workflow.steps} steps is steady", kind="other")
    row = pd.to_numeric(steps.iloc[0], errors="coerce").dropna()
    assumed = ledger_of(simulator.loaded, simulator.lookups()).assumed
    found = {str(name): float(value) for name, value in row.items()} | _log_probs_s(tables)
    updates = experiment.training.mini_batches * experiment.training.epochs  # of the optimizer, in a weight update
    found["staleness_optimizer_steps"] = found.get("staleness_mean", 0.0) * updates
    gpus, late = simulator.loaded.cluster.gpus, unsteady(tables["steps"])
    took_s = time.perf_counter() - began
    _known[key] = Trial(changes, found, tuple(assumed), gpus=gpus, unsteady=late, took_s=took_s)
    return _known[key]


def simulator_of(experiment: Experiment, folder: Path, run: Run) -> Simulator:
    """The simulator of an experiment's baseline alone, run as `run` says."""
    simulator = Simulator(LoadedExperiment.of(alone(experiment, run), folder), search=False)
    spec = baseline_of(experiment.systems, experiment.baseline)
    if run.steps is not None and simulator.overlap(spec.make()):
        return simulator_of(experiment, folder, replace(run, steps=None))
    return simulator


def _priced(simulator: Simulator, spec: SystemSpec, seed: int) -> dict[str, float]:
    """Responses per second of all calls but generation, one after the other, on the responses of a first step; their
    seconds; and what stays on a GPU of generation (`kept_bytes`)."""
    system, drawn = spec.make(), simulator.sampler(seed).step(0)
    placed, lengths = simulator.placed(system), drawn.prompt_tokens + drawn.response_tokens
    times, tp = ExperimentTimes(placed), system.initial_tp(placed.context)
    priced_s = {"train": 0.0, "inference": 0.0}
    for call in (one for one in placed.workflow.calls if one.kind in priced_s and placed.plan.of(one.name).strategy):
        parts = times.of_lengths(call, placed.plan.of(call.name), lengths, tp)
        priced_s[call.kind] += sum(seconds for _, seconds in parts)
    kept = placed.ledger.staying(placed.gpus_of("generate"))[1]
    rate = len(lengths) / (sum(priced_s.values()) or math.inf)
    seconds = {"train_time_s": priced_s["train"], "prep_time_s": priced_s["inference"]}
    return {"responses_per_s": rate, "kept_bytes": kept, **seconds}


def _log_probs_s(tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
    """Seconds of each call of log-probs and values in a steady step, in the mean; 0 of one that the step has not."""
    steady = tables["steps"].loc[tables["steps"]["steady"], "step"]
    calls = tables["calls"][tables["calls"]["step"].isin(steady)]
    taken_s = (calls["end_at"] - calls["start_at"]).groupby(calls["call"]).sum() / len(steady)
    return {name: float(taken_s.get(name.removesuffix("_s"), 0.0)) for name in (*LOG_PROBS, "values_s")}


def tables_of(simulator: Simulator, spec: SystemSpec, seed: int) -> dict[str, pd.DataFrame]:
    """The tables of one run of a system."""
    return named(simulator.tables(spec, seed, bounded=False), "", spec.name, seed)


#: Trials of this process by their experiments: several changes may come to the same.
_known: dict[str, Trial] = {}


def alone(experiment: Experiment, run: Run) -> Experiment:
    """The experiment with its baseline as its only system, and nothing run that a trial has no use for."""
    spec = baseline_of(experiment.systems, experiment.baseline)
    steps = {} if run.steps is None else {"workflow.steps": run.steps}
    settings = {
        "seeds": [run.seed], "certainty": 0, "draw": run.draw, "cases": {}, "baseline": spec.name,
        "systems": [spec.entry], **steps, **dict(run.settings),
    }  # fmt: skip
    return with_settings(experiment, settings, "tune")


def _taken(part: PartSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    known = getattr(load_policy(part.policy), "model_fields", {})
    return {name: value for name, value in given.items() if name in known}
