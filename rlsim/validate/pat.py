"""Part `pat`: PAT's published figures (SYSTEMS: PAT and veRL) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlsim.cost.calibration import load_calibration
from rlsim.cost.flops import forward_flops
from rlsim.cost.profile import profile_of
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import step_cost
from rlsim.cost.transfer import switch_peak_bytes
from rlsim.experiment.build import find_trace
from rlsim.experiment.result import Result
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.policies.pat import BATCHES, CONTEXTS
from rlsim.trace import read_trace
from rlsim.validate.parts import Options, Section
from rlsim.validate.published import published_section
from rlsim.validate.rows import Row, markdown
from rlsim.validate.runs import run

SWITCH_CONTEXTS = [12 * 1024] * 9  # "12K context, 9 sequences"
A40_ENGINE = "a40-sglang"
STATIC = ("verl-tp1", "verl-tp2", "verl-tp4", "verl-tp8")

row = partial(Row, "pat")


def section(_: Options) -> Section:
    """Every figure (about a minute): under SGLang, the engine of PAT's runs, and under vLLM, veRL's default."""
    sglang = run("pat_vs_static"), run("pat_a40")
    vllm = tuple(
        run(name, overrides={"calibration": calibration})
        for name, calibration in (("pat_vs_static", "h100-vllm"), ("pat_a40", "a40-vllm"))
    )
    found = [*_inputs()]
    for engine, (h100, a40) in (("", sglang), ("-vllm", vllm)):
        found += [*_h100(h100, engine), *_a40(a40, engine)]
    found += [*_tflops(), *_memory(), *_predictor()]
    static = [*_static(sglang, "SGLang"), *_static(vllm, "vLLM")]
    headings = ("setting", "system", "gen s", "step s", "PAT's gen speedup", "PAT's step speedup", "bubble", "switches")
    return published_section("pat", found, static=markdown(headings, static))


def _a40_costs() -> RolloutCostModel:
    cluster, model = load_cluster("8xa40"), load_model("llama-3.1-8b")
    return RolloutCostModel(model, cluster, load_calibration(A40_ENGINE))


def _inputs() -> Iterator[Row]:
    costs = _a40_costs()
    for tp, batch, published_ms in ((2, 1, 15.37), (8, 1, 9.64), (2, 32, 24.41), (8, 128, 30.87)):
        step_s = costs.step(tp).decode(batch).step_s(batch * 1024)
        used = "fixes the 8-GPU all-reduce" if tp == 8 else "not used in the fit"
        yield row(f"a40-tp{tp}", f"decode_step_s at {batch} per replica", published_ms / 1e3, step_s, used, "input")
    trace = read_trace(find_trace("deepscaler-llama-3.1-8b", Path()))
    lengths = trace.frame["response_tokens"].to_numpy()
    for above, published in ((8192, 0.1085), (16384, 0.0218)):
        yield row("trace", f"share above {above} tokens", published, float((lengths > above).mean()), kind="input")
    switch = costs.switch(8, 2, 8, SWITCH_CONTEXTS, len(SWITCH_CONTEXTS), "migrate", first_use=False)
    for name, published, simulated in (
        ("weights_s", 1.03, switch.weights_s),
        ("kv_s", 2.36, switch.kv_s),
        ("graph_s", 0.73, switch.graph_s),
        ("total_s", 5.52, switch.total_s),
    ):
        note = "from the naive recapture of 23 sizes, 3.59 s" if name == "graph_s" else ""
        yield row("a40-switch-tp2-tp8", name, published, simulated, note, "input")


def means(result: Result) -> dict[Any, Any]:
    """The numbers of the summary by case and system."""
    return result.summary().set_index(["case", "system"]).to_dict("index")


def means_at_cap(result: Result) -> dict[Any, Any]:
    """Means by case and system over the steps that PAT's figures are of: those with a response that reaches the cap."""
    steps = result.steps
    reached = steps["longest_tokens"] == steps.groupby("case")["longest_tokens"].transform("max")
    return steps[reached].groupby(["case", "system"], sort=False).mean(numeric_only=True).to_dict("index")


