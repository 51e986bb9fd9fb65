"""Part `oppo`: OPPO's published figures (SYSTEMS: overlap for PPO) beside rlsim's."""

from __future__ import annotations

from evidence.validate.parts import Options, Section
from evidence.validate.published import busy_share, figures, published_section, told
from evidence.validate.rows import markdown
from rlsim.experiment.result import Result


def section(options: Options) -> Section:
    """Every figure (about ten seconds), and the seconds of a step by chunk size."""
    results = figures(options, "oppo").results()
    found = {name: told(result) for name, result in results.items()}
    minutes = {"shipped": "placed", **{name: name for name in ("eager", "padded", "fours")}}  # 4,300 of TRL's
    found["implied"] = {name: 4300 * 60 / found[run]["trl"]["step_time_s"] for name, run in minutes.items()}
    found["busy"] = {system: busy(results["placed"], system) for system in ("trl", "oppo")}
    sizes = {name.rpartition("size")[2]: own["step_time_s"] for name, own in found["sizes"].items() if "size" in name}
    cells = [(f"{int(size):,}", f"{sizes[size]:.2f}") for size in sorted(sizes, key=int)]
    chunks = markdown(("tokens of a chunk", "step s"), cells)
    return published_section(options, "oppo", found, chunks=chunks)


def busy(result: Result, system: str) -> float:
    """Share of all GPUs that decode, prefill or score."""
    gpus = int(result.manifest["cluster"]["nodes"]) * int(result.manifest["cluster"]["gpus_per_node"])
    calls, spans = (frame[frame["system"] == system] for frame in (result.calls, result.spans))
    return busy_share(calls, spans, "reward_score", ("decode", "prefill", "mixed", "reward_score"), gpus)
