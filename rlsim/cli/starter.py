"""`rlsim init`: a small experiment with a comment on every line, to be changed."""

from __future__ import annotations

from pathlib import Path

from rlsim.calibrate.importers import import_calibration
from rlsim.cost.calibration import load_calibration
from rlsim.frameworks.draft import Draft, Entry
from rlsim.frameworks.names import check_calibration, find_calibration, find_model, load_from
from rlsim.frameworks.parts import Options, add_trace
from rlsim.models.hardware import Cluster, load_cluster

ENGINE = "vllm"
CLUSTER, MODEL, CAP = "8xh100", "qwen2.5-7b", 8192

#: What every starter has, whatever it is about.
_USUAL: dict[str, Entry | dict[str, Entry]] = {
    "workflow": {
        "algorithm": Entry("grpo", "or ppo, remax, dpo, online_dpo, custom"),
        "prompts": Entry(32, "a step"),
        "responses": Entry(8, "to each prompt"),
        "steps": Entry(5, "to simulate"),
    },
    "training": {
        "backend": Entry("fsdp", "or megatron"),
        "offload": Entry(True, "weights and optimizer states in host memory between calls"),
    },
    "seeds": Entry(5, "runs of each system, each on other draws; intervals are over seeds"),
    "baseline": Entry("verl-best", "what speedups refer to"),
    "systems": Entry(
        (
            Entry({"verl": {"tp": [1, 2, 4, "best"]}}, "static TP; best is the fastest of all that fit"),
            Entry("pat", "TP switched while responses are generated; more: rlsim list policies"),
        )
    ),
}


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
    shape = load_from(chosen, folder)
    if calibration is not None:
        check_calibration(calibration, machines, folder)
        costs, about = calibration, "as given"
    else:
        costs, about = find_calibration(machines.gpu.name, ENGINE)
        about = about or "<gpu>-<engine>: rlsim list calibrations, or your own (rlsim calibrate)"
    draft = Draft({})
    add_trace(draft, Options(folder, trace=trace), shape, Entry(CAP, "longest response, tokens"), "", None)
    workflow = {**_USUAL["workflow"], **draft.entries["workflow"]}  # type: ignore[dict-item]
    draft.entries = {
        "name": Entry(name, "results go to results/NAME"),
        "cluster": Entry(cluster or CLUSTER, "rlsim list clusters, or one spelled out (docs/experiments.md)"),
        "model": Entry(chosen, said or "rlsim list models, or the path of a Hugging Face config.json"),
        "calibration": Entry(costs, about),
        "trace": draft.entries["trace"],
        **_USUAL,
        "workflow": workflow,
    }
    draft.entries["sources"] = draft.sources()
    question = f"{name}: how much does switching TP gain? Change anything; every key is in docs/experiments.md."
    draft.heading = [question, "Run it: rlsim run FILE"]
    return draft


def calibration_from_nccl(paths: list[Path], *, machines: Cluster, base: str, name: str, folder: Path) -> str:
    """A calibration `folder`/NAME.yaml whose collectives are fitted to nccl-tests' output, the rest from `base`.

    Returns how an experiment in `folder` names it. Raises `CalibrationError` for output that cannot be read.
    """
    check_calibration(base, machines, folder)
    engine, stem = load_calibration(base).engine, f"{name}-calibration"
    path = import_calibration("nccl-tests", paths, gpu=machines, engine=engine, base=base, name=stem, out=folder)
    return path.name
