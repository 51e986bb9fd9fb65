"""Systems whose rollout never stops: bounds, windows, what is refused, and synchrony as the special case."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import runner, tables

import rlsim

EXPERIMENT: dict[str, Any] = tables("bases")["asynchronous"]
SPLIT, TP1 = {"split": {"rollout_gpus": 4}}, {"verl": {"tp": 1}}
#: Columns of a step that tell two runs apart.
TOLD = ["step_time_s", "gen_exposed_s", "prep_time_s", "train_time_s", "sync_time_s", "tokens", "response_tokens"]


run = runner("asynchronous")


def use(name: str, *parts: Any) -> dict[str, Any]:
    return {"name": name, "use": [SPLIT, TP1, *parts]}


def of(result: rlsim.Result, system: str, table: str = "steps") -> pd.DataFrame:
    frame = getattr(result, table)
    return frame[frame["system"] == system].reset_index(drop=True)


def check_tokens(steps: pd.DataFrame) -> None:
    """Tokens generated and observed are trained on, compared with, dropped, or under way when the run ends."""
    kept = steps["trained_response_tokens"] + steps["wasted_tokens"] + steps["paused_tokens"] - steps["resumed_tokens"]
    kept += steps.get("baseline_tokens", 0)
    assert (steps["response_tokens"] + steps.get("observed_tokens", 0)).sum() == kept.sum()


def check_gpus(spans: pd.DataFrame) -> None:
    """A GPU does one thing at a time, unless it is shared."""
    alone = spans[~spans["shared"]]
    at: dict[int, float] = {}
    for row in alone.sort_values(["start_at", "end_at"]).itertuples():
        for gpu in range(row.gpu, row.gpu + row.gpus):
            assert row.start_at >= at.get(gpu, 0.0) * (1 - 1e-9), (gpu, row)
            at[gpu] = row.end_at
    assert at


# ---- synchrony as the special case ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"sync_quota": {"staleness_threshold": 0, "per_replica": None}},
        {"bounded_staleness": {"eta": 0}},
        {"bounded_staleness": {"eta": 0, "interrupt": False, "stale": "wait", "order": "ready"}},
    ],
)
def test_without_a_bound_to_spend_it_is_the_synchronous_split_run(part: dict[str, Any]) -> None:
    found = run(use("synchronous"), use("relaxed", part))
    synchronous, relaxed = of(found, "synchronous"), of(found, "relaxed")
    np.testing.assert_allclose(relaxed[TOLD], synchronous[TOLD], rtol=1e-12)
    assert (relaxed["staleness_max"] == 0).all()
    assert (relaxed["stale_token_share"] == 0).all()
    for table in ("responses", "calls"):
        moments = ["finish_at"] if table == "responses" else ["end_at"]
        one, other = (of(found, name, table).sort_values(moments) for name in ("synchronous", "relaxed"))
        np.testing.assert_allclose(other[moments], one[moments], rtol=1e-12)


# ---- what a bound brings --------------------------------------------------------------------------------------------


def test_throughput_grows_with_the_bound_to_that_of_the_slower_side() -> None:
    """In the end the rollout is never idle: a step takes as long as its tokens at full load."""
    rule = {"bounded_staleness": {"eta": [0, 1, 2, 4, 8], "concurrent": 24}}
    lengths = {"path": "rollpacker-math", "cap": "1K"}
    found = run(use("bounded", rule, "async_reward"), workflow={"steps": 80}, trace=lengths)
    rows = found.summary()
    rates = rows["responses_per_s"].to_numpy()
    assert (np.diff(rates) > -0.01 * rates[1:]).all()
    assert rates[-1] > 3 * rates[0]
    assert rates[-1] == pytest.approx(rates[-2], rel=0.01), "there is no more to gain"
    assert rows["rollout_idle"].iloc[0] > 0.3
    assert rows["rollout_idle"].iloc[-1] < 0.01


def test_none_begins_while_the_queue_is_full() -> None:
    """Training is the slower side: what the bound admits would wait for it, at no gain."""
    rule = {"eta": 8, "concurrent": 8, "interrupt": False}
    rules = [{"bounded_staleness": {**rule, **queue}} for queue in ({}, {"queue": 16}, {"queue": 10_000})]
    systems = [use(name, one) for name, one in zip(("free", "full", "never"), rules, strict=True)]
    found = run(*systems, workflow={"steps": 16}, trace={"path": "rollpacker-math", "cap": 64})
    free, full = of(found, "free"), of(found, "full")
    assert full["waiting"].max() < 16 + 8 < free["waiting"].max()
    assert full["staleness_max"].max() < free["staleness_max"].max()
    assert (full["gen_exposed_s"][1:] == 0).all()
    np.testing.assert_array_equal(of(found, "never")[TOLD], free[TOLD])
    check_tokens(full)


def test_the_percentile_of_a_window_is_that_of_its_responses() -> None:
    """Not the mean of the steps' own percentiles, which is no whole number and may lie above the bound."""
    found = run(use("bounded", {"bounded_staleness": {"eta": 2}}), workflow={"steps": 12})
    (row,) = found.summary().to_dict("records")
    steady = found.steps.loc[found.steps["steady"], "step"]
    responses = found.responses[found.responses["trained"] & found.responses["step"].isin(steady)]
    assert row["staleness_p95"] == np.percentile(responses["staleness"], 95, method="inverted_cdf")
    assert row["staleness_p95"] != found.steps.loc[found.steps["steady"], "staleness_p95"].mean()


