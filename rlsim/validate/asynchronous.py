"""Part `asynchronous`: measured steps of trainers that relax synchrony, and their gain over synchronous ones.

Of veRL's runs the mean response is not stated: what makes the synchronous run as long as it was is an input, and the
asynchronous run on the same lengths is predicted. AReaL's mean follows from its table; nothing is fitted there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.optimize import brentq

from rlsim.reading import read_yaml
from rlsim.validate.parts import Options, Section
from rlsim.validate.published import measured_section
from rlsim.validate.rows import Row, markdown, ratio_row
from rlsim.validate.steps_stated import run_stated, seconds
from rlsim.validate.steps_verl import STEPS, stacks, verl_experiment

ASYNCHRONOUS = "async_steps.csv"
THROUGHPUT = "async_throughput.csv"
STATED = "runs_2026.yaml"
#: AReaL's runs: the mean response (tokens) is what its throughput and step leave of 2,048 sequences of a step (as in
#: its recipe), less a prompt of 100; steps after which a run is steady; the bound of the asynchronous one.
AREAL_BATCH = {"prompts": 128, "responses": 16}
AREAL_MEAN, AREAL_PROMPT, AREAL_CAP = 9175, 100, 27648
AREAL_STEPS, AREAL_ETA = 24, 4
#: Tokens of a training micro-batch: not stated.
AREAL_MICRO_BATCH = 32768
#: veRL's v1 on H100: the prompt is guessed; a micro-batch holds the longest sequence, as its packing by tokens needs.
V1_PROMPT, V1_MICRO_BATCH = 150, 2048 + 32768
#: What veRL's fully asynchronous script says: updates between syncs, and the threshold.
UPDATES, THRESHOLD = 4, 0.5

row = partial(Row, "asynchronous")


def section(options: Options) -> Section:
    """Every pair of a synchronous and an asynchronous run (about two minutes)."""
    table = pd.read_csv(options.evidence / ASYNCHRONOUS).set_index("id")
    options.progress("AReaL")
    curve = areal_curve()
    found = [
        *areal_rows(table, curve),
        *interruption_rows(pd.read_csv(options.evidence / THROUGHPUT).set_index("id")),
    ]
    synchronous = pd.read_csv(options.evidence / STEPS).set_index("id")
    options.progress("veRL, one step off")
    found += one_step_off_rows(_record(table, 19), _record(table, 20), _record(synchronous, 28))
    options.progress("veRL, fully asynchronous")
    found += fully_async_rows(_record(table, 1), _record(table, 2), _record(synchronous, 10))
    options.progress("veRL v1, a mixture of experts")
    for case, ahead in (("verl-v1", False), ("verl-v1-ahead", True)):  # vLLM's release, which decides, is not stated
        found += v1_rows(_record(table, 23), _record(table, 26), case, ahead)
    options.progress("runs of 2026")
    found += stated_rows(options.evidence / STATED)
    return measured_section(found, 2, curve=_curve_table(curve))


def stated_rows(path: Path) -> Iterator[Row]:
    """Runs that are experiments as their sources state them: each arm's steps and calls, in seconds."""
    for run in read_yaml(path)["runs"]:
        for arm in run["arms"]:
            parts = [{name: parameters} for name, parameters in arm["system"].items()]
            system = {"name": arm["name"], "use": parts}
            own = {"name": run["case"], **run["common"], **arm.get("set", {}), "seeds": 1, "systems": [system]}
            for call, found_s in seconds(own, arm["mean"]).items():
                if call in arm:
                    quantity = "step_time_s" if call == "step" else f"{call}_s"
                    yield row(f"{run['case']}/{arm['name']}", quantity, arm[call], found_s, run["source"])


def _record(table: pd.DataFrame, number: int) -> dict[str, Any]:
    return {str(key): value for key, value in table.loc[number].items()}


# ---- AReaL ----------------------------------------------------------------------------------------------------------


def areal_experiment(gpus: int, systems: list[Any], steps: int, **training: Any) -> dict[str, Any]:
    """R1-Distill-Qwen-1.5B on H800 without its trace's path; training in two pipeline stages, as its benchmarks run."""
    return {
        "name": "areal",
        "cluster": f"{gpus // 8}x8xh800",
        "model": "r1-distill-qwen-1.5b",
        "calibration": "h800-sglang",
        "trace": {"cap": AREAL_CAP, "default_prompt_tokens": AREAL_PROMPT},
        "workflow": {**AREAL_BATCH, "steps": steps, "reference": False},
        "training": {
            "backend": "megatron", "pp": 2, "mini_batches": 4, "micro_batch_tokens": AREAL_MICRO_BATCH, **training,
        },
        "seeds": 1,
        "systems": systems,
    }  # fmt: skip


