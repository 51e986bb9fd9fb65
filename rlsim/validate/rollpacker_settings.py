"""What RollPacker's paper leaves open, one value changed at a time: how far its figures depend on it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsim.experiment.build import find_trace
from rlsim.experiment.run import run
from rlsim.trace.files import write_trace
from rlsim.trace.generate import draw_trace, load_recipe
from rlsim.validate.rollpacker import CUMULATIVE, UNFITTED, means, scored_s, speedups

#: Two periods of one seed: enough for a difference, short enough for many of them.
SHORT = {"seeds": 1, "workflow.steps": 10}


@dataclass(frozen=True)
class Setting:
    """Figures of one setting, by what they are."""

    what: str
    figures: Mapping[str, float]


def cumulative(experiment: str) -> Iterator[Setting]:
    """Speedups over veRL part by part, the shipped experiment first."""
    tp = {"rollpacker_7b": 1, "rollpacker_32b": 2}[experiment]
    static = {"verl": {"tp": tp}}
    systems = [
        {"name": "verl", "use": [static]},
        {"name": "tail batching", "use": [static, "tail_batching"]},
        {"name": "+ reward", "use": [static, "tail_batching", "reward_scheduler"]},
        {"rollpacker": {"start_tp": tp}},
    ]
    for what, changes in _small() if experiment == "rollpacker_7b" else _large():
        settings = {**SHORT, "systems": systems, **changes}
        speedup = speedups(run(experiment, overrides=settings))
        yield Setting(what, {name: speedup[name] for name in CUMULATIVE[experiment] if name in speedup})


def _small() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "as shipped", {}
    yield "engine: SGLang", {"calibration": "h800-sglang"}
    yield "tasks: math alone", {"trace.path": "rollpacker-math"}
    yield "tasks: code alone", {"trace.path": "rollpacker-code"}
    yield "tasks: judged QA alone", {"trace.path": "rollpacker-judge"}
    yield "lengths: long reasoning (AIME-like), checked in 10 ms", {"trace.path": "aime-r1-distill-like"}
    yield "training efficiency: the calibration's 0.371", UNFITTED
    yield "CPU workers: 16", {"workflow.reward.workers": 16}
    yield "CPU workers: 128", {"workflow.reward.workers": 128}
    yield "sandbox timeout: 10 s", {"workflow.reward.sandbox_timeout": 10}
    yield "judge: no instructions around the response", {"workflow.reward.judge.prompt_tokens": 0}
    yield "judge: half of the GPUs reserved", {"workflow.reward.judge.reserved": 0.5}
    yield "judge: its GPUs do not train", {"workflow.reward.judge.while_training": "apart"}
    yield "rewards beside log-probs", {"workflow.reward.order": "beside_log_probs"}
    yield "no reference model", {"workflow.reference": False}
    yield "stream trainer in long rounds only", {"systems": _streaming([{"stream": {"rounds": ["long"]}}])}


def _streaming(stream: list[Any]) -> list[Any]:
    static = {"verl": {"tp": 1}}
    both = [static, "tail_batching", "reward_scheduler"]
    return [{"name": "verl", "use": [static]}, {"name": "rollpacker", "use": [*both, *stream]}]


def _large() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "as shipped", {}
    yield "engine: SGLang", {"calibration": "h800-sglang"}
    yield "no response beyond 16K tokens", {"trace.cap": "16K"}
    yield "training efficiency: the calibration's 0.371", UNFITTED


def timeouts() -> Iterator[Setting]:
    """Fixed over adaptive timeouts, by how correctness and endless programs spread over prompts."""
    recipe = load_recipe(find_trace("rollpacker-code", Path()).with_suffix(".yaml"))
    rewards = recipe.rewards
    assert rewards is not None
    assert rewards.sandbox is not None
    for what, icc, share in (
        ("as shipped: 40% correct, correlation 0.4 within a prompt", 0.4, 0.4),
        ("correlation 0.1: nearly every prompt has a correct response", 0.1, 0.4),
        ("70% correct, correlation 0.1", 0.1, 0.7),
    ):
        correct = rewards.correct.model_copy(update={"icc": icc, "share": share})
        changed = recipe.model_copy(update={"rewards": rewards.model_copy(update={"correct": correct})})
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "code.parquet"
            write_trace(draw_trace(changed), path)
            mean = scored_s(run("adaptive_timeout", overrides={**SHORT, "trace.path": str(path)}))
        yield Setting(what, {"fixed / adaptive": mean["fixed"] / mean["adaptive"]})


def preemptions() -> Iterator[Setting]:
    """Preemptions, and the time of short rounds at TP2 over TP1, by engine and lengths."""
    for what, changes in (
        ("as shipped: vLLM, long reasoning", {}),
        ("engine: SGLang", {"calibration": "h800-sglang"}),
        ("lengths: DeepScaleR", {"trace.path": "deepscaler-llama-3.1-8b"}),
        ("lengths: RollPacker's math task", {"trace.path": "rollpacker-math"}),
    ):
        static = [{"name": f"tp{tp}", "use": ["tail_batching", {"verl": {"tp": tp}}]} for tp in (1, 2)]
        result = run("planner_preemption", overrides={**SHORT, "systems": static, "baseline": "tp1", **changes})
        mean = means(result)
        short, long, other = mean["tp1", "short"], mean["tp1", "long"], mean["tp2", "short"]
        few = short["preemptions"]
        yield Setting(
            what,
            {
                "preemptions a short round, TP1": few,
                "short / long": few / long["preemptions"] if long["preemptions"] else float("nan"),
                "TP2 / TP1": other["preemptions"] / few if few else float("nan"),
                "time TP2 / TP1": other["gen_time_s"] / short["gen_time_s"],
            },
        )


def fused() -> Iterator[Setting]:
    """RollPacker over the strengthened RLHFuse, by what that is taken to be."""
    plus = {"rlhfuse_plus": {"tp": 1, "remaining": 0.1}}
    systems = [
        {"name": "rollpacker", "use": [{"rollpacker": {"start_tp": 1}}]},
        {"name": "as shipped: judge on GPUs of its own", "use": [plus]},
        {"name": "with a colocated judge", "use": [plus, "colocated_judge"]},
        {"name": "with a colocated judge and adaptive timeouts", "use": [plus, "colocated_judge", "adaptive_timeout"]},
    ]
    result = run("rollpacker_7b", overrides={**SHORT, "systems": systems, "baseline": "rollpacker"})
    for name, speedup in list(speedups(result).items())[1:]:
        yield Setting(name, {"RollPacker's speedup": 1 / speedup})
