"""Part `rollpacker`: RollPacker's and RLHFuse's published figures (SYSTEMS: RollPacker, RLHFuse) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
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
from rlsim.validate.rows import Row
from rlsim.validate.runs import run

TASKS = ("math", "code", "judge")
#: Rollout, reward and training in a veRL step (14B, cap 16K, 32 GPUs), by task.
SHARES = {"math": (0.72, 0.05, 0.23), "code": (0.66, 0.13, 0.21), "judge": (0.71, 0.07, 0.22)}
#: Cumulative speedups over veRL, in the order of the parts.
CUMULATIVE = {
    "rollpacker_7b": {"tail batching": 1.30, "+ reward": 2.01, "+ planner": 2.01, "rollpacker": 2.03},
    "rollpacker_32b": {"tail batching": 2.21, "+ reward": 2.48, "+ planner": 2.52, "rollpacker": 2.56},
}

#: The calibration's training efficiency, which no figure of this paper has a part in.
UNFITTED = {"training.efficiency": None}

row = partial(Row, "rollpacker")


def section(_: Options) -> Section:
    """Every figure, from two seeds of each shipped experiment (about five minutes)."""
    two = {"seeds": 2}
    small, large = run("rollpacker_7b", overrides=two), run("rollpacker_32b", overrides=two)
    found = [*_inputs(two)]
    for name, result in (("rollpacker_7b", small), ("rollpacker_32b", large)):
        found += _cumulative(name, result, run(name, overrides=two | UNFITTED | {"systems": _first_systems(name)}))
    found += [*_rounds("7b", small), *_rounds("32b", large)]
    found += _eta(run("eta_sensitivity", overrides=two))
    found += _planner(run("planner_preemption", overrides=two))
    found += _timeout(run("adaptive_timeout", overrides=two))
    found += _stream(run("stream_trainer", overrides=two))
    found += _judge()
    fused = speedups(small)
    over_fused = fused["rollpacker"] / fused["rlhfuse_plus"]
    found.append(row("7b-over-rlhfuse-plus", "speedup", 1.14, over_fused, "strengthened as its authors say"))

    whole = {row.case: f"{row.simulated:.2f}" for row in found if row.quantity == "speedup"}
    return published_section(
        "rollpacker",
        found,
        small=whole["7b-rollpacker-unfitted"],
        small_fitted=whole["7b-rollpacker"],
        large=whole["32b-rollpacker-unfitted"],
        large_fitted=whole["32b-rollpacker"],
    )


def _first_systems(experiment: str) -> list[Any]:
    """veRL and the systems that add part after part."""
    return list(load_experiment(experiment)[0].systems[: 1 + len(CUMULATIVE[experiment])])


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


def _inputs(two: Mapping[str, Any]) -> Iterator[Row]:
    note = "the ends of the published 25 to 32"
    for task, p75, ratio in (("math", 1100.0, 25), ("judge", 755.0, 32)):  # P75: the ends of a published range
        lengths = np.minimum(read_trace(find_trace(f"rollpacker-{task}", Path())).response_tokens, 16384)
        case, found = f"trace-{task}", float(np.quantile(lengths, 0.75))
        yield row(case, "P75 length (tokens)", p75, found, kind="input")
        yield row(case, "longest / median", ratio, float(lengths.max() / np.median(lengths)), note, "input")
    notes = {"rollout": "", "reward": "sets the reward times", "training": "sets the training efficiency"}
    for task, shares in SHARES.items():
        simulated = stage_shares(run("rollpacker_7b", overrides={**two, **share_settings(task)}))
        for (name, note), published, value in zip(notes.items(), shares, simulated, strict=True):
            yield row(f"14b-{task}", f"{name} share", published, value, note, "input")


def _cumulative(experiment: str, fitted: Result, unfitted: Result) -> Iterator[Row]:
    size = experiment.partition("_")[2]
    notes = (
        ("", "training efficiency fitted to the stage shares"),
        ("-unfitted", "the calibration's training efficiency"),
    )
    speedup = speedups(fitted), speedups(unfitted)
    for system, published in CUMULATIVE[experiment].items():
        case = f"{size}-{system.strip('+ ').replace(' ', '-')}"
        for (ending, note), of in zip(notes, speedup, strict=True):
            yield row(case + ending, "speedup", published, of[system], note)


def _rounds(size: str, result: Result) -> Iterator[Row]:
    tail = result.steps[result.steps["system"] == "tail batching"]
    short = tail.loc[tail["round"] == "short", "longest_tokens"]
    baseline = result.steps.loc[result.steps["system"] == "verl", "longest_tokens"].max()
    what = "longest response, veRL / short round"
    yield row(f"{size}-rounds", what, 8.9, float(baseline / short.min()), "up to 8.9, setting not named")
    yield row(f"{size}-rounds", "short rounds per long round", 4, len(short) / (len(tail) - len(short)))


def _eta(result: Result) -> Iterator[Row]:
    gen_s = {system: mean["gen_time_s"] for (system, label), mean in means(result).items() if not label}
    best = gen_s["tail-eta1.25"]
    tried = {float(name.removeprefix("tail-eta")): s for name, s in gen_s.items() if name.startswith("tail-eta")}
    yield row("eta", "best eta", 1.25, min(tried, key=lambda eta: tried[eta]), f"of {sorted(tried)}")
    yield row("eta", "rollout, prompts only / both", 1.5, gen_s["prompts only"] / best, "up to 1.5")
    yield row("eta", "rollout, responses only / both", 1.6, gen_s["responses only"] / best, "up to 1.6")


def _planner(result: Result) -> Iterator[Row]:
    mean = means(result)
    short, long = mean["tail batching-tp1", "short"], mean["tail batching-tp1", "long"]
    two = mean["tail batching-tp2", "short"]
    ratio = short["preemptions"] / long["preemptions"]
    yield row("preemptions", "short / long rounds", 1.79, ratio, "up to 1.79; long reasoning assumed")
    yield row("preemptions", "TP2 / TP1, short rounds", 1 - 0.211, two["preemptions"] / short["preemptions"])
    yield row("preemptions", "time TP2 / TP1, short rounds", 1 - 0.25, two["gen_time_s"] / short["gen_time_s"])


def _timeout(result: Result) -> Iterator[Row]:
    mean = scored_s(result)
    what = "reward + rollout time, fixed / adaptive"
    yield row("adaptive-timeout", what, 1.6, mean["fixed"] / mean["adaptive"], "on average")


def scored_s(result: Result) -> dict[Any, float]:
    """Seconds from the start of generation to the last score, mean of all steps, by system."""
    step = ["system", "seed", "step"]
    calls = {kind: rows.groupby(step) for kind, rows in result.calls.groupby("kind")}
    times = calls["reward"]["end_at"].max() - calls["generate"]["start_at"].min()
    return times.groupby("system").mean().to_dict()


def _stream(result: Result) -> Iterator[Row]:
    mean = means(result)
    without_s = mean["no stream", "long"]["step_time_s"]
    for system, published in (("trigger0.2", 1.01), ("trigger0.3", 1.05), ("trigger0.4", 1.04), ("adaptive", 1.08)):
        speedup = without_s / mean[f"stream-{system}", "long"]["step_time_s"]
        yield row(f"stream-{system}", "speedup of long rounds", published, speedup)


def _judge() -> Iterator[Row]:
    """A colocated judge under MPS and with time slices: the judged task alone, rewards by the sample."""
    static = {"verl": {"tp": 1}}
    systems = [
        {"name": how, "use": [static, "tail_batching", "async_reward", {"colocated_judge": {"sharing": how}}]}
        for how in ("mps", "time_slicing")
    ]
    settings = {"seeds": 1, "workflow.steps": 5, "trace.path": "rollpacker-judge", "systems": systems}
    found = run("rollpacker_7b", overrides=settings | {"baseline": "mps"})
    mean = scored_s(found)
    yield row("judge", "time slices / MPS", 1.25, mean["time_slicing"] / mean["mps"], "up to 1.25")