def areal_curve() -> pd.DataFrame:
    """The summary of the synchronous run on 128 GPUs, and of the asynchronous one, 96 of them generating, by bound."""
    colocated = areal_experiment(128, [{"name": "synchronous", "use": [{"verl": {"tp": 1}}]}], 4, offload=True)
    bounds = [{"name": "bounded", "use": [{"areal": {"tp": 1, "rollout_gpus": 96, "eta": [0, 1, 2, 4, 8]}}]}]
    parts = [run_stated(colocated, AREAL_MEAN), run_stated(areal_experiment(128, bounds, AREAL_STEPS), AREAL_MEAN)]
    return pd.concat([part.summary() for part in parts]).set_index("system")


def areal_rows(table: pd.DataFrame, curve: pd.DataFrame) -> Iterator[Row]:
    """Steps of both runs, and the gain."""
    measured = table["step_s"]
    steps = curve["step_time_s"]
    bounded = f"bounded-eta{AREAL_ETA}"
    yield row("areal/synchronous", "step_time_s", measured[38], steps["synchronous"])
    yield row("areal/eta4", "step_time_s", measured[39], steps[bounded])
    both = (measured[38], measured[39]), (steps["synchronous"], steps[bounded])
    yield ratio_row("asynchronous", "areal/eta4", "gain", *both)


def interruption_rows(table: pd.DataFrame) -> Iterator[Row]:
    """Generated tokens a second on 32 GPUs with updates that interrupt over those with updates that wait."""
    system = {"areal": {"tp": 1, "rollout_gpus": 24, "eta": AREAL_ETA, "interrupt": [True, False]}}
    rates = run_stated(areal_experiment(32, [system], AREAL_STEPS), AREAL_MEAN).summary()["generated_tokens_per_s"]
    measured = table["tokens_per_s"]
    note = "guessed: the batch, 24 of the GPUs generate"
    yield row("areal/interruption", "generation", measured[8] / measured[9], rates.iloc[0] / rates.iloc[1], note)


def _curve_table(curve: pd.DataFrame) -> str:
    names = ("step_time_s", "responses_per_s", "staleness_mean", "staleness_p95", "rollout_idle", "trainer_idle")
    known = curve[list(names)].astype(float)
    rows = [[str(system), *("—" if pd.isna(x) else f"{x:.3g}" for x in one)] for system, *one in known.itertuples()]
    return markdown(("system", *names), rows)


# ---- veRL -----------------------------------------------------------------------------------------------------------


def one_step_off_rows(sync: Mapping[str, Any], off: Mapping[str, Any], script: Mapping[str, Any]) -> Iterator[Row]:
    """veRL's one-step-off recipe on 16 H20, 4 of them generating, beside its colocated run on all."""
    experiment, _ = verl_experiment(script, stacks()[28])
    phases = {"generate": "gen_s", "old_log_prob": "old_logprob_s", "train": "update_actor_s"}
    whole = sum(sync[column] for column in phases.values())
    mean = _mean_for(experiment, whole, tuple(phases))
    found = seconds(experiment, mean)
    note = f"mean response {mean:,.0f}, so that the synchronous phases take {whole:,.0f} s"
    for call, column in phases.items():
        yield row("verl/synchronous-16", f"{call}_s", sync[column], found[call], note, "input")
    relaxed = {**experiment, "systems": [{"one_step_off": {"tp": 2, "rollout_gpus": int(off["rollout_gpus"])}}]}
    predicted = seconds(_on_its_own_gpus(relaxed, steps=8), mean)
    for call, column in phases.items():
        yield row("verl/one-step-off-16", f"{call}_s", off[column], predicted[call])
    yield row("verl/one-step-off-16", "step_time_s", off["step_s"], predicted["step"])
    both = (sync["step_s"] - sync["other_s"], off["step_s"]), (found["step"], predicted["step"])
    yield ratio_row("asynchronous", "verl/one-step-off-16", "gain", *both, "without loading and waking")


