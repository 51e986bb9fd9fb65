"""The files that a point's experiment names by a relative path: to be sent to machines that do not have them."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rlsim import catalogue
from rlsim.experiment.build import find_trace
from rlsim.experiment.run import cases_of
from rlsim.experiment.schema import Experiment
from rlsim.schema import validate
from rlsim.sweeps.identity import modules_of, traces_of
from rlsim.sweeps.task import Task


def files_of(task: Task) -> dict[str, Path]:
    """Relative path as the experiment writes it -> the file here: traces, model configs, calibrations, clusters, code.

    What is named by an absolute path, or one that leaves the folder, is expected to be on every machine.
    """
    experiment = validate(task.plain_config(), Experiment, task.shown)
    found: dict[str, Path] = {}
    for _, case in cases_of(experiment, task.shown):
        found |= {name: find_trace(name, task.folder) for name in traces_of(case)}
        judge = case.workflow.reward.judge
        named = [case.model, *case.models.values(), *([judge.model] if judge else []), case.calibration]
        named += [case.cluster] if isinstance(case.cluster, str) else []
        for name in named:
            for path in (Path(name), task.folder / name, Path(name) / "config.json"):
                if path.is_file():
                    found.setdefault(str(Path(name) / path.name) if path.parent == Path(name) else name, path)
        for module, file in modules_of(case, task.shown):
            found[module.replace(".", "/") + ".py"] = file
    return {name: path for name, path in found.items() if _to_send(name, path)}


def _to_send(name: str, path: Path) -> bool:
    asked = PurePosixPath(name)
    shipped = path.resolve().is_relative_to(catalogue.data_dir("traces").resolve())  # part of rlsim: there already
    return not (shipped or asked.is_absolute() or ".." in asked.parts)