def test_a_bound_of_part_of_an_update_is_rounded_up() -> None:
    """As in ROLL's `ReplayBuffer.get_batch`: what was launched for that update is not thrown away."""
    steps = run({"roll_flash": {"alpha": 1.5, "tp": 1, "rollout_gpus": 4}}, workflow={"steps": 12}).steps
    assert steps["staleness_max"].max() == 2
    assert steps.loc[steps["step"] >= 4, "staleness_mean"].mean() == pytest.approx(1.5, abs=0.1)
    assert steps["dropped"].sum() == steps["wasted_tokens"].sum() == 0


@pytest.mark.parametrize(("age", "in_flight"), [(1, False), (2, True)])
def test_a_step_of_nemo_rl_waits_for_its_own_prompts(age: int, in_flight: bool) -> None:
    """Prompts are generated for one step: from step `age` on all are exactly so old, those with slow rewards too.

    A prompt begins when one that is under way is complete (`_inflight_sema`): there are as many batches as it may be
    ahead.
    """
    rule = {"max_trajectory_age_steps": age, "in_flight_weight_updates": in_flight, "tp": 1, "rollout_gpus": 4}
    found = run({"nemo_async": rule}, workflow={"steps": 12})
    steady = found.steps[found.steps["step"] >= age]
    assert (steady["staleness_max"] == age).all()
    assert steady["staleness_mean"].to_numpy() == pytest.approx(age)
    prompts = found.responses.groupby("prompt_id")
    begun, ended = prompts["start_at"].min().dropna(), prompts["scored_at"].max().dropna()
    assert max((begun <= at).sum() - (ended < at).sum() for at in begun) == age * 8


def test_prompts_that_are_generated_again_are_trained_on_once() -> None:
    """A batch has four responses of a prompt, of one launch, whether it is the first or a later one."""
    rules = {stale: {"bounded_staleness": {"eta": 1, "stale": stale}} for stale in ("drop", "regenerate")}
    found = run(*(use(name, rule) for name, rule in rules.items()), workflow={"steps": 16})
    launched, trained = {}, {}
    for name in rules:
        responses = found.responses[found.responses["system"] == name]
        launched[name] = responses.groupby("prompt_id").size()
        trained[name] = responses[responses["trained"]].groupby("prompt_id").size()
        assert (trained[name] == 4).all()
        assert of(found, name)["dropped"].sum() > 0
    assert (launched["drop"] == 4).all()
    more = launched["regenerate"][launched["regenerate"] > 4].index
    assert set(more) & set(trained["regenerate"].index), "some are trained on after they were dropped"
    assert any("drop: not steady, so not compared: prompts dropped as too stale hold" in note for note in found.notes)
    lost = {name: of(found, name)["dropped_tokens"].sum() / of(found, name)["tokens"].sum() for name in rules}
    prompts = of(found, "drop")["dropped_stale"].sum() * 4 / of(found, "drop")["trained"].sum()
    assert lost["drop"] > 1.1 * prompts, "they hold the long responses"
    assert lost["regenerate"] < 0.1 * lost["drop"], "those that begin again are not lost"
    for name in rules:
        assert of(found, name)["dropped_stale"].sum() == of(found, name)["dropped"].sum()


