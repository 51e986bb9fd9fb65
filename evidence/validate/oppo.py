"""Part `oppo`: OPPO's published figures (SYSTEMS: overlap for PPO) beside rlsim's."""

from __future__ import annotations

import numpy as np

from evidence.validate.parts import Options, Section
from evidence.validate.published import figures, published_section, told
from evidence.validate.rows import markdown
from rlsim.experiment.result import Result


def section(options: Options) -> Section:
    """Every figure (about ten seconds), and the seconds of a step by chunk size."""
    results = figures(options, "oppo").results()
    found = {name: told(result) for name, result in results.items()}
    minutes = {"shipped": "placed", **{name: name for name in ("eager", "padded", "fours")}}  # 4,300 of TRL's
    found["implied"] = {name: 4300 * 60 / found[run]["trl"]["step_time_s"] for name, run in minutes.items()}
    found["busy"] = {system: busy_share(results["placed"], system) for system in ("trl", "oppo")}
    sizes = {name.rpartition("size")[2]: own["step_time_s"] for name, own in found["sizes"].items() if "size" in name}
    cells = [(f"{int(size):,}", f"{sizes[size]:.2f}") for size in sorted(sizes, key=int)]
    chunks = markdown(("tokens of a chunk", "step s"), cells)
    return published_section(options, "oppo", found, chunks=chunks)


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
