"""Algorithms as graphs, and what the engine makes of those that are not GRPO."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import cases, invoke, runner, tables

import rlsim
from rlsim.cli.running import _tables
from rlsim.errors import ConfigError
from rlsim.experiment.systems import parse_systems
from rlsim.experiment.verdict import judge
from rlsim.workflow import Call, Edge, Workflow, dpo, grpo, online_dpo, ppo, remax


@cases("plans", "a graph that cannot run is refused")
def test_a_graph_that_cannot_run_is_refused(edges: list[dict[str, Any]], says: str) -> None:
    """With the workflow, the edge, and why."""
    graph = tuple(Edge(**edge) for edge in edges)
    calls = [Call("generate", "generate", "actor"), Call("train", "train", "actor")]
    calls += [Call("sync", "sync", "actor")] * any("sync" in (edge.source, edge.target) for edge in graph)
    with pytest.raises(ConfigError, match=rf"workflow mine: .*{re.escape(says)}"):
        Workflow("mine", tuple(calls), graph)
    left = "both generate and more would generate what others leave"
    for twice, why in (("generate", "two calls have the same name"), ("more", left)):
        with pytest.raises(ConfigError, match=why):
            Workflow("mine", (calls[0], Call(twice, "generate", "actor")), ())


run = runner("workflows")


@pytest.mark.parametrize(
    ("workflow", "calls"),
    [
        (grpo(), "generate reward old_log_prob ref_log_prob train old_log_prob_sync weight_sync"),
        (ppo(), "generate reward_score ref_log_prob values train train_critic weight_sync critic_sync"),
        (remax(), "generate reward_score ref_log_prob train weight_sync"),
        (dpo(), "ref_log_prob train"),
        (online_dpo(), "generate reward_score ref_log_prob train weight_sync"),
    ],
)
def test_the_calls_of_an_algorithm(workflow: Workflow, calls: str) -> None:
    assert sorted(workflow.order()) == sorted(calls.split())


ON_POLICY: dict[str, Callable[..., Workflow]] = {"grpo": grpo, "ppo": ppo, "remax": remax, "online_dpo": online_dpo}


def barriers(workflow: Workflow) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in workflow.edges if edge.barrier}


@pytest.mark.parametrize("algorithm", ON_POLICY)
@pytest.mark.parametrize("reward_model", [False, True])
def test_rewards_come_before_log_probs_and_values_as_in_verls_trainer(algorithm: str, reward_model: bool) -> None:
    make = ON_POLICY[algorithm]
    workflow = make(reward_model=reward_model, old_log_probs=True)
    reward = "reward_score" if reward_model else "reward"
    later = {"old_log_prob", "ref_log_prob", *(["values"] if algorithm == "ppo" else [])}
    assert barriers(workflow) == {(reward, call) for call in later}
    beside = make(reward_model=reward_model, old_log_probs=True, reward_first=False)
    assert beside.edges == workflow.without_barriers().edges
    assert not barriers(beside)


OVERLAPS = (
    "async_reward",
    "reward_scheduler",
    "stream",
    "rollpacker",
    "rlhfuse_plus",
    "real",
    "openrlhf",
    "nemo_aligner",
)
WAITS = ("verl", "pat", "tail_batching", "planner", "trl", "deepspeed_chat", "megatron", "oppo")


@pytest.mark.parametrize("part", [*OVERLAPS, *WAITS])
def test_systems_whose_papers_overlap_rewards_take_the_barrier_out(part: str) -> None:
    (spec,) = parse_systems([part])
    workflow = ppo(reward_model=part in (*WAITS, "openrlhf", "nemo_aligner", "real"))
    assert barriers(workflow)
    assert barriers(spec.make().rewired(workflow)) == (set() if part in OVERLAPS else barriers(workflow))


def test_calls_that_take_responses_as_they_come_wait_at_no_barrier() -> None:
    workflow = ppo(old_log_probs=True)
    everything = {("reward_score", "old_log_prob"), ("reward_score", "ref_log_prob"), ("reward_score", "values")}
    assert barriers(workflow) == everything
    assert not barriers(workflow.streaming(["generate"], ["inference"]))
    assert barriers(workflow.in_chunks(["reward"], 100)) == everything
    assert barriers(workflow.in_chunks(["reference"], 100)) == everything - {("reward_score", "ref_log_prob")}
    edges = (*workflow.in_chunks(["reference"], 100).edges, Edge("reward_score", "ref_log_prob", barrier=True))
    with pytest.raises(ConfigError, match="cannot be a barrier"):
        Workflow("both", workflow.calls, edges)


def test_the_order_of_rewards_is_a_setting_and_a_part() -> None:
    slow = {"time_per_response": 1.0, "workers": 16}
    systems = [{"verl": {"tp": 1}}, {"name": "beside", "use": [{"verl": {"tp": 1}}, "reward_beside"]}]
    first = run(workflow={"reward": slow}, systems=systems)
    beside = run(workflow={"reward": {**slow, "order": "beside_log_probs"}}, systems=systems)
    step_s = first.steps.groupby("system")["step_time_s"].mean()
    log_probs = first.calls[first.calls["kind"] == "inference"]
    log_probs_s = float((log_probs["end_at"] - log_probs["start_at"]).groupby(log_probs["system"]).sum().iloc[0]) / 3
    assert 0.0 < log_probs_s < 2.0
    assert step_s["verl"] == pytest.approx(step_s["beside"] + log_probs_s)
    assert beside.steps.groupby("system")["step_time_s"].mean()["verl"] == pytest.approx(step_s["beside"])


def test_edges_say_the_order_of_a_graph_of_your_own() -> None:
    calls = [
        {"name": "generate", "kind": "generate", "model": "actor"},
        {"name": "reward", "kind": "reward", "model": "actor"},
        {"name": "look", "kind": "inference", "model": "reference"},
        {"name": "train", "kind": "train", "model": "actor"},
        {"name": "push", "kind": "sync", "model": "actor"},
    ]
    edges: list[Any] = ["generate -> reward", "generate -> look", "reward -> train", "look -> train", "train -> push",
                        {"source": "push", "target": "generate", "lag": 1}]  # fmt: skip
    waits = {"source": "reward", "target": "look", "barrier": True}
    graph: dict[str, Any] = {"algorithm": "custom", "calls": calls}
    systems = [{"verl": {"tp": 1}}, {"name": "async", "use": [{"verl": {"tp": 1}}, "async_reward"]}]
    reward = {"time_per_response": 1.0}

    def waited(first: list[Any]) -> list[bool]:
        result = run(workflow={**graph, "edges": [*edges, *first], "reward": reward}, systems=systems)
        calls = result.calls.query("step == 0").set_index(["system", "call"])
        return [calls.loc[(n, "look"), "start_at"] >= calls.loc[(n, "reward"), "end_at"] for n in ("verl", "async")]

    assert waited([]) == [False, False]
    assert waited([waits]) == [True, False]
    assert waited(["reward -> look"]) == [True, True]  # a result that is used is waited for under every system
    with pytest.raises(ConfigError, match=r"reward\.order is for grpo, ppo and remax; custom says the order"):
        run(workflow={**graph, "edges": edges, "reward": {"order": "before_log_probs"}})
    with pytest.raises(ConfigError, match="dpo has no rewards"):
        run(workflow={"algorithm": "dpo", "reward": {"order": "before_log_probs"}})


def test_remax_scores_a_baseline_that_it_does_not_train_on() -> None:
    given: dict[str, Any] = {"models": {"reward": "qwen2.5-1.5b"}, "trace": {"fixed": 1024, "cap": 1024}}
    plain, baseline = run(**given), run(**given, workflow={"algorithm": "remax"})
    assert (baseline.steps["launched"] == 16 * 3).all()
    assert (baseline.steps["trained"] == 16 * 2).all()
    assert (baseline.steps["wasted_tokens"] == 0).all()

    def seconds(result: rlsim.Result, call: str) -> float:
        calls = result.calls[result.calls["call"] == call]
        return float(calls["compute_s"].mean())

    assert seconds(baseline, "reward_score") == pytest.approx(1.5 * seconds(plain, "reward_score"), rel=0.05)
    assert seconds(baseline, "train") == pytest.approx(seconds(plain, "train"))


def test_dpo_generates_nothing_and_takes_one_batch_after_another() -> None:
    result = run(workflow={"algorithm": "dpo"})
    assert result.manifest["tuned"] == {"": {}}  # nothing to choose
    assert set(result.calls["call"]) == {"ref_log_prob", "train"}
    assert (result.steps["gen_time_s"] == 0).all()
    assert (result.steps["staleness_max"] == 0).all()
    assert result.steps["step_time_s"].std() < 1e-9
    calls = result.calls.set_index(["step", "call"])
    assert calls.loc[(1, "ref_log_prob"), "start_at"] == calls.loc[(0, "train"), "end_at"]


# Steps that overlap ---------------------------------------------------------------------------------------------------

LAGGED = tables("bases")["lagged by hand"]
SPLIT = {"openrlhf": {"tp": 2, "rollout": 0.5}}


def lagged(lag: int, *more: Any, exact: bool = False, **changes: Any) -> rlsim.Result:
    edges = ["generate -> reward", "generate -> train", "reward -> train", "train -> push"]
    edges += [
        {"source": "push", "target": "train", "lag": 1},
        {"source": "push", "target": "generate", "lag": lag, "exact": exact},
    ]
    workflow = {**LAGGED, "edges": edges, **changes.pop("workflow", {})}
    return run(workflow=workflow, systems=[{"name": "own", "use": [SPLIT, *more]}], **changes)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_lag_is_the_most_or_exact(lag: int) -> None:
    most, exact = (lagged(lag, exact=exact, workflow={"steps": 8}).steps["staleness_max"] for exact in (False, True))
    assert (most <= lag - 1).all()
    assert (most < lag - 1).any() or lag < 3, "training is so fast here that newer weights are there"
    assert (exact[lag:] == lag - 1).all()


def test_every_table_shows_how_stale_a_system_is_and_none_does_where_nothing_is(tmp_path: Path) -> None:
    found = lagged(3, exact=True, workflow={"steps": 6})
    on_policy = lagged(1, workflow={"steps": 6})
    assert found.summary()["staleness_max"].tolist() == [2]
    for result, shown in ((found, True), (on_policy, False)):
        folder = tmp_path / str(shown)
        result.write(folder)
        summary = result.summary()
        tables = _tables(result, "", summary, judge(summary, str(result.manifest["baseline"])))
        assert any("stale" in heading for table in tables for heading in table.headings) == shown
        assert ("stale" in invoke("compare", folder).output) == shown
        rlsim.write_report(result, tmp_path / "report.html")
        assert (">stale</th>" in (tmp_path / "report.html").read_text(encoding="utf-8")) == shown
