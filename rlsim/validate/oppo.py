"""Part `oppo`: OPPO's published figures (SYSTEMS: overlap for PPO) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from rlsim.experiment.result import Result
from rlsim.validate.parts import Options, Section
from rlsim.validate.published import published_section
from rlsim.validate.rows import Row
from rlsim.validate.runs import run

SPEEDUPS = {"intra-step": 1.2, "inter-step": 1.6, "oppo": 1.9}
UTILIZATION = {"trl": 0.506, "oppo": 0.710}
HIDDEN = 0.17  # share of the step that streaming hides
BEST_CHUNK = 500  # tokens; both 100 and 1,000 to 3,000 are slower in the paper


row = partial(Row, "oppo")


def section(_: Options) -> Section:
    """Every figure (about ten seconds)."""
    return published_section("oppo", rows(run("oppo_7b"), run("oppo_chunk_size")))


def rows(placed: Result, chunks: Result) -> Iterator[Row]:
    """Every figure with rlsim's value."""
    summary = placed.summary().set_index("system")
    speedups, step_s = summary["speedup"].to_dict(), summary["step_time_s"].to_dict()
    for system, published in SPEEDUPS.items():
        yield row(system, "speedup", published, speedups[system])
    hidden = 1 - step_s["intra-step"] / step_s["trl"]
    yield row("intra-step", "share of the step hidden", HIDDEN, hidden)
    for system, published in UTILIZATION.items():
        yield row(system, "GPUs busy in generation and scoring", published, busy_share(placed, system))
    by_size = chunk_seconds(chunks)
    best = min(by_size, key=lambda size: by_size[size])
    spread = f"fastest: {best}; " + ", ".join(f"{c}: {by_size[c] / by_size[best]:.3f}" for c in sorted(by_size))
    lost = by_size[BEST_CHUNK] / by_size[best]
    yield row("chunk-size", f"time at {BEST_CHUNK} tokens over the fastest", 1.0, lost, spread)


def chunk_seconds(result: Result) -> dict[int, float]:
    """Mean seconds of a step by chunk size."""
    steps = result.summary().set_index("system")["step_time_s"]
    return {int(str(name).rpartition("size")[2]): float(s) for name, s in steps.items() if "size" in str(name)}


def busy_share(result: Result, system: str) -> float:
    """Share of GPU time from the start of generation to the last score in which a GPU decodes, prefills or scores."""
    gpus = int(result.manifest["cluster"]["nodes"]) * int(result.manifest["cluster"]["gpus_per_node"])
    calls, spans = (frame[frame["system"] == system] for frame in (result.calls, result.spans))
    ends = calls[calls["call"] == "reward_score"].set_index(["seed", "step"])["end_at"]
    starts = calls[calls["call"] == "generate"].set_index(["seed", "step"])["start_at"]
    at_work = spans[spans["kind"].isin(["decode", "prefill", "mixed", "reward_score"])]
    keys = list(zip(at_work["seed"], at_work["step"], strict=True))
    seconds = np.minimum(at_work["end_at"], ends.loc[keys].to_numpy()) - at_work["start_at"]
    return float((seconds.clip(lower=0) * at_work["gpus"]).sum() / (gpus * (ends - starts).sum()))
