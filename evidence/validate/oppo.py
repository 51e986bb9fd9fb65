"""Part `oppo`: OPPO's published figures (SYSTEMS: overlap for PPO) beside rlsim's."""

from __future__ import annotations

from typing import Any

import numpy as np

from evidence.validate.parts import Options, Section
from evidence.validate.published import published_section
from evidence.validate.rows import markdown
from evidence.validate.runs import run
from rlsim.experiment.result import Result


def section(options: Options) -> Section:
    """Every figure (about ten seconds), and the seconds of a step by chunk size."""
    # The paper's figures are of a training from its start, overcommit's growth included.
    every = {"workflow.warmup": 0, "systems.2.use.1": "overcommit", "systems.3.use.2": "overcommit"}
    placed, by_size = run("oppo_7b", overrides=every), chunk_seconds(run("oppo_chunk_size"))
    busy = {system: busy_share(placed, system) for system in ("trl", "oppo")}
    found: dict[Any, Any] = placed.summary().set_index("system").to_dict("index") | {"busy": busy}
    cells = [(f"{size:,}", f"{by_size[size]:.2f}") for size in sorted(by_size)]
    chunks = markdown(("tokens of a chunk", "step s"), cells)
    return published_section(options, "oppo", found, chunks=chunks)


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
