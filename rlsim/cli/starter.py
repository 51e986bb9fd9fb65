"""`rlsim init`: a small experiment with a comment on every line, to be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsim.base.reading import shipped
from rlsim.experiment.build import beside
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.names import check_calibration, find_calibration, find_model
from rlsim.frameworks.parts import Options, add_trace
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

ENGINE = "vllm"
CLUSTER, MODEL, CAP = "8xh100", "qwen2.5-7b", 8192


def _usual() -> Any:
    """What every starter has, whatever it is about (`rlsim/data/starter.yaml`)."""

    def entry(told: Any) -> Any:
        if "is" not in told:
            return {key: entry(each) for key, each in told.items()}
        value = told["is"]
        return Entry(tuple(map(entry, value)) if isinstance(value, list) else value, told.get("says", ""))

    return entry(shipped("starter.yaml"))


def starter(
    name: str,
    *,
    folder: Path,
    cluster: str | None = None,
    model: str | None = None,
    trace: str | None = None,
    calibration: str | None = None,
) -> Draft:
    """An experiment of `name`, to be written into `folder`, which compares veRL with PAT on given or usual things.

    `model` is a name of the catalogue, a Hugging Face name or the path of a config.json. Raises `RlsimError`s for
    names that do not exist.
    """
    machines = load_cluster(cluster or CLUSTER)
    chosen, said = find_model(model or MODEL, folder)
    shape = load_model(beside(chosen, folder))
    if calibration is not None:
        check_calibration(calibration, machines, folder)
        costs, about = calibration, "as given"
    else:
        costs, about = find_calibration(machines.gpu.name, ENGINE)
        about = about or "<gpu>-<engine>: rlsim list calibrations, or your own (rlsim calibrate)"
    draft = Draft({})
    add_trace(draft, Options(folder, trace=trace), shape, Entry(CAP, "longest response, tokens"), "", None)
    others = _usual()
    draft.entries = {
        "name": Entry(name, "results go to results/NAME"),
        "cluster": Entry(cluster or CLUSTER, "rlsim list clusters, or one spelled out (docs/experiments.md)"),
        "model": Entry(chosen, said or "rlsim list models, or the path of a Hugging Face config.json"),
        "calibration": Entry(costs, about),
        "trace": draft.entries["trace"],
        **others,
        "workflow": others["workflow"] | draft.entries["workflow"],
    }
    draft.entries["sources"] = draft.sources()
    question = f"{name}: how much does switching TP gain? Change anything; every key is in docs/experiments.md."
    draft.heading = [question, "Run it: rlsim run FILE"]
    return draft
