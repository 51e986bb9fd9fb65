"""Part `rollpacker`: RollPacker's and RLHFuse's published figures (SYSTEMS: RollPacker, RLHFuse) beside rlsim's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evidence.validate.parts import Options, Section
from evidence.validate.published import figures, published_section
from evidence.validate.runs import run
from rlsim.experiment.build import find_trace
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.trace import read_trace

TASKS = ("math", "code", "judge")
#: veRL and the systems that add part after part come first in these experiments.
CUMULATIVE = ("tail batching", "+ reward", "+ planner", "rollpacker")


def section(options: Options) -> Section:
    """Every figure, from two seeds of each shipped experiment (about five minutes)."""
    two, given = {"seeds": 2}, figures(options, "rollpacker").given
    found = inputs(two)
    for size in ("7b", "32b"):
        name = f"rollpacker_{size}"
        systems = list(load_experiment(name)[0].systems[: 1 + len(CUMULATIVE)])
        fitted = run(name, overrides=two)
        unfitted = run(name, overrides=two | given["unfitted"] | {"systems": systems})
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
    found["judge"] = _named_s(scored_s(run("rollpacker_7b", overrides=given["judge"])))
    return published_section(options, "rollpacker", found)


def by_system(result: Result) -> dict[Any, Any]:
    """The numbers of the summary by system."""
    return result.summary().set_index("system").to_dict("index")


def _named_s(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_s": value for name, value in seconds.items()}


def share_settings(task: str) -> dict[str, Any]:
    """Changes to the 7B experiment that make it veRL as in the published breakdown, on one task."""
    return figures(Options(), "rollpacker").given["shares"] | {"trace.path": f"rollpacker-{task}"}


def stage_shares(result: Result) -> dict[str, float]:
    """Rollout, reward and training as shares of a step that does them one after the other.

    What is neither generation nor waiting for rewards counts as training: log-probs, update, weights.
    """
    gen, reward = (
        float(result.steps[f"{part}_time_s"].mean() / result.steps["step_time_s"].mean()) for part in ("gen", "reward")
    )
    return {"rollout": gen, "reward": reward, "training": 1 - gen - reward}


def means(result: Result) -> dict[Any, Any]:
    """Means of the step columns by system and kind of round; "" for all rounds together."""
    steps = pd.concat([result.steps.assign(round=""), result.steps])
    return steps.groupby(["system", "round"], sort=False).mean(numeric_only=True).to_dict("index")


def inputs(two: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths of the traces under the cap, and the shares of veRL's stages by task."""
    lengths, shares = dict[str, float](), dict[str, float]()
    for task in ("math", "judge"):
        tokens = np.minimum(read_trace(find_trace(f"rollpacker-{task}", Path())).response_tokens, 16384)
        lengths[f"{task}_p75"] = float(np.quantile(tokens, 0.75))
        lengths[f"{task}_ratio"] = float(tokens.max() / np.median(tokens))
    for task in TASKS:
        found = stage_shares(run("rollpacker_7b", overrides={**two, **share_settings(task)}))
        shares |= {f"{task}_{name}": share for name, share in found.items()}
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