def _h100(result: Result, engine: str) -> Iterator[Row]:
    """Speedups are those over static TP2, whose absolute time is near the published baseline's.

    Published throughput counts the tokens that a step generates, without prompts.
    """
    mean = means_at_cap(result)
    static, pat = mean["", "verl-tp2"], mean["", "pat"]
    tokens = pat["response_tokens"]
    verl, case, named = f"h100-24k{engine}-verl", f"h100-24k{engine}", "static TP2"
    yield row(verl, "gen_time_s", 134.3, static["gen_time_s"], named)
    yield row(case, "gen_time_s", 87.9, pat["gen_time_s"])
    yield row(case, "gen_speedup", 134.3 / 87.9, static["gen_time_s"] / pat["gen_time_s"], f"over {named}")
    yield row(verl, "step_time_s", 172.5, static["step_time_s"], named)
    yield row(case, "step_time_s", 125.6, pat["step_time_s"])
    yield row(case, "speedup", 1.37, static["step_time_s"] / pat["step_time_s"], f"over {named}")
    other_s = static["step_time_s"] - static["gen_time_s"]
    yield row(verl, "step_minus_gen_s", 172.5 - 134.3, other_s, "its training stack is not described")
    yield row(verl, "generated tokens", 2570.6 * 172.5, tokens, "published tokens/s x step time")
    yield row(verl, "generated_tokens_per_s", 2570.6, tokens / static["step_time_s"])
    yield row(case, "generated_tokens_per_s", 3510.9, tokens / pat["step_time_s"])


def _a40(result: Result, engine: str) -> Iterator[Row]:
    mean = means_at_cap(result)
    for cap, share, speedup in (("6K", 0.642, 1.05), ("16K", 0.817, 1.27)):
        case = f"a40-{cap.lower()}{engine}"
        static, pat = mean[cap, "verl-tp2"], mean[cap, "pat"]
        best_s = min(mean[cap, name]["step_time_s"] for name in STATIC if (cap, name) in mean)
        simulated = static["gen_time_s"] / static["step_time_s"]
        yield row(f"{case}-verl", "generation share", share, simulated, "static TP2")
        yield row(case, "speedup", speedup, static["step_time_s"] / pat["step_time_s"], "over static TP2")
        yield row(case, "speedup", speedup, best_s / pat["step_time_s"], "over the tuned best")


def _tflops() -> Iterator[Row]:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xa40")
    step = step_cost(model, 2, cluster, A40_ENGINE)
    for name, published, batch, replicas, context in (("aligned", 13.71, 32, 4, 1024), ("tail-end", 0.11, 1, 1, 16384)):
        flops = replicas * batch * (forward_flops(model, [context + 1]) - forward_flops(model, [context]))
        tflops = flops / step.decode(batch).step_s(batch * context) / cluster.gpus / 1e12
        yield row(f"a40-{name}", "decode TFLOP/s per GPU", published, tflops, f"TP2, context {context}")


def _memory() -> Iterator[Row]:
    model = load_model("llama-3.1-8b")
    for layerwise, published in ((True, 2.5e9), (False, 14e9)):
        simulated = switch_peak_bytes(model, sum(SWITCH_CONTEXTS), 2, 8, layerwise=layerwise)
        name = "layer-wise" if layerwise else "full move"
        yield row(f"a40-switch-{name.replace(' ', '-')}", "extra peak bytes", published, simulated)


def _predictor() -> Iterator[Row]:
    """Mean error of the profile's decode steps along a draining batch; the truth here is rlsim's own step cost."""
    costs = _a40_costs()
    for tp, published in ((2, 0.0404), (8, 0.0307)):
        step = costs.step(tp)
        profile = profile_of(step, BATCHES, CONTEXTS, costs.capacity_pages(tp) * costs.page_tokens)
        errors = []
        for batch in range(1, 128 * tp // 8 + 1):
            for context in (700, 1800, 5000, 11000):
                truth = step.decode(batch).step_s(batch * context)
                errors.append(abs(profile.decode(batch).step_s(batch * context) / truth - 1))
        yield row(f"a40-predictor-tp{tp}", "mean error", published, float(np.mean(errors)), "interpolation only")


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
