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
    ("engine.sampling_per_logit", "1e-30 s", "mixture", EXACT),
    ("engine.sampling_per_logit", "1e-15 s", "pipelined", NEARLY),
    ("engine.expert_imbalance", 1e-9, "asynchronous", EXACT),
    ("engine.expert_imbalance", 1e-9, "mixture", NEARLY),
    ("engine.kv_offloading_bytes", "1 KiB", "dense", EXACT),
    ("engine.max_num_seqs", 1000, "asynchronous", EXACT),
    ("trace.scale", 1, "dense", EXACT),
    ("trace.prompt_scale", 1, "dense", EXACT),
    ("cluster", "1x8xh100+1x8xh100", "mixture", EXACT),
    ("cluster", {"groups": ["8xh100", "8xh100"]}, "mixture", EXACT),
    ("workflow.reward.workers", 1, "unscored", EXACT),
    ("workflow.reward.order", "beside_log_probs", "unscored", EXACT),
    ("systems", [bounded(eta=51)], "bounded", EXACT),
    *(("systems", [bounded(stale=stale)], "bounded", EXACT) for stale in ("wait", "drop", "regenerate")),
)
#: Settings at what each is by default or by nature, all in one run, and those that mean nothing on a base alone.
AT_ONCE: dict[str, Any] = {
    "engine.sampling_per_logit": 0,
    "engine.graphs": True,
    "engine.expert_imbalance": 0,
    "engine.kv_offloading_bytes": 0,
    "training.cp": 1,
    "training.pp": 1,
    "training.expert_imbalance": 1,
    "training.mini_batches": 1,
    "calibration": {"h100": "h100-vllm"},
    **{
        f"costs.{cost}": 1
        for cost in ("kernels", "recurrent", "recurrent_served", "expert_launch", "training", "network")
    },
}
ALSO: dict[str, dict[str, Any]] = {
    "dense": {
        "engine.pp": 1,
        "engine.ep": 1,
        "engine.data_parallel_attention": 1,
        "training.ep": 1,
        "workflow.warmup": 0,
    },
    "mixture": {"engine.pp": 1, "workflow.warmup": 0},
    "pipelined": {"engine.ep": 1, "engine.data_parallel_attention": 1, "training.ep": 1, "workflow.warmup": 0},
    "asynchronous": {"engine.pp": 1, "engine.ep": 1, "engine.data_parallel_attention": 1, "training.ep": 1},
}


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


def tables(base: str, part: int | None = None, **changes: object) -> dict[str, pd.DataFrame]:
    experiment = {"name": base, **COMMON, **{**BASES, **SPECIAL}[base]}
    if part is not None:
        experiment["systems"] = [{"name": "verl", "use": [*experiment["systems"], IDLE[part][1]]}]
    result = rlsim.run(experiment, overrides=changes)
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


@pytest.mark.parametrize(("key", "value", "base", "most"), NEUTRAL)
def test_a_setting_that_means_nothing_changes_nothing(key: str, value: object, base: str, most: float) -> None:
    same(plain(base), tables(base, **{key: value}), most)


@pytest.mark.parametrize("base", ALSO)
def test_settings_at_their_defaults_change_nothing(base: str) -> None:
    same(plain(base), tables(base, **AT_ONCE, **ALSO[base]), EXACT)


@pytest.mark.parametrize("part", range(len(IDLE)), ids=[what for what, _ in IDLE])
@pytest.mark.parametrize("base", ["dense", "pipelined"])
def test_a_part_that_does_nothing_changes_nothing(base: str, part: int) -> None:
    same(plain(base), tables(base, part=part), EXACT)


def test_a_reward_of_no_time_is_as_none_at_all() -> None:
    scored, unscored = plain("unscored"), tables("unscored", **{"workflow.algorithm": f"{__name__}:unrewarded"})
    calls = scored["calls"].query("call != 'reward'").reset_index(drop=True)
    of_rewards = ["score_start_at", "scored_at", "reward"]
    one, other = (table["responses"].drop(columns=of_rewards) for table in (scored, unscored))
    same({**scored, "calls": calls, "responses": one}, {**unscored, "responses": other}, EXACT)
