"""Part `sensitivity`: how far the published figures depend on what the papers leave open, one input at a time."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsim import catalogue
from rlsim.cost.calibration import load_calibration
from rlsim.experiment.build import find_trace
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.hardware import load_cluster
from rlsim.trace.files import write_trace
from rlsim.trace.generate import Recipe, draw_trace, load_recipe
from rlsim.validate import oppo, pat, real, rollpacker
from rlsim.validate.parts import Options, Section
from rlsim.validate.published import filled_text
from rlsim.validate.rows import markdown
from rlsim.validate.runs import run

#: What is changed, in words, and the settings that change it.
Changes = Mapping[str, Mapping[str, Any]]


def section(options: Options) -> Section:
    """Every setting of every system (about five minutes)."""
    options.progress("sensitivity: PAT")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        table, found = _pat(scratch)
        options.progress("sensitivity: RollPacker, OPPO, REAL")
        tables = "\n".join(_rollpacker(scratch))
        return Section(
            (), (), filled_text("sensitivity", pat=table, rollpacker=tables, oppo=_oppo(), real=_real(), **found)
        )


def _runs(experiment: str, always: Mapping[str, Any], changes: Changes) -> Iterator[tuple[str, Result]]:
    """The experiment under `always` and each change in turn."""
    for what, settings in changes.items():
        yield what, run(experiment, overrides={**always, **settings})


# ---- PAT -------------------------------------------------------------------------------------------------------------


def _pat(scratch: Path) -> tuple[str, dict[str, str]]:
    """The H100 experiment: generation times, and the ranges of PAT's speedups that the text names."""
    always = {"systems": [{"verl": {"tp": [1, 2, 4, 8, "best"]}}, "pat"], "seeds": 4, "workflow.steps": 3}
    rows: list[tuple[str, ...]] = []
    over_best: dict[str, float] = {}
    over_tp2: list[float] = []
    for setting, result in _runs("pat_vs_static", always, _pat_changes(scratch)):
        mean = {system: values for (_, system), values in pat.means(result).items()}
        static = {name: mean[name]["gen_time_s"] for name in pat.STATIC if name in mean}  # a TP may not fit
        own = mean["pat"]["gen_time_s"]
        over_best[setting] = min(static.values()) / own
        times = [f"{static[name]:.1f}" if name in static else "—" for name in pat.STATIC]
        second = "—"
        if "verl-tp2" in static:
            over_tp2.append(static["verl-tp2"] / own)
            second = f"{over_tp2[-1]:.2f}"
        switches = f"{mean['pat']['switches']:.1f}"
        rows.append((setting, *times, f"{own:.1f}", f"{over_best[setting]:.2f}", second, switches))
    groups = {"engines": ("as shipped", "engine"), "short": ("cap 8K", "lengths: RollPacker"), "many": ("512", "2,048")}
    found = {key: _range(v for name, v in over_best.items() if name.startswith(at)) for key, at in groups.items()}
    headings = ("setting", "TP1", "TP2", "TP4", "TP8", "PAT", "over best", "over TP2", "switches")
    return markdown(headings, rows), found | {"over_tp2": _range(over_tp2)}


def _range(values: Iterable[float]) -> str:
    known = list(values)
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def _pat_changes(scratch: Path) -> Changes:
    vllm = {"calibration": "h100-vllm"}
    most = {"workflow.prompts": 256, "seeds": 2, "workflow.steps": 2}
    lengths_only = {"workflow.reward.from_trace": False}
    scarce = {"memory_utilization": 0.27, "training.offload": True, "workflow.prompts": 64}
    as_they_are = [{"verl": {"tp": [1, 2, 4, 8, "best"]}}, {"pat": {"spread": "actual"}}]
    return {
        "as shipped (SGLang, cap 24K, 128 responses), 4 seeds of 3 steps": {},
        "engine: vLLM": vllm,
        "engine: TensorRT-LLM": {"calibration": "h100-trtllm"},
        "vLLM, host time 0": {"calibration": _host_time(scratch, 0.0, 0.0)},
        "vLLM, host time per sequence halved": {"calibration": _host_time(scratch, 1.0, 0.5)},
        "vLLM, host time doubled": {"calibration": _host_time(scratch, 2.0, 2.0)},
        "GPU links at a quarter of the rate": {"cluster": _slow_links(0.25)},
        "PAT recaptures its first layout's graphs each step": {"engine.first_layout_kept": False},
        "PAT predicts with the replicas as they are": {"systems": as_they_are},
        "cap 8K": {"trace.cap": "8K"},
        "cap 16K": {"trace.cap": "16K"},
        "32 responses a step": {"workflow.prompts": 4},
        "512 responses a step": {"workflow.prompts": 64},
        "512 responses a step, vLLM": {"workflow.prompts": 64, **vllm},
        "2,048 responses a step": most,
        "2,048 responses a step, vLLM": {**most, **vllm},
        "512 responses, KV cache scarce (27% of memory)": scarce,
        "lengths: lognormal through the two published facts": {"trace.path": _lengths(scratch, "lognormal")},
        "lengths: no correlation within a prompt": {"trace.path": _lengths(scratch, "ungrouped")},
        "lengths: RollPacker's math task": {"trace.path": "rollpacker-math", **lengths_only},
        "lengths: RollPacker's judge task (far below the cap)": {"trace.path": "rollpacker-judge", **lengths_only},
        "lengths: long reasoning (AIME-like)": {"trace.path": "aime-r1-distill-like"},
    }


