"""What a message about memory advises lowers the figure that is too large, as said, and nothing else is advised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlsim.errors import CapacityError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.load import load_experiment, parse_overrides
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import parse_systems

PPO = {"workflow.algorithm": "ppo", "workflow.responses": 1}
PLAN = {
    "calls": {
        "generate": {"gpus": "0-3"},
        "old_log_prob": {"gpus": "4-7", "tp": 4},
        "ref_log_prob": {"gpus": "4-7", "tp": 4},
        "train": {"gpus": "4-7", "tp": 4},
    }
}
CASES: dict[str, dict[str, Any]] = {
    "logits of a long sequence": {"training.cp": 1, "trace.cap": "96K", "trace.path": "long"},
    "activations": {"training.recompute": "none", "training.fused_kernels": True},
    "a large budget": {"training.micro_batch_tokens": "256K"},
    "states": {"model": "llama-3-70b"},
    "no ZeRO": {"training.zero_stage": 0},
    "a pipeline": {"training.backend": "megatron", "training.cp": 1, "training.pp": 2, "model": "qwen2.5-32b"},
    "states beside a reference model": {"training.zero_stage": 1, "models": {"reference": "qwen2.5-32b"}},
    "a plan spelled out": {"model": "qwen2.5-32b", "systems": [{"use": [{"plan": PLAN}], "name": "apart"}]},
    "a critic, too": {**PPO, "model": "llama-3-34b", "training.micro_batch_tokens": "64K"},
}


def needed(overrides: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Bytes that every call needs under the first system, and the message where that is too much."""
    experiment, shown, folder = load_experiment("pat_vs_static", overrides)
    setup = LoadedExperiment.of(experiment, folder, shown)
    placed = Simulator(setup).placed(parse_systems(experiment.systems, shown)[0].make())
    try:
        _, message = placed.plan, ""
    except CapacityError as error:
        message = str(error)
    plan = placed.unchecked_plan
    needs = placed.memory.needs(plan, placed._beside_bytes(plan))
    return {name: sum(parts.values()) for name, (_, parts) in needs.items()}, message


@pytest.mark.parametrize("case", CASES)
def test_every_advised_setting_lowers_the_figure_as_said(case: str, tmp_path: Path) -> None:
    settings = {"systems": [{"verl": {"tp": 2}}], "baseline": None, **CASES[case]}
    if settings.get("trace.path") == "long":
        rows = {"prompt_id": [0, 1], "sample_id": [0, 0], "prompt_tokens": [500, 500], "response_tokens": [90_000, 100]}
        pd.DataFrame(rows).to_parquet(tmp_path / "long.parquet")
        settings["trace.path"] = str(tmp_path / "long.parquet")
    before, message = needed(settings)
    over = re.search(r"call (\w+) .* = ([\d.]+) GB > ([\d.]+) GB of h100-sxm", message)
    assert over, message
    call = over[1]
    assert before[call] / 1e9 == pytest.approx(float(over[2]), abs=0.01)
    advised = re.findall(r"training\.(\w+)=(\w+) \(([\d.]+) GB\)", message)
    for key, value, size in advised:
        after, _ = needed({**settings, **parse_overrides([f"training.{key}={value}"])})
        assert after[call] < before[call]
        assert after[call] / 1e9 == pytest.approx(float(size), abs=0.01)
    keys = {key for key, _, _ in advised}
    assert keys
    assert ("offload" in keys) == ("between its runs" in message)  # a call has its own states while it runs