@pytest.mark.parametrize("order", ["ready", "longest", "freshest"])
def test_a_step_that_waits_takes_prompts_at_the_bound_first_whatever_their_order(order: str) -> None:
    """The trainer is the slower side: complete prompts reach the bound in the queue."""
    rule = {"bounded_staleness": {"eta": 2, "stale": "wait", "order": order}}
    more = {
        "trace": {"path": "rollpacker-math", "cap": "1500"},
        "workflow": {"prompts": 8, "responses": 4, "steps": 16},
    }
    steps = of(run(use("waits", "async_reward", rule), **more), "waits")
    assert steps["staleness_max"].max() == 2
    assert steps[["dropped", "wasted_tokens"]].sum().tolist() == [0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"systems": [{"areal": {"tp": 1, "rollout_gpus": 1}}], "cluster": "2xh800"},
        {"systems": [{"areal": {"tp": 1, "rollout_gpus": 2}}], "engine": {"graphs": False}},
        {
            "systems": [{"verl": {"tp": 2}}],
            "cluster": "2xh200",
            "model": "qwen3-1.7b",
            "calibration": "h200-vllm",
            "engine.speculation": {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": 0.5, "drawn": True},
            "engine.speculation.correlation": 0.9,
            "workflow": {"prompts": 2, "responses": 2, "steps": 24},
        },
    ],
)
def test_generation_never_takes_less_than_its_bound(changes: dict[str, Any]) -> None:
    """More run together than a step has where generation never stops, and drafts may be luckier than their chances."""
    more = {"trace": {"path": "deepscaler-llama-3.1-8b", "cap": "2000"}, "seeds": 1}
    spec = {**EXPERIMENT, **more, "workflow": {"prompts": 4, "responses": 4, "steps": 24}}
    steps = rlsim.run(spec, overrides=changes).steps
    each = steps if "engine.speculation" in changes else steps.groupby("system").sum(numeric_only=True)
    assert (each["gen_bound_s"] > 0).all()
    assert (each["gen_bound_s"] <= each["gen_time_s"]).all()


# ---- replicas on their own ------------------------------------------------------------------------------------------


def test_under_laminar_one_version_generates_a_response_and_repack_frees_replicas() -> None:
    """Without a bound that matters, repack brings throughput, and moves what stays behind."""
    common = {"tp": 1, "rollout_gpus": 4, "per_replica": 8}
    systems = [{"name": str(on), "use": [{"laminar": {**common, "repack": on}}]} for on in (True, False)]
    found = run(*systems, trace={"path": "rollpacker-code", "cap": "8K"}, workflow={"prompts": 32, "steps": 36})
    summary = found.summary().set_index("system")["responses_per_s"]
    assert summary["True"] > 1.05 * summary["False"]
    responses = found.responses[found.responses["trained"]]
    assert (responses["stale_tokens"].isin([0]) | (responses["stale_tokens"] == responses["response_tokens"])).all()


def test_what_training_apart_gains_where_both_sides_take_as_long() -> None:
    """vllm-project/vime#358: 2 + 2 devices, 178.3 s a step one after the other, 104.0 s fully asynchronous: 1.72."""
    apart = {"rollout_gpus": 2, "tp": 2}
    summary = run(
        {"name": "split", "use": [{"split": {"rollout_gpus": 2}}, {"verl": {"tp": 2}}]},
        {"name": "one step off", "use": [{"one_step_off": apart}]},
        {"name": "fully asynchronous", "use": [{"areal": {**apart, "eta": 1}}]},
        cluster="4xa800", model="qwen3-4b", calibration="a800-vllm", baseline="split",
        trace={"path": "deepscaler-llama-3.1-8b", "cap": "2K"},
        workflow={"prompts": 32, "responses": 8, "steps": 8, "reference": False, "old_log_probs": True},
        training={"backend": "megatron", "tp": 2, "micro_batch_tokens": "8K"},
    ).summary().set_index("system")  # fmt: skip
    assert summary.loc["fully asynchronous", "token_speedup"] == pytest.approx(1.72, rel=0.12)
    assert (summary["token_speedup"] < 2.01).all()  # two sides that never wait are twice as fast at most


def test_weights_that_are_ready_go_out_before_the_next_step_is_worked_on() -> None:
    """One step off and bound by generation: training in one part is training on the whole, and GPUs that are lent are
    back when generation has its weights."""
    off, streams = {"tp": 1, "rollout_gpus": 4}, {"skewness_aware": False}
    lent = [{"split": {"rollout_gpus": 4}}, {"verl": {"tp": 1}}, "async_reward", "lagged", "elastic_split"]
    found = run(
        {"name": "whole", "use": [{"one_step_off": off}]},
        {"name": "one part", "use": [{"streamrl": {**off, **streams, "parts_per_step": 1}}]},
        {"name": "lent", "use": lent},
        cluster="8xh800", model="qwen2.5-1.5b", calibration="h800-vllm",
        trace={"path": "deepscaler-llama-3.1-8b", "cap": "4K"}, training={"backend": "megatron"},
        workflow={"prompts": 8, "responses": 4, "steps": 10, "reward": {"from_trace": False}},
    )  # fmt: skip
    whole, part, _ = (own["step_time_s"].to_numpy() for _, own in found.steps.groupby("system", sort=False))
    assert part[1:] == pytest.approx(whole[1:], rel=1e-3)
    calls = found.calls[found.calls["system"] == "lent"].set_index(["call", "step"])
    for step in range(8):
        assert calls.loc[("generate", step + 2), "start_at"] == calls.loc[("weight_sync", step), "end_at"]