def _host_time(scratch: Path, step: float, sequence: float) -> str:
    """vLLM's calibration with host time per step and per sequence multiplied, as a file; SGLang's has none."""
    from ruamel.yaml import YAML

    calibration = load_calibration("h100-vllm")
    host = calibration.host
    changed = {
        "step_s": host.step_s * step,
        "sequence_s": host.sequence_s * sequence,
        "prefill_s": host.prefill_s * step,
    }
    path = scratch / f"host-{step:g}-{sequence:g}.yaml"
    data = calibration.model_copy(update={"host": host.model_copy(update=changed)}).model_dump(mode="json")
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(data, file)
    return str(path)


def _slow_links(factor: float) -> dict[str, Any]:
    """The shipped cluster with slower links inside the node."""
    cluster = load_cluster("8xh100").model_dump()
    cluster["intra"]["bytes_per_s"] *= factor
    return cluster | {"name": "8xh100-slow-links"}


def _lengths(scratch: Path, which: str) -> str:
    """The shipped trace drawn with another assumption, as a file."""
    recipe = load_recipe(catalogue.names("traces")["deepscaler-llama-3.1-8b"])
    if which == "lognormal":
        published = tuple(fact for fact in recipe.lengths.facts if not fact.source.startswith("assumed"))
        lengths = recipe.lengths.model_copy(update={"facts": published, "components": 1, "model": None})
        recipe = recipe.model_copy(update={"lengths": lengths})
    elif recipe.groups is not None:
        recipe = recipe.model_copy(update={"groups": recipe.groups.model_copy(update={"icc": 0.0})})
    return _drawn(scratch, which, recipe)


def _drawn(scratch: Path, name: str, recipe: Recipe) -> str:
    path = scratch / f"{name}.parquet"
    write_trace(draw_trace(recipe), path)
    return str(path)


# ---- RollPacker ------------------------------------------------------------------------------------------------------

#: Two periods of one seed: enough for a difference, short enough for many of them.
_SHORT = {"seeds": 1, "workflow.steps": 10}


def _rollpacker(scratch: Path) -> Iterator[str]:
    """A table for each experiment: its figures under every setting."""
    for heading, found in (
        ("7B, 8K, 16 GPUs", _cumulative("rollpacker_7b", 1, _small_changes())),
        ("32B, 32K, 64 GPUs", _cumulative("rollpacker_32b", 2, _LARGE)),
        ("adaptive timeouts, 7B, code", _timeouts(scratch)),
        ("preemptions, Qwen3-8B, 32K, 8 GPUs", _preemptions()),
        ("the strengthened RLHFuse, 7B", _fused()),
    ):
        settings = dict(found)
        names = list(dict.fromkeys(name for figures in settings.values() for name in figures))
        rows = [(what, *(_figure(figures.get(name)) for name in names)) for what, figures in settings.items()]
        yield markdown((heading, *names), rows)


