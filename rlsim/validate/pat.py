"""Part `pat`: PAT's published figures (SYSTEMS: PAT and veRL) beside rlsim's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rlsim.cost.calibration import load_calibration
from rlsim.cost.machine import Machine
from rlsim.cost.profile import profile_of
from rlsim.cost.roofline import step_cost
from rlsim.cost.train import forward_flops
from rlsim.cost.transfer import switch_peak_bytes
from rlsim.experiment.build import find_trace
from rlsim.experiment.result import Result
from rlsim.experiment.run import run
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.policies.pat import BATCHES, CONTEXTS
from rlsim.trace import read_trace
from rlsim.validate.charts import errors_chart
from rlsim.validate.parts import Options, Section
from rlsim.validate.rows import Row, markdown, summarise, table

SWITCH_CONTEXTS = [12 * 1024] * 9  # "12K context, 9 sequences"
A40_ENGINE = "a40-sglang"
STATIC = ("verl-tp1", "verl-tp2", "verl-tp4", "verl-tp8")


row = partial(Row, "pat")

_INTRODUCTION = """\
LLaMA-3.1-8B, GRPO, 128 responses a step.

"""
_READING = """\

How to read it:

- **The baseline.** PAT's authors compare with a tuned static TP without naming it. On eight H100s the static TP whose
  generation time is near the published 134.3 s is TP2. Measured kernels say that static TP4 and TP8 are much faster
  there, so against the *tuned* best little or nothing of the gain remains (next table). On A40s the published latencies
  themselves favour larger TP in the tail.
- **The engine** is SGLang 0.4.8 (with veRL 0.4.1), so the shipped experiments run under SGLang's calibration, fitted
  to later releases; rows with `-vllm` are the same experiments under vLLM's, veRL's default. What is between the two on
  H100 is host time per sequence (15 µs against 47 µs), and attention. On A40 only prompt attention and host time
  differ: PAT's own latencies leave no host time for SGLang there, and vLLM's is that of H100.
- **Which steps.** PAT's figures are means of five steps in which at least one response reaches the cap. So are rlsim's
  in this table; the other tables are over all steps.
