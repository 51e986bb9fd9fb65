"""Part `rollpacker`: RollPacker's and RLHFuse's published figures (SYSTEMS: RollPacker, RLHFuse) beside rlsim's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evidence.validate.parts import Options, Section
from evidence.validate.published import busy_share, figures, published_section, told
from rlsim.experiment.build import find_trace
from rlsim.experiment.result import Result
from rlsim.trace import read_trace

TASKS = ("math", "code", "judge")


def section(options: Options) -> Section:
    """Every figure (about five minutes)."""
    results = figures(options, "rollpacker").results()
    found: dict[str, Any] = {name: told(result) for name, result in results.items()}
    shares = {task: stage_shares(found[f"shares_{task}"]["verl"]) for task in TASKS}
    found["shares"] = {f"{task}_{name}": share for task, own in shares.items() for name, share in own.items()}
    rounds = {"7b": "fitted_7b", "32b": "fitted_32b", "code": "shares_code"}
    found |= {f"rounds_{name}": _rounds(results[run]) for name, run in rounds.items()}
    found["judge_busy"] = judge_busy(results["reserved_judge"])
    tried = [name for name in found["eta"] if name.startswith("tail-eta")]
    best = min(tried, key=lambda name: found["eta"][name]["every"]["gen_time_s"])
    found["best_eta"] = float(best.removeprefix("tail-eta"))
    return published_section(options, "rollpacker", found | {"trace": _lengths()})


def judge_busy(result: Result) -> float:
    """Share of short rounds in which a judge's GPU is at work."""
    ((record,),) = (systems.values() for systems in result.manifest["judge"].values())
    short = result.steps.loc[result.steps["round"] == "short", "step"]
    calls, spans = (table[table["step"].isin(short)] for table in (result.calls, result.spans))
    return busy_share(calls, spans, "reward", ("reward",), record["gpus"])


def stage_shares(system: Mapping[str, Any]) -> dict[str, float]:
    """Rollout, reward and training as shares of a step that does them one after the other.

    What is neither generation nor waiting for rewards counts as training: log-probs, update, weights.
    """
    mean = system["every"]
    gen, reward = (float(mean[f"{part}_time_s"] / mean["step_time_s"]) for part in ("gen", "reward"))
    return {"rollout": gen, "reward": reward, "training": 1 - gen - reward}


def _lengths() -> dict[str, float]:
    found = {}
    for task in ("math", "judge"):
        tokens = np.minimum(read_trace(find_trace(f"rollpacker-{task}", Path())).response_tokens, 16384)
        found[f"{task}_p75"] = float(np.quantile(tokens, 0.75))
        found[f"{task}_ratio"] = float(tokens.max() / np.median(tokens))
    return found


def _rounds(result: Result) -> dict[str, float]:
    """veRL's longest response over that of the shortest short round, and short rounds to a long one."""
    tail = result.steps[result.steps["system"] == "tail batching"]
    short = tail.loc[tail["round"] == "short", "longest_tokens"]
    baseline = result.steps.loc[result.steps["system"] == "verl", "longest_tokens"].max()
    return {"longest": float(baseline / short.min()), "per_long": len(short) / (len(tail) - len(short))}