def _figure(value: float | None) -> str:
    return "—" if value is None or math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _cumulative(experiment: str, tp: int, changes: Changes) -> Iterator[tuple[str, dict[str, float]]]:
    """Speedups over veRL part by part."""
    static = {"verl": {"tp": tp}}
    systems = [
        {"name": "verl", "use": [static]},
        {"name": "tail batching", "use": [static, "tail_batching"]},
        {"name": "+ reward", "use": [static, "tail_batching", "reward_scheduler"]},
        {"rollpacker": {"start_tp": tp}},
    ]
    for what, result in _runs(experiment, {**_SHORT, "systems": systems}, changes):
        speedup = rollpacker.speedups(result)
        yield what, {name: speedup[name] for name in rollpacker.CUMULATIVE[experiment] if name in speedup}


def _small_changes() -> Changes:
    static = {"verl": {"tp": 1}}
    long_rounds = [static, "tail_batching", "reward_scheduler", {"stream": {"rounds": ["long"]}}]
    streaming = [{"name": "verl", "use": [static]}, {"name": "rollpacker", "use": long_rounds}]
    return {
        "as shipped": {},
        "engine: SGLang": {"calibration": "h800-sglang"},
        "tasks: math alone": {"trace.path": "rollpacker-math"},
        "tasks: code alone": {"trace.path": "rollpacker-code"},
        "tasks: judged QA alone": {"trace.path": "rollpacker-judge"},
        "lengths: long reasoning (AIME-like), checked in 10 ms": {"trace.path": "aime-r1-distill-like"},
        "training efficiency: the calibration's 0.490": rollpacker.UNFITTED,
        "CPU workers: 16": {"workflow.reward.workers": 16},
        "CPU workers: 128": {"workflow.reward.workers": 128},
        "sandbox timeout: 10 s": {"workflow.reward.sandbox_timeout": 10},
        "judge: no instructions around the response": {"workflow.reward.judge.prompt_tokens": 0},
        "judge: half of the GPUs reserved": {"workflow.reward.judge.reserved": 0.5},
        "judge: its GPUs do not train": {"workflow.reward.judge.while_training": "apart"},
        "rewards beside log-probs": {"workflow.reward.order": "beside_log_probs"},
        "no reference model": {"workflow.reference": False},
        "stream trainer in long rounds only": {"systems": streaming},
    }


_LARGE: Changes = {
    "as shipped": {},
    "engine: SGLang": {"calibration": "h800-sglang"},
    "no response beyond 16K tokens": {"trace.cap": "16K"},
    "training efficiency: the calibration's 0.490": rollpacker.UNFITTED,
}


