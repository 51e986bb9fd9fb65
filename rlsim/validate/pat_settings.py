"""What decides between PAT and a well-tuned static TP: the shipped H100 experiment, one setting changed at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsim import catalogue
from rlsim.cost.calibration import load_calibration
from rlsim.experiment.run import run
from rlsim.hardware import load_cluster
from rlsim.trace.files import write_trace
from rlsim.trace.generate import draw_trace, load_recipe
from rlsim.validate.pat import STATIC, means

SYSTEMS = [{"verl": {"tp": [1, 2, 4, 8, "best"]}}, "pat"]
FEWER = {"seeds": 4, "workflow.steps": 3}
CHECKED = {"workflow.reward.from_trace": False}  # only the lengths are of interest
VLLM = {"calibration": "h100-vllm"}


@dataclass(frozen=True)
class Outcome:
    """Generation times of one setting, seconds a step; a TP that does not fit is missing."""

    setting: str
    gen_time_s: Mapping[str, float]
    switches: float

    @property
    def best_static_s(self) -> float:
        """The fastest static TP."""
        return min(time for name, time in self.gen_time_s.items() if name in STATIC)


def outcomes() -> Iterator[Outcome]:
    """Every setting, the shipped one first."""
    with tempfile.TemporaryDirectory() as scratch:
        for setting, changes in _settings(Path(scratch)):
            result = run("pat_vs_static", overrides={"systems": SYSTEMS, **FEWER, **changes})
            mean = {system: values for (_, system), values in means(result).items()}
            times = {name: values["gen_time_s"] for name, values in mean.items()}
            yield Outcome(setting, times, mean["pat"]["switches"])


def _settings(scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "as shipped (SGLang, cap 24K, 128 responses), 4 seeds of 3 steps", {}
    yield "engine: vLLM", VLLM
    yield "engine: TensorRT-LLM", {"calibration": "h100-trtllm"}
    yield "host time 0", {"calibration": _host_time(scratch, 0.0, 0.0)}
    yield "host time doubled", {"calibration": _host_time(scratch, 2.0, 2.0)}
    yield "GPU links at a quarter of the rate", {"cluster": _slow_links(0.25)}
    yield "host time per sequence halved", {"calibration": _host_time(scratch, 1.0, 0.5)}
    yield "PAT recaptures its first layout's graphs each step", {"engine.first_layout_kept": False}
    yield "PAT predicts with the replicas as they are", {"systems": [SYSTEMS[0], {"pat": {"spread": "actual"}}]}
    yield "cap 8K", {"trace.cap": "8K"}
    yield "cap 16K", {"trace.cap": "16K"}
    yield "32 responses a step", {"workflow.prompts": 4}
    yield "512 responses a step", {"workflow.prompts": 64}
    yield "512 responses a step, vLLM", {"workflow.prompts": 64, **VLLM}
    yield "2,048 responses a step", {"workflow.prompts": 256, "seeds": 2, "workflow.steps": 2}
    yield "2,048 responses a step, vLLM", {"workflow.prompts": 256, "seeds": 2, "workflow.steps": 2, **VLLM}
    yield (
        "512 responses, KV cache scarce (27% of memory)",
        {"memory_utilization": 0.27, "training.offload": True, "workflow.prompts": 64},
    )
    yield "lengths: lognormal through the two published facts", {"trace.path": _lengths(scratch, "lognormal")}
    yield "lengths: no correlation within a prompt", {"trace.path": _lengths(scratch, "ungrouped")}
    yield "lengths: RollPacker's math task", {"trace.path": "rollpacker-math", **CHECKED}
    yield "lengths: RollPacker's judge task (far below the cap)", {"trace.path": "rollpacker-judge", **CHECKED}
    yield "lengths: long reasoning (AIME-like)", {"trace.path": "aime-r1-distill-like"}


def _host_time(scratch: Path, step: float, sequence: float) -> str:
    """The shipped calibration with host time per step and per sequence multiplied, as a file."""
    from ruamel.yaml import YAML

    calibration = load_calibration("h100-sglang")
    host = calibration.host
    changed = {
        "step_s": host.step_s * step,
        "sequence_s": host.sequence_s * sequence,
        "prefill_s": host.prefill_s * step,
    }
    path = scratch / f"host-{step:g}-{sequence:g}.yaml"
    data = calibration.model_copy(update={"host": host.model_copy(update=changed)}).model_dump(mode="json")
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(data, file)
    return str(path)


def _slow_links(factor: float) -> dict[str, Any]:
    """The shipped cluster with slower links inside the node."""
    cluster = load_cluster("8xh100").model_dump()
    cluster["intra"]["bytes_per_s"] *= factor
    return cluster | {"name": "8xh100-slow-links"}


def _lengths(scratch: Path, which: str) -> str:
    """The shipped trace drawn with another assumption, as a file."""
    recipe = load_recipe(catalogue.names("traces")["deepscaler-llama-3.1-8b"])
    if which == "lognormal":
        published = tuple(fact for fact in recipe.lengths.facts if not fact.source.startswith("assumed"))
        lengths = recipe.lengths.model_copy(update={"facts": published, "components": 1, "model": None})
        recipe = recipe.model_copy(update={"lengths": lengths})
    elif recipe.groups is not None:
        recipe = recipe.model_copy(update={"groups": recipe.groups.model_copy(update={"icc": 0.0})})
    path = scratch / f"{which}.parquet"
    write_trace(draw_trace(recipe), path)
    return str(path)
