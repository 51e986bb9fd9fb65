"""What `from_run` takes from the experiment of a run, such as `rlsim init` writes it from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsim.base.schema import Schema
from rlsim.experiment.build import beside, find_trace
from rlsim.experiment.load import load_experiment
from rlsim.experiment.schema import Experiment
from rlsim.experiment.systems import parse_systems
from rlsim.frameworks.verl.run import TrainingArguments
from rlsim.trace import read_trace


def arguments_of(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_run` that an experiment gives; of training and the engine only what it says.

    The rollout's TP is the baseline's, if that is a static one. Raises `ConfigError` for a file that is no experiment.
    """
    experiment, shown, folder = load_experiment(source)
    work, training = experiment.workflow, _said(experiment.training)
    cluster = experiment.cluster
    found: dict[str, Any] = {
        "model": beside(experiment.model, folder),
        "cluster": beside(cluster, folder) if isinstance(cluster, str) else cluster,
        "calibration": beside(experiment.calibration_names[0], folder),
        "tp": _tp(experiment, shown),
        "prompts": work.prompts,
        "responses": work.responses,
        "cap": experiment.trace.cap,
        "backend": experiment.training.backend,
        "memory_utilization": experiment.memory_utilization,
        "prompt_tokens": _prompt_tokens(experiment, folder),
        "train": {key: value for key, value in training.items() if key in TrainingArguments.model_fields},
        "engine": _said(experiment.engine),
    }
    return {key: value for key, value in found.items() if value is not None}


def _said(block: Schema) -> dict[str, Any]:
    """The fields of a block that the file states."""
    return {key: value for key, value in block.model_dump().items() if key in block.model_fields_set}


def _tp(experiment: Experiment, shown: str) -> int | None:
    """The TP of the baseline's rollout, None if it has no fixed one."""
    specs = parse_systems(experiment.systems, shown)
    spec = next((one for one in specs if one.name == experiment.baseline), specs[0])
    degrees = [part.parameters.get("tp") for part in spec.parts]
    return next((degree for degree in degrees if isinstance(degree, int)), None)


def _prompt_tokens(experiment: Experiment, folder: Path) -> int:
    """The mean length of the trace's prompts."""
    spec = experiment.trace
    if spec.path is None:
        return spec.default_prompt_tokens
    paths = (spec.path,) if isinstance(spec.path, str) else spec.path
    frame = read_trace(find_trace(paths[0], folder)).frame
    return round(frame["prompt_tokens"].mean()) if "prompt_tokens" in frame else spec.default_prompt_tokens
