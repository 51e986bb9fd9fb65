"""Settings that change nothing, each equal to the digit in all tables of results, beside plain experiments."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd
import pytest

import rlsim
from rlsim import RolloutControl
from rlsim.sim.control import RolloutView
from rlsim.workflow.algorithms import grpo
from rlsim.workflow.graph import Workflow

COMMON: dict[str, Any] = {
    "cluster": "8xh100",
    "calibration": "h100-vllm",
    "trace": {"path": "rollpacker-math", "cap": 1024},
    "workflow": {"prompts": 8, "responses": 4, "steps": 2, "reference": False},
    "training": {"backend": "megatron", "tp": 4, "offload": True},
    "seeds": 1,
    "certainty": 0,
}
SPLIT = {"rollout_gpus": 4, "tp": 4}


def bounded(**rule: object) -> dict[str, Any]:
    """Continuous generation whose two batches under way never come to its bound of staleness."""
    rule = {"eta": 50, "concurrent_batches": 2, **rule}
    return {
        "name": "bounded",
        "use": [{"verl": {"tp": 4}}, {"split": {"rollout_gpus": 4}}, {"bounded_staleness": rule}],
    }


BASES: dict[str, dict[str, Any]] = {
    "dense": {"model": "qwen2.5-7b", "systems": [{"verl": {"tp": 4}}]},
    "mixture": {
        "model": "qwen3-30b-a3b", "cluster": "2x8xh100", "engine": {"ep": 8, "data_parallel_attention": 8},
        "systems": [{"verl": {"tp": 8}}], "training": {**COMMON["training"], "tp": 2, "ep": 8},
    },
    "pipelined": {"model": "qwen2.5-7b", "engine": {"pp": 2}, "systems": [{"verl": {"tp": 4}}]},
    "asynchronous": {
        "model": "qwen2.5-7b", "systems": [{"areal": SPLIT}, {"laminar": SPLIT}], "baseline": "areal",
        "workflow": {**COMMON["workflow"], "steps": 4}, "training": {"backend": "megatron", "tp": 4},
    },
}  # fmt: skip
#: Bases of settings that mean nothing there only.
SPECIAL: dict[str, dict[str, Any]] = {
    "unscored": {
        **BASES["dense"],
        "workflow": {**COMMON["workflow"], "reward": {"from_trace": False, "time_per_response": 0}},
    },
    "bounded": {**BASES["asynchronous"], "systems": [bounded()], "baseline": "bounded"},
}

#: The setting, what it is set to, the bases that it is tried on (all, where none is named), and how far numbers may
#: be apart: by rounding, or by what is as good as nothing itself.
EXACT, NEARLY = 0.0, 1e-6
NEUTRAL: tuple[tuple[str, Any, str, float], ...] = (
    ("engine.sampling_per_logit", "1e-30 s", "", EXACT),
    ("engine.sampling_per_logit", "1e-15 s", "dense mixture pipelined", NEARLY),
    ("engine.sampling_per_logit", 0, "", EXACT),
    ("engine.graphs", True, "", EXACT),
    ("engine.pp", 1, "dense mixture asynchronous", EXACT),
    ("engine.ep", 1, "dense pipelined asynchronous", EXACT),
    ("engine.data_parallel_attention", 1, "dense pipelined asynchronous", EXACT),
    ("engine.expert_imbalance", 0, "", EXACT),
    ("engine.expert_imbalance", 1e-9, "dense pipelined asynchronous", EXACT),
    ("engine.expert_imbalance", 1e-9, "mixture", NEARLY),
    ("engine.kv_offloading_bytes", 0, "dense asynchronous", EXACT),
    ("engine.kv_offloading_bytes", "1 KiB", "dense asynchronous", EXACT),
    ("engine.max_num_seqs", 1000, "", EXACT),
    ("training.cp", 1, "", EXACT),
    ("training.pp", 1, "", EXACT),
    ("training.ep", 1, "dense pipelined asynchronous", EXACT),
    ("training.expert_imbalance", 1, "", EXACT),
    ("training.mini_batches", 1, "", EXACT),
    ("workflow.warmup", 0, "dense mixture pipelined", EXACT),
    ("trace.scale", 1, "dense", EXACT),
    ("trace.prompt_scale", 1, "dense", EXACT),
    *((f"costs.{cost}", 1, "", EXACT) for cost in ("kernels", "recurrent", "recurrent_served", "expert_launch")),
    ("costs.training", 1, "", EXACT),
    ("costs.network", 1, "mixture", EXACT),
    ("calibration", {"h100": "h100-vllm"}, "", EXACT),
    ("cluster", "1x8xh100+1x8xh100", "mixture", EXACT),
    ("cluster", {"groups": ["8xh100", "8xh100"]}, "mixture", EXACT),
    ("workflow.reward.workers", 1, "unscored", EXACT),
    ("workflow.reward.order", "beside_log_probs", "unscored", EXACT),
    ("systems", [bounded(eta=51)], "bounded", EXACT),
    *(("systems", [bounded(stale=stale)], "bounded", EXACT) for stale in ("wait", "drop", "regenerate")),
)


class Looks(RolloutControl):
    """Has a timer, and never does anything."""

    every_s = 0.5

    def on_timer(self, view: RolloutView) -> None:
        view.replicas()


#: A part of a system that never does anything, beside the base's own system.
IDLE: tuple[tuple[str, Any], ...] = (
    ("overcommit of nothing", {"overcommit": {"delta": 0}}),
    ("short rounds without surplus", {"tail_batching": {"eta": 1}}),
    ("a timer", f"{__name__}:Looks"),
    ("consolidation of a share that is never left", {"tail_consolidation": {"remaining": 1e-9}}),
    ("a budget that no response reaches", {"partial_rollout": {"budget": 1025}}),
    ("a share that is all", {"partial_rollout": {"share": 1}}),
)


def unrewarded(**_: object) -> Workflow:
    return grpo(reference=False).without(["reward"])


def tables(base: str, key: str = "", value: object = None, part: int | None = None) -> dict[str, pd.DataFrame]:
    experiment = {"name": base, **COMMON, **{**BASES, **SPECIAL}[base]}
    if part is not None:
        experiment["systems"] = [{"name": "verl", "use": [*experiment["systems"], IDLE[part][1]]}]
    result = rlsim.run(experiment, overrides={key: value} if key else {})
    names = ("steps", "calls", "responses", "stays", "spans", "switches")
    return {name: getattr(result, name) for name in names}


@cache
def plain(base: str) -> dict[str, pd.DataFrame]:
    return tables(base)


def same(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame], most: float) -> None:
    """But for the label of a round."""
    for name, table in one.items():
        table, known = other[name].drop(columns="round", errors="ignore"), table.drop(columns="round", errors="ignore")
        pd.testing.assert_frame_equal(table, known, check_exact=not most, rtol=most, atol=most, obj=name)


ROWS = [
    pytest.param(base, key, value, most, id=f"{base}-{key}={str(value)[:30]}")
    for key, value, bases, most in NEUTRAL
    for base in (bases.split() or BASES)
]


@pytest.mark.parametrize(("base", "key", "value", "most"), ROWS)
def test_a_setting_that_means_nothing_changes_nothing(base: str, key: str, value: object, most: float) -> None:
    same(plain(base), tables(base, key, value), most)


@pytest.mark.parametrize("part", range(len(IDLE)), ids=[what for what, _ in IDLE])
@pytest.mark.parametrize("base", ["dense", "mixture", "pipelined"])
def test_a_part_that_does_nothing_changes_nothing(base: str, part: int) -> None:
    same(plain(base), tables(base, part=part), EXACT)


def test_a_reward_of_no_time_is_as_none_at_all() -> None:
    scored, unscored = plain("unscored"), tables("unscored", "workflow.algorithm", f"{__name__}:unrewarded")
    calls = scored["calls"].query("call != 'reward'").reset_index(drop=True)
    of_rewards = ["score_start_at", "scored_at", "reward"]
    one, other = (table["responses"].drop(columns=of_rewards) for table in (scored, unscored))
    same({**scored, "calls": calls, "responses": one}, {**unscored, "responses": other}, EXACT)