def fully_async_rows(sync: Mapping[str, Any], relaxed: Mapping[str, Any], script: Mapping[str, Any]) -> Iterator[Row]:
    """veRL's fully asynchronous trainer on 32 H20, half of them generating, over their first 100 steps."""
    experiment, _ = verl_experiment(script, stacks()[10])
    first_s, predicted_s = (36.0 * run["total_h_100"] for run in (sync, relaxed))
    mean = _mean_for(experiment, first_s, ("step",))
    note = f"mean response {mean:,.0f}, so that the first 100 synchronous steps take as long"
    found = seconds(experiment, mean)["step"]
    yield row("verl/synchronous-32", "step_time_s", first_s, found, note, "input")
    system = {
        "tp": 4,
        "rollout_gpus": int(relaxed["rollout_gpus"]),
        "staleness_threshold": THRESHOLD,
        "trigger_parameter_sync_step": UPDATES,
    }
    asynchronous = _on_its_own_gpus({**experiment, "systems": [{"verl_fully_async": system}]}, steps=12)
    step_s = seconds(asynchronous, mean)["step"]
    both = float(relaxed["wait_gen_s"] + relaxed["update_actor_s"])
    yield row(
        "verl/fully-async-32", "wait_and_update_s", both, step_s, "of the trainer, over 400 steps; its step: 295 s"
    )
    yield row("verl/fully-async-32", "step_time_s", predicted_s, step_s)
    yield ratio_row("asynchronous", "verl/fully-async-32", "gain", (first_s, predicted_s), (found, step_s))


def v1_rows(sync: Mapping[str, Any], relaxed: Mapping[str, Any], case: str, ahead: bool) -> Iterator[Row]:
    """Qwen3.5-35B-A3B with experts over 4 and 8 GPUs: colocated on 32 H100, and `separate_async` on 8 and 16.

    `ahead`: vLLM's host works beside the GPU.
    """
    host = {"engine": {"async_scheduling": ahead}}
    together, apart = v1_experiment(sync, ep=4) | host, v1_experiment(relaxed, ep=8) | host
    found = seconds({**together, "systems": [{"verl": {"tp": int(sync["rollout_tp"])}}]}, sync["mean_response"])["step"]
    system = {
        "tp": int(relaxed["rollout_tp"]),
        "rollout_gpus": int(relaxed["rollout_gpus"]),
        "staleness_threshold": 1,  # one batch ahead is its default
        "trigger_parameter_sync_step": UPDATES,
        "per_replica": None,
        "recompute_log_probs": True,
    }
    asynchronous = _on_its_own_gpus({**apart, "systems": [{"verl_fully_async": system}]}, steps=16)
    step_s = seconds(asynchronous, relaxed["mean_response"])["step"]
    yield row(f"{case}/synchronous-32", "step_time_s", sync["step_s"], found)
    yield row(f"{case}/separate-async-24", "step_time_s", relaxed["step_s"], step_s)
    gpus = sync["n_gpus"], relaxed["n_gpus"]
    both = (sync["step_s"] * gpus[0], relaxed["step_s"] * gpus[1]), (found * gpus[0], step_s * gpus[1])
    yield ratio_row("asynchronous", f"{case}/separate-async-24", "gain", *both, "in GPU-seconds a step")


def v1_experiment(run: Mapping[str, Any], ep: int) -> dict[str, Any]:
    """One of these runs without its system, and without its trace's path."""
    return {
        "name": "verl-v1",
        "cluster": f"{int(run['n_gpus']) // 8}x8xh100",
        "model": "qwen3.5-35b-a3b",
        "calibration": "h100-vllm",
        "trace": {"cap": int(run["max_response"]), "default_prompt_tokens": V1_PROMPT},
        "workflow": {
            "prompts": int(run["prompts_per_step"]), "responses": int(run["n"]), "steps": 6, "reference": False,
        },
        "training": {
            "backend": "megatron", "tp": 2, "pp": 2, "cp": 2, "ep": ep, "mini_batches": UPDATES, "offload": True,
            "micro_batch_tokens": V1_MICRO_BATCH,
        },
        "seeds": 1,
    }  # fmt: skip


def _on_its_own_gpus(experiment: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Training keeps its states where generation has other GPUs."""
    workflow, training = {**experiment["workflow"], "steps": steps}, {**experiment["training"], "offload": False}
    return {**experiment, "workflow": workflow, "training": training}


def _mean_for(experiment: Mapping[str, Any], wanted_s: float, calls: tuple[str, ...]) -> float:
    """The mean response (tokens) with which these calls of a step take so long together."""

    def over(mean: float) -> float:
        found = seconds(experiment, mean)
        return sum(found[call] for call in calls) - wanted_s

    return float(brentq(over, 100, 6000, xtol=5))
