"""Algorithms as graphs, and what the engine makes of those that are not GRPO."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import rlsim
from rlsim.errors import ConfigError, RlsimError
from rlsim.workflow import Call, Edge, Workflow, dpo, grpo, ppo, remax

BASE: dict[str, Any] = {
    "name": "probe",
    "cluster": "8xh100",
    "model": "qwen2.5-1.5b",
    "calibration": "h100-sglang",
    "trace": {"fixed": 64, "cap": 64},
    "workflow": {"prompts": 16, "responses": 2, "steps": 3},
    "training": {"tp": 2, "backend": "megatron"},
    "seeds": 1,
    "systems": [{"verl": {"tp": 1}}],
}


def run(**changes: Any) -> rlsim.Result:
    given = {**BASE, **changes, "workflow": {**BASE["workflow"], **changes.get("workflow", {})}}
    return rlsim.run(given)


@pytest.mark.parametrize(
    ("workflow", "calls"),
    [
        (grpo(), "generate reward old_log_prob ref_log_prob train old_log_prob_sync weight_sync"),
        (ppo(), "generate reward_score ref_log_prob values train train_critic weight_sync critic_sync"),
        (remax(), "generate reward_score ref_log_prob train weight_sync"),
        (dpo(), "ref_log_prob train"),
    ],
)
def test_the_calls_of_an_algorithm(workflow: Workflow, calls: str) -> None:
    assert sorted(workflow.order()) == sorted(calls.split())


def test_training_waits_for_all_that_prepares_it() -> None:
    order = ppo().order()
    for train in ("train", "train_critic"):
        for call in ("reward_score", "ref_log_prob", "values"):
            assert order.index(call) < order.index(train)


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
    assert (result.steps["staleness"] == 0).all()
    assert result.steps["step_time_s"].std() < 1e-9
    calls = result.calls.set_index(["step", "call"])
    assert calls.loc[(1, "ref_log_prob"), "start_at"] == calls.loc[(0, "train"), "end_at"]


def test_a_workflow_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guarded.py").write_text(
        "from rlsim.workflow import Call, Edge, Workflow\n"
        "def make():\n"
        "    calls = (Call('generate', 'generate', 'actor'), Call('safety', 'inference', 'guard'),\n"
        "             Call('train', 'train', 'actor'), Call('push', 'sync', 'actor'))\n"
        "    edges = (Edge('generate', 'safety'), Edge('safety', 'train'), Edge('train', 'push'),\n"
        "             Edge('push', 'generate', lag=1))\n"
        "    return Workflow('guarded', calls, edges)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(models={"guard": "qwen2.5-3b"}, workflow={"algorithm": "guarded:make"})
    assert set(result.calls["call"]) == {"generate", "safety", "train", "push"}
    del sys.modules["guarded"]


@pytest.mark.parametrize(
    ("workflow", "models", "message"),
    [
        ({"algorithm": "pppo"}, {}, "unknown algorithm 'pppo'; did you mean 'ppo'"),
        ({"algorithm": "ppo"}, {"critc": "qwen2.5-3b"}, "unknown model role for ppo 'critc'"),
        ({"algorithm": "custom"}, {}, "calls and edges go with algorithm: custom"),
        ({"algorithm": "nowhere:make"}, {}, "nowhere:make cannot be loaded"),
        ({"algorithm": "json:dumps"}, {}, "json:dumps: json is a module of Python's standard library"),
        ({"edges": ["generate > train"]}, {}, "expected an edge such as `generate -> train`"),
    ],
)
def test_workflows_with_a_mistake(workflow: dict[str, Any], models: dict[str, str], message: str) -> None:
    with pytest.raises(RlsimError) as caught:
        run(workflow=workflow, models=models)
    assert message in str(caught.value)


def test_a_sync_goes_from_training_to_the_same_model() -> None:
    calls = (Call("generate", "generate", "actor"), Call("train", "train", "critic"), Call("push", "sync", "actor"))
    edges = (Edge("generate", "train"), Edge("train", "push"), Edge("push", "generate", lag=1))
    with pytest.raises(ConfigError, match="push brings weights from one train call to other calls of that model"):
        Workflow("odd", calls, edges)
