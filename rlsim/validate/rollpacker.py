"""Part `rollpacker`: RollPacker's and RLHFuse's published figures (SYSTEMS: RollPacker, RLHFuse) beside rlsim's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.experiment.build import find_trace
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.trace import read_trace
from rlsim.validate.parts import Options, Section
from rlsim.validate.published import published_section
from rlsim.validate.runs import run

TASKS = ("math", "code", "judge")
#: veRL and the systems that add part after part come first in these experiments.
CUMULATIVE = ("tail batching", "+ reward", "+ planner", "rollpacker")

#: The calibration's training efficiency, which no figure of this paper has a part in.
UNFITTED = {"training.efficiency": None}


def section(options: Options) -> Section:
    """Every figure, from two seeds of each shipped experiment (about five minutes)."""
    two = {"seeds": 2}
    found = inputs(two)
    for size in ("7b", "32b"):
        name = f"rollpacker_{size}"
        systems = list(load_experiment(name)[0].systems[: 1 + len(CUMULATIVE)])
        fitted = run(name, overrides=two)
        unfitted = run(name, overrides=two | UNFITTED | {"systems": systems})
        found |= {f"fitted_{size}": by_system(fitted), f"unfitted_{size}": by_system(unfitted)}
        found[f"rounds_{size}"] = _rounds(fitted)
    eta = {system: mean for (system, label), mean in means(run("eta_sensitivity", overrides=two)).items() if not label}
    tried = [name for name in eta if name.startswith("tail-eta")]
    best = min(tried, key=lambda name: eta[name]["gen_time_s"])
    found["eta"] = eta | {"best": float(best.removeprefix("tail-eta"))}
    planner = means(run("planner_preemption", overrides=two))
    rounds = [(kind, tp) for kind in ("short", "long") for tp in (1, 2)]
    found["planner"] = {f"{kind}_tp{tp}": planner[f"tail batching-tp{tp}", kind] for kind, tp in rounds}
    found["timeout"] = _named_s(scored_s(run("adaptive_timeout", overrides=two)))
    streamed = means(run("stream_trainer", overrides=two))
    found["stream"] = {system: mean for (system, label), mean in streamed.items() if label == "long"}
    found["judge"] = _named_s(_judge_s())
    return published_section(options, "rollpacker", found)


def by_system(result: Result) -> dict[Any, Any]:
    """The numbers of the summary by system."""
    return result.summary().set_index("system").to_dict("index")


def _named_s(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_s": value for name, value in seconds.items()}


def share_settings(task: str) -> dict[str, Any]:
    """Changes to the 7B experiment that make it veRL as in the published breakdown: 14B, cap 16K, 32 GPUs, one task.

    The rollout's TP is not published; 2 is taken, as for 32B.
    """
    cluster = {
        "gpu": "h800-sxm",
        "nodes": 4,
        "gpus_per_node": 8,
        "intra": {"name": "nvlink4x8", "bytes_per_s": "200 GB/s", "latency_s": "0.6 us"},
        "inter": {"name": "ib-ndr400", "bytes_per_s": "400 Gb/s", "latency_s": "2.7 us"},
        "host": {"name": "pcie5x16", "bytes_per_s": "63 GB/s", "latency_s": "1.0 us"},
    }
    return {
        "cluster": cluster,
        "model": "qwen2.5-14b",
        "trace": {"path": f"rollpacker-{task}", "cap": "16K"},
        "workflow.steps": 6,
        "workflow.reward.workers": 64,
        "systems": [{"verl": {"tp": 2}}],
        "baseline": "verl",
    }


def stage_shares(result: Result) -> tuple[float, float, float]:
    """Rollout, reward and training as shares of a step that does them one after the other.

    What is neither generation nor waiting for rewards counts as training: log-probs, update, weights.
    """
    steps = result.steps
    gen_s, reward_s, step_s = (float(steps[f"{part}_time_s"].mean()) for part in ("gen", "reward", "step"))
    return gen_s / step_s, reward_s / step_s, (step_s - gen_s - reward_s) / step_s


def means(result: Result) -> dict[Any, Any]:
    """Means of the step columns by system and kind of round; "" for all rounds together."""
    steps = pd.concat([result.steps.assign(round=""), result.steps])
    return steps.groupby(["system", "round"], sort=False).mean(numeric_only=True).to_dict("index")


def speedups(result: Result) -> dict[Any, float]:
    """Speedup of each system over the baseline."""
    return result.summary().set_index("system")["speedup"].to_dict()


def inputs(two: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths of the traces under the cap, and the shares of veRL's stages by task."""
    lengths, shares = dict[str, float](), dict[str, float]()
    for task in ("math", "judge"):
        tokens = np.minimum(read_trace(find_trace(f"rollpacker-{task}", Path())).response_tokens, 16384)
        lengths[f"{task}_p75"] = float(np.quantile(tokens, 0.75))
        lengths[f"{task}_ratio"] = float(tokens.max() / np.median(tokens))
    for task in TASKS:
        found = stage_shares(run("rollpacker_7b", overrides={**two, **share_settings(task)}))
        shares |= {
            f"{task}_{name}": value for name, value in zip(("rollout", "reward", "training"), found, strict=True)
        }
    return {"trace": lengths, "shares": shares}


def _rounds(result: Result) -> dict[str, float]:
    """veRL's longest response over that of the shortest short round, and short rounds to a long one."""
    tail = result.steps[result.steps["system"] == "tail batching"]
    short = tail.loc[tail["round"] == "short", "longest_tokens"]
    baseline = result.steps.loc[result.steps["system"] == "verl", "longest_tokens"].max()
    return {"longest": float(baseline / short.min()), "per_long": len(short) / (len(tail) - len(short))}


def scored_s(result: Result) -> dict[Any, float]:
    """Seconds from the start of generation to the last score, mean of all steps, by system."""
    step = ["system", "seed", "step"]
    calls = {kind: rows.groupby(step) for kind, rows in result.calls.groupby("kind")}
    times = calls["reward"]["end_at"].max() - calls["generate"]["start_at"].min()
    return times.groupby("system").mean().to_dict()


def _judge_s() -> dict[Any, float]:
    """A colocated judge under MPS and with time slices: the judged task alone, rewards by the sample."""
    static = {"verl": {"tp": 1}}
    systems = [
        {"name": how, "use": [static, "tail_batching", "async_reward", {"colocated_judge": {"sharing": how}}]}
        for how in ("mps", "time_slicing")
    ]
    settings = {"seeds": 1, "workflow.steps": 5, "trace.path": "rollpacker-judge", "systems": systems}
    return scored_s(run("rollpacker_7b", overrides=settings | {"baseline": "mps"}))