def _timeouts(scratch: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Fixed over adaptive timeouts, by how correctness and endless programs spread over prompts."""
    recipe = load_recipe(find_trace("rollpacker-code", Path()).with_suffix(".yaml"))
    rewards = recipe.rewards
    assert rewards is not None
    assert rewards.sandbox is not None
    for what, icc, share in (
        ("as shipped: 40% correct, correlation 0.4 within a prompt", 0.4, 0.4),
        ("correlation 0.1: nearly every prompt has a correct response", 0.1, 0.4),
        ("70% correct, correlation 0.1", 0.1, 0.7),
    ):
        correct = rewards.correct.model_copy(update={"icc": icc, "share": share})
        changed = recipe.model_copy(update={"rewards": rewards.model_copy(update={"correct": correct})})
        path = _drawn(scratch, f"code-{icc:g}-{share:g}", changed)
        mean = rollpacker.scored_s(run("adaptive_timeout", overrides={**_SHORT, "trace.path": path}))
        yield what, {"fixed / adaptive": mean["fixed"] / mean["adaptive"]}


def _preemptions() -> Iterator[tuple[str, dict[str, float]]]:
    """Preemptions, and the time of short rounds at TP2 over TP1, by engine and lengths."""
    static = [{"name": f"tp{tp}", "use": ["tail_batching", {"verl": {"tp": tp}}]} for tp in (1, 2)]
    changes = {
        "as shipped: vLLM, long reasoning": {},
        "engine: SGLang": {"calibration": "h800-sglang"},
        "lengths: DeepScaleR": {"trace.path": "deepscaler-llama-3.1-8b"},
        "lengths: RollPacker's math task": {"trace.path": "rollpacker-math"},
    }
    for what, result in _runs("planner_preemption", {**_SHORT, "systems": static, "baseline": "tp1"}, changes):
        mean = rollpacker.means(result)
        short, long, other = mean["tp1", "short"], mean["tp1", "long"], mean["tp2", "short"]
        few = short["preemptions"]
        yield (
            what,
            {
                "preemptions a short round, TP1": few,
                "short / long": few / long["preemptions"] if long["preemptions"] else math.nan,
                "TP2 / TP1": other["preemptions"] / few if few else math.nan,
                "time TP2 / TP1": other["gen_time_s"] / short["gen_time_s"],
            },
        )


def _fused() -> Iterator[tuple[str, dict[str, float]]]:
    """RollPacker over the strengthened RLHFuse, by what that is taken to be."""
    plus = {"rlhfuse_plus": {"tp": 1, "remaining": 0.1}}
    systems = [
        {"name": "rollpacker", "use": [{"rollpacker": {"start_tp": 1}}]},
        {"name": "as shipped: judge on GPUs of its own", "use": [plus]},
        {"name": "with a colocated judge", "use": [plus, "colocated_judge"]},
        {"name": "with a colocated judge and adaptive timeouts", "use": [plus, "colocated_judge", "adaptive_timeout"]},
    ]
    result = run("rollpacker_7b", overrides={**_SHORT, "systems": systems, "baseline": "rollpacker"})
    for name, speedup in list(rollpacker.speedups(result).items())[1:]:
        yield name, {"RollPacker's speedup": 1 / speedup}


# ---- OPPO and REAL ---------------------------------------------------------------------------------------------------


def _oppo() -> str:
    """OPPO's speedups under every setting."""

    def always(delta: int) -> dict[str, Any]:
        """A fixed overcommit instead of one that grows with the reward."""
        part = {"overcommit": {"delta": delta}}
        return {"systems.2.use.1": part, "systems.3.use.2": part}

    changes: Changes = {
        "as shipped: judged QA, cap 4K": {},
        **{f"always {delta} prompts beyond the batch": always(delta) for delta in (8, 16, 32)},
        "cap 1K": {"trace.cap": "1K"},
        "cap 2K": {"trace.cap": "2K"},
        "math task's lengths": {"trace.path": "rollpacker-math"},
        "math task's lengths, cap 1K": {"trace.path": "rollpacker-math", "trace.cap": "1K"},
        "reward model and critic half as large (3B)": {"models": {"critic": "qwen2.5-3b", "reward": "qwen2.5-3b"}},
        "decoding of a training framework (60 us a sequence)": {"engine.sampling_per_logit": 60e-6 / 152064},
    }
    rows = []
    for what, result in _runs("oppo_7b", {"seeds": 1, "workflow.steps": 40}, changes):
        speedups = rollpacker.speedups(result)
        rows.append((what, *(f"{speedups[system]:.2f}" for system in oppo.SPEEDUPS)))
    return markdown(("setting", *oppo.SPEEDUPS), rows)


def _real() -> str:
    """REAL's two published plans under every setting: calls and iterations against the published seconds."""
    systems = [system for system in load_experiment("real_7b_7b")[0].systems if system != "real"]
    links = {"intra": {"name": "nvlink", "bytes_per_s": "150 GB/s", "latency_s": "0.6 us"}}
    slow = {"cluster": {**load_cluster("2x8xh100").model_dump(mode="json"), **links}}
    keep, sampling = {"training.recompute": "none"}, {"engine.sampling_per_logit": 60e-6 / 128256}
    changes: Changes = {
        "as shipped": {},
        "activations kept, nothing recomputed": keep,
        "sampling that sorts logits, 60 us a sequence": sampling,
        "NVLink collectives at a third": slow,
        "all three": {**keep, **sampling, **slow},
    }
    rows = []
    for what, result in _runs("real_7b_7b", {"systems": systems, "workflow.steps": 3}, changes):
        found, steps = real.call_seconds(result), real.step_seconds(result)
        ratios = [found[name, call] / s for name, plan in real.PLANS.items() for call, s in plan.call_s.items()]
        within = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
        spans = [f"{min(r):.2f}–{max(r):.2f}" for r in (ratios[:6], ratios[6:])]
        iterations = [f"{steps['', name]:.1f}" for name in real.PLANS]
        gain = steps["", "heuristic"] / steps["", "published-plan"]
        rows.append((what, f"{within} of {len(ratios)}", *spans, *iterations, f"{gain:.2f}"))
    spans = ["ratios, published plan", "ratios, heuristic"]
    return markdown(("setting", "calls within 25%", *spans, "plan s", "heuristic s", "gain"), rows)
