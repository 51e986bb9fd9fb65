"""Part `pat`: PAT's published figures (SYSTEMS: PAT and veRL) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evidence.validate.parts import Options, Section
from evidence.validate.published import published_section
from evidence.validate.rows import markdown
from evidence.validate.runs import run
from rlsim.cost.calibration import load_calibration
from rlsim.cost.flops import forward_flops
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import step_cost
from rlsim.cost.transfer import switch_peak_bytes
from rlsim.experiment.build import find_trace
from rlsim.experiment.result import Result
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.trace import read_trace

SWITCH_CONTEXTS = [12 * 1024] * 9  # "12K context, 9 sequences"
A40_ENGINE = "a40-sglang"
STATIC = ("verl-tp1", "verl-tp2", "verl-tp4", "verl-tp8")
CAP_TOKENS, RESPONSES = 16 * 1024, 128
#: By TP: replicas, and the published milliseconds of a decode step with a batch of so many in each.
LATENCIES_MS = {2: (4, {1: 15.37, 32: 24.41}), 8: (1, {1: 9.64, 128: 30.87})}
SWITCH_S = 5.52  # published, from TP2 to TP8
#: PAT as its authors have it: responses are dealt anew at a switch alone.
PUBLISHED = [{"verl": {"tp": [1, 2, 4, 8, "best"]}}, {"name": "pat", "use": [{"pat": {"redispatch": False}}]}]
FROM_SMALL_TP = [{"name": f"pat-tp{tp}", "use": [{"pat": {"start_tp": tp, "redispatch": False}}]} for tp in (1, 2)]


def section(options: Options) -> Section:
    """Every figure (about a minute): under SGLang, the engine of PAT's runs, and under vLLM, veRL's default."""
    calibrations = {"sglang": ({}, {}), "vllm": ({"calibration": "h100-vllm"}, {"calibration": "a40-vllm"})}
    found, static = dict[str, Any](), list[tuple[str, ...]]()
    for engine, (h100, a40) in calibrations.items():
        vs_static = run("pat_vs_static", overrides={**h100, "systems": [*PUBLISHED, *FROM_SMALL_TP]})
        results = vs_static, run("pat_a40", overrides={**a40, "systems": PUBLISHED})
        found[engine] = engine_values(*results)
        static += _static(results, {"sglang": "SGLang", "vllm": "vLLM"}[engine])
    model = load_model("llama-3.1-8b")
    found |= _inputs() | {"tflops": _tflops(), "latencies": latencies()}
    held = {name: switch_peak_bytes(model, sum(SWITCH_CONTEXTS), 2, 8, layerwise=way)
            for name, way in (("layer_wise", True), ("full_move", False))}  # fmt: skip
    headings = ("setting", "system", "gen s", "step s", "PAT's gen speedup", "PAT's step speedup", "bubble", "switches")
    return published_section(options, "pat", found | {"memory": held}, static=markdown(headings, static))


def engine_values(h100: Result, a40: Result) -> dict[str, Any]:
    """Means by system of one engine's runs, for the steps that PAT's figures are of, and the fastest static TP."""
    cases = {"h100": means_at_cap(h100, ""), "a40_6k": means_at_cap(a40, "6K"), "a40_16k": means_at_cap(a40, "16K")}
    for mean in cases.values():
        mean["best"] = min((mean[name] for name in STATIC if name in mean), key=lambda one: one["step_time_s"])
    return cases


def means(result: Result) -> dict[Any, Any]:
    """The numbers of the summary by case and system."""
    return result.summary().set_index(["case", "system"]).to_dict("index")


def means_at_cap(result: Result, case: str) -> dict[Any, Any]:
    """Means by system of a case over the steps that PAT's figures are of: with a response that reaches the cap."""
    steps = result.steps[result.steps["case"] == case]
    reached = steps["longest_tokens"] == steps["longest_tokens"].max()
    found: dict[Any, Any] = steps[reached].groupby("system", sort=False).mean(numeric_only=True).to_dict("index")
    return found


def _inputs() -> dict[str, Any]:
    """What may be fitted: decode steps, shares of the trace, the parts of a switch."""
    cluster, model = load_cluster("8xa40"), load_model("llama-3.1-8b")
    costs = RolloutCostModel(model, cluster, load_calibration(A40_ENGINE))
    steps = {
        f"tp{tp}_{batch}": costs.step(tp).decode(batch).step_s(batch * 1024)
        for tp, (_, known) in LATENCIES_MS.items() for batch in known
    }  # fmt: skip
    lengths = read_trace(find_trace("deepscaler-llama-3.1-8b", Path())).frame["response_tokens"].to_numpy()
    shares = {f"above_{above}": float((lengths > above).mean()) for above in (8192, 16384)}
    switch = costs.switch(8, 2, 8, SWITCH_CONTEXTS, len(SWITCH_CONTEXTS), "migrate", first_use=False)
    parts = {name: getattr(switch, name) for name in ("weights_s", "kv_s", "graph_s", "total_s")}
    return {"a40": steps, "trace": shares, "switch": parts}


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
        flops = replicas * batch * (forward_flops(model, [context + 1]) - forward_flops(model, [context]))
        found[name] = flops / step.decode(batch).step_s(batch * context) / cluster.gpus / 1e12
    return found


def _static(results: Iterable[Result], engine: str) -> Iterator[tuple[str, ...]]:
    for result in results:
        mean, cap = means(result), result.manifest["experiment"]["trace"]["cap"]
        for (case, system), own in mean.items():
            ratios = [own[name] / mean[case, "pat"][name] for name in ("gen_time_s", "step_time_s")]
            yield (
                f"{result.manifest['cluster']['name']}, {engine}, cap {case or f'{cap // 1024}K'}",
                system,
                *(f"{own[name]:.1f}" for name in ("gen_time_s", "step_time_s")),
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{own['bubble_fraction']:.0%}",
                f"{own['switches']:.1f}",
            )