- **Throughput** counts the tokens that a step generates, without prompts.
- **Time outside generation.** The published step leaves 38 s for log-probs, training and weight sync. Its training
  setup (packing, offload, micro-batches, mini-batches) is not described; rlsim's, packed sequences under FSDP with
  Ulysses where veRL needs it to start, at the efficiency of measured veRL steps, is faster, and that efficiency rests
  on few rows ([calibration.md](calibration.md#training-efficiency)). It moves step times, tokens/s, shares and step
  speedups; generation times are not touched by it.
- **Generated tokens** of a step are not fitted either: they check the shape of the trace, of which two exceedances are
  published.
- **Back to the first layout.** Every step starts in PAT's first layout again. That is charged as part of the weight
  sync; whether the decode graphs of that layout survive the switch is not published. If they do not, each step begins
  with another pause ("recaptures" under [what decides](#what-decides-between-pat-and-the-tuned-static-tp)), which takes
  most of the gain over the tuned best away.
- **PAT's comparison.** The published rule predicts the remaining time "under the current layout". rlsim compares
  layouts with the sequences spread evenly over their replicas, the present one too. Taking the replicas as they happen
  to be (`spread: actual`) makes an imbalance of the moment look like a reason to switch: many more switches, and a loss
  (there too, "as they are"). This reading is rlsim's, not the paper's.
- **A40 links.** The all-reduce of 2 and 4 GPUs is Vidur's, from another machine; that of 8 GPUs is solved from PAT's
  own latencies. The order of TP4 and TP8 there, and with it PAT's preference for TP4, is no better than that.
- **Layer-wise switch memory**: which buffers count was decided with the published figures in view, so this row is no
  blind prediction.
- **Predictor**: rlsim's PAT interpolates a profile of rlsim's own step times, so its error has no measurement noise.
"""
_STATIC = """\

### PAT beside every static TP

Seconds a step; speedup > 1 means that PAT is faster. `bubble` is the share of GPU time in which a GPU does nothing:
at TP8 there is one replica, so no GPU is idle while the tail runs, however badly it is used.

"""


@dataclass(frozen=True)
class Runs:
    """The results of the two shipped experiments under one engine."""

    h100: Result
    a40: Result


def section(_: Options) -> Section:
    """Every figure (about a minute)."""
    runs = run_experiments()
    found = tuple(rows(runs))
    text = "".join((_INTRODUCTION, table(found), _READING, _STATIC, _static(runs.values())))
    return Section(found, tuple(summarise(found, depth=1)), text, chart=errors_chart(found))


def rows(runs: Mapping[str, Runs]) -> Iterator[Row]:
    """All of PAT's open figures; `runs` by what their engine adds to the name of a case (nothing for PAT's own)."""
    yield from _inputs()
    for engine, results in runs.items():
        yield from _h100(results.h100, engine)
        yield from _a40(results.a40, engine)
    yield from _tflops()
    yield from _memory()
    yield from _predictor()


def run_experiments() -> dict[str, Runs]:
    """The results that `rows` takes: SGLang, the engine of PAT's runs, and vLLM, veRL's default."""
    return {
        "": Runs(run("pat_vs_static"), run("pat_a40")),
        "-vllm": Runs(
            run("pat_vs_static", overrides={"calibration": "h100-vllm"}),
            run("pat_a40", overrides={"calibration": "a40-vllm"}),
        ),
    }


def _a40_machine() -> Machine:
    cluster, model = load_cluster("8xa40"), load_model("llama-3.1-8b")
    return Machine(model, cluster, load_calibration(A40_ENGINE))


def _inputs() -> Iterator[Row]:
    machine = _a40_machine()
    for tp, batch, published_ms in ((2, 1, 15.37), (8, 1, 9.64), (2, 32, 24.41), (8, 128, 30.87)):
        step_s = machine.step(tp).decode(batch).step_s(batch * 1024)
        used = "fixes the 8-GPU all-reduce" if tp == 8 else "not used in the fit"
        yield row(f"a40-tp{tp}", f"decode_step_s at {batch} per replica", "input", published_ms / 1e3, step_s, used)
    trace = read_trace(find_trace("deepscaler-llama-3.1-8b", Path()))
    lengths = trace.frame["response_tokens"].to_numpy()
    for above, published in ((8192, 0.1085), (16384, 0.0218)):
        yield row("trace", f"share above {above} tokens", "input", published, float((lengths > above).mean()))
    switch = machine.switch(2, 8, SWITCH_CONTEXTS, len(SWITCH_CONTEXTS), "migrate", first_use=False)
    for name, published, simulated in (
        ("weights_s", 1.03, switch.weights_s),
        ("kv_s", 2.36, switch.kv_s),
        ("graph_s", 0.73, switch.graph_s),
        ("total_s", 5.52, switch.total_s),
    ):
        note = "from the naive recapture of 23 sizes, 3.59 s" if name == "graph_s" else ""
        yield row("a40-switch-tp2-tp8", name, "input", published, simulated, note)


def means(result: Result) -> dict[tuple[str, str], dict[str, float]]:
    """The numbers of the summary by case and system."""
    summary = result.summary().set_index(["case", "system"])
    return {(str(key[0]), str(key[1])): dict(summary.loc[key]) for key in summary.index}


def means_at_cap(result: Result) -> dict[tuple[str, str], dict[str, float]]:
    """Means by case and system over the steps that PAT's figures are of: those with a response that reaches the cap."""
    steps = result.steps
    reached = steps["longest_tokens"] == steps.groupby("case")["longest_tokens"].transform("max")
    mean = steps[reached].groupby(["case", "system"], sort=False).mean(numeric_only=True)
    return {(str(key[0]), str(key[1])): dict(mean.loc[key]) for key in mean.index}


def _h100(result: Result, engine: str) -> Iterator[Row]:
    """Speedups are those over static TP2, whose absolute time is near the published baseline's.

    Published throughput counts the tokens that a step generates, without prompts.
    """
    mean = means_at_cap(result)
    static, pat = mean["", "verl-tp2"], mean["", "pat"]
    tokens = pat["response_tokens"]
    verl, case, named = f"h100-24k{engine}-verl", f"h100-24k{engine}", "static TP2"
    yield row(verl, "gen_time_s", "output", 134.3, static["gen_time_s"], named)
    yield row(case, "gen_time_s", "output", 87.9, pat["gen_time_s"])
    yield row(case, "gen_speedup", "output", 134.3 / 87.9, static["gen_time_s"] / pat["gen_time_s"], f"over {named}")
    yield row(verl, "step_time_s", "output", 172.5, static["step_time_s"], named)
    yield row(case, "step_time_s", "output", 125.6, pat["step_time_s"])
    yield row(case, "speedup", "output", 1.37, static["step_time_s"] / pat["step_time_s"], f"over {named}")
    other_s = static["step_time_s"] - static["gen_time_s"]
    yield row(verl, "step_minus_gen_s", "output", 172.5 - 134.3, other_s, "its training stack is not described")
    yield row(verl, "generated tokens", "output", 2570.6 * 172.5, tokens, "published tokens/s x step time")
    yield row(verl, "generated_tokens_per_s", "output", 2570.6, tokens / static["step_time_s"])
    yield row(case, "generated_tokens_per_s", "output", 3510.9, tokens / pat["step_time_s"])


def _a40(result: Result, engine: str) -> Iterator[Row]:
    mean = means_at_cap(result)
    for cap, share, speedup in (("6K", 0.642, 1.05), ("16K", 0.817, 1.27)):
        case = f"a40-{cap.lower()}{engine}"
        static, pat = mean[cap, "verl-tp2"], mean[cap, "pat"]
        best_s = min(mean[cap, name]["step_time_s"] for name in STATIC if (cap, name) in mean)
        simulated = static["gen_time_s"] / static["step_time_s"]
        yield row(f"{case}-verl", "generation share", "output", share, simulated, "static TP2")
        yield row(case, "speedup", "output", speedup, static["step_time_s"] / pat["step_time_s"], "over static TP2")
        yield row(case, "speedup", "output", speedup, best_s / pat["step_time_s"], "over the tuned best")


def _tflops() -> Iterator[Row]:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xa40")
    step = step_cost(model, 2, cluster, A40_ENGINE)
    for name, published, batch, replicas, context in (("aligned", 13.71, 32, 4, 1024), ("tail-end", 0.11, 1, 1, 16384)):
        flops = replicas * batch * (forward_flops(model, [context + 1]) - forward_flops(model, [context]))
        tflops = flops / step.decode(batch).step_s(batch * context) / cluster.gpus / 1e12
        yield row(f"a40-{name}", "decode TFLOP/s per GPU", "output", published, tflops, f"TP2, context {context}")


def _memory() -> Iterator[Row]:
    model = load_model("llama-3.1-8b")
    for layerwise, published in ((True, 2.5e9), (False, 14e9)):
        simulated = switch_peak_bytes(model, sum(SWITCH_CONTEXTS), 2, 8, layerwise=layerwise)
        name = "layer-wise" if layerwise else "full move"
        yield row(f"a40-switch-{name.replace(' ', '-')}", "extra peak bytes", "output", published, simulated)


def _predictor() -> Iterator[Row]:
    """Mean error of the profile's decode steps along a draining batch; the truth here is rlsim's own step cost."""
    machine = _a40_machine()
    for tp, published in ((2, 0.0404), (8, 0.0307)):
        step = machine.step(tp)
        profile = profile_of(step, BATCHES, CONTEXTS, machine.capacity_pages(tp) * machine.page_tokens)
        errors = []
        for batch in range(1, 128 * tp // 8 + 1):
            for context in (700, 1800, 5000, 11000):
                truth = step.decode(batch).step_s(batch * context)
                errors.append(abs(profile.decode(batch).step_s(batch * context) / truth - 1))
        yield row(
            f"a40-predictor-tp{tp}", "mean error", "output", published, float(np.mean(errors)), "interpolation only"
        )


def _static(runs: Iterable[Runs]) -> str:
    rows = []
    for result in (result for both in runs for result in (both.h100, both.a40)):
        engine = {"sglang": "SGLang", "vllm": "vLLM"}[
            str(result.manifest["experiment"]["calibration"]).rpartition("-")[2]
        ]
        cluster = f"{result.manifest['cluster']['name']}, {engine}"
        mean = means(result)
        for (case, system), own in mean.items():
            best = mean[case, "pat"]
            rows.append(
                (
                    f"{cluster}, cap {case or result.manifest['experiment']['trace']['cap'] // 1024}"
                    + ("" if case else "K"),
                    system,
                    f"{own['gen_time_s']:.1f}",
                    f"{own['step_time_s']:.1f}",
                    f"{own['gen_time_s'] / best['gen_time_s']:.2f}",
                    f"{own['step_time_s'] / best['step_time_s']:.2f}",
                    f"{own['bubble_fraction']:.0%}",
                    f"{own['switches']:.1f}",
                )
            )
    headings = ("setting", "system", "gen s", "step s", "PAT's gen speedup", "PAT's step speedup", "bubble", "switches")
    return markdown(headings, rows)
