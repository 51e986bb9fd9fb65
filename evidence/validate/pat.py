"""Part `pat`: PAT's published figures (SYSTEMS: PAT and veRL) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from evidence.validate.parts import Options, Section
from evidence.validate.published import figures, published_section, told
from evidence.validate.rows import markdown
from rlsim.cost.calibration import load_calibration
from rlsim.cost.flops import forward_flops
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import Chunk
from rlsim.cost.transfer import IN_PLACE, RESTART, SwitchWay
from rlsim.experiment.build import find_trace
from rlsim.experiment.result import Result
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.trace import read_trace

SWITCH_CONTEXTS = [12 * 1024] * 9  # "12K context, 9 sequences"
A40_ENGINE = "a40-sglang"
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
CAP_TOKENS, RESPONSES = 16 * 1024, 128
#: By TP: replicas, and the published milliseconds of a decode step with a batch of so many in each.
LATENCIES_MS = {2: (4, {1: 15.37, 32: 24.41}), 8: (1, {1: 9.64, 128: 30.87})}
SWITCH_S = 5.52  # published, from TP2 to TP8


def section(options: Options) -> Section:
    """Every figure (about a minute)."""
    results = figures(options, "pat").results()
    found: dict[str, Any] = {name: told(result) for name, result in results.items()}
    of_engine = {name: engine for name in results if (engine := name.split("_")[0]) in ENGINES}
    static = [cells for name, engine in of_engine.items() for cells in _static(found[name], results[name], engine)]
    found |= _inputs() | {"tflops": _tflops(), "latencies": latencies()}
    headings = ("setting", "system", "gen s", "step s", "PAT's gen speedup", "PAT's step speedup", "bubble", "switches")
    return published_section(options, "pat", found, static=markdown(headings, static))


def _inputs() -> dict[str, Any]:
    """What may be fitted: decode steps, shares of the trace, the parts of a switch; and its memory."""
    cluster, model = load_cluster("8xa40"), load_model("llama-3.1-8b")
    costs = RolloutCostModel(model, cluster, load_calibration(A40_ENGINE))
    steps = {
        f"tp{tp}_{batch}": costs.step(tp).decode(batch).step_s(batch * 1024)
        for tp, (_, known) in LATENCIES_MS.items() for batch in known
    }  # fmt: skip
    lengths = read_trace(find_trace("deepscaler-llama-3.1-8b", Path())).frame["response_tokens"].to_numpy()
    shares = {f"above_{above}": float((lengths > above).mean()) for above in (8192, 16384)}
    found: dict[str, Any] = {"a40": steps, "trace": shares}
    for name, way in {"switch": IN_PLACE, "gather": SwitchWay("gather"), "restart": RESTART}.items():
        kv = "recompute" if way.restart else "migrate"
        cost = costs.switch(8, 2, 8, SWITCH_CONTEXTS, len(SWITCH_CONTEXTS), kv, False, way)
        found[name] = {**asdict(cost), "total_s": cost.total_s}
    found["restart"]["prefill_s"] = costs.step(8).prefill_s([Chunk(tokens, 0) for tokens in SWITCH_CONTEXTS])
    return found


def latencies(seeds: int = 20) -> dict[str, float]:
    """Mean seconds of a generation by the paper's latencies alone (at every context): static TPs, PAT's best switch."""
    tokens = read_trace(find_trace("deepscaler-llama-3.1-8b", Path())).frame["response_tokens"].clip(upper=CAP_TOKENS)
    found = []
    for seed in range(seeds):
        lengths = tokens.sample(RESPONSES, random_state=seed).to_numpy()
        ends = {
            tp: _ends(lengths, tp) for tp in LATENCIES_MS
        }  # seconds by which so many tokens of the longest are done
        left = ends[8][-1] - ends[8]
        found.append((ends[2][-1], ends[8][-1], min((ends[2] + SWITCH_S + left).min(), ends[8][-1], ends[2][-1])))
    tp2_s, tp8_s, pat_s = np.mean(found, axis=0)
    return {"tp2_s": tp2_s, "tp8_s": tp8_s, "best_s": min(tp2_s, tp8_s), "pat_s": pat_s}


def _ends(lengths: Any, tp: int) -> Any:
    """When each token of the longest response is there; the replica with most responses left is the slowest."""
    replicas, known = LATENCIES_MS[tp]
    steps = np.arange(lengths.max())
    active = np.max([(share[:, None] > steps).sum(axis=0) for share in np.array_split(lengths, replicas)], axis=0)
    return np.cumsum(np.interp(active, list(known), list(known.values()))) / 1e3


def _tflops() -> dict[str, float]:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xa40")
    step, found = step_cost(model, 2, cluster, A40_ENGINE), {}
    for name, batch, replicas, context in (("aligned", 32, 4, 1024), ("tail_end", 1, 1, 16384)):
        per_s = replicas * batch / step.decode(batch).step_s(batch * context) / cluster.gpus / 1e12
        for of, tokens in ((name, context), (f"{name}_products", 0)):  # those of attention grow with the context
            found[of] = (forward_flops(model, [tokens + 1]) - forward_flops(model, [tokens])) * per_s
    return found


def _static(found: dict[str, Any], result: Result, engine: str) -> Iterator[tuple[str, ...]]:
    cap = result.manifest["experiment"]["trace"]["cap"]
    for case, systems in ({"": found} if "pat" in found else found).items():
        for system, own in systems.items():
            ratios = [own[name] / systems["pat"][name] for name in ("gen_time_s", "step_time_s")]
            yield (
                f"{result.manifest['cluster']['name']}, {ENGINES[engine]}, cap {case or f'{cap // 1024}K'}",
                system,
                *(f"{own[name]:.1f}" for name in ("gen_time_s", "step_time_s")),
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{own['bubble_fraction']:.0%}",
                f"{own['switches']:.1f}",
            )
