"""Plans where generation is ahead of training: splits of the GPUs, the estimator against the engine, `--lag`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Command, loaded_of
from plan_problems import fits
from ruamel.yaml import YAML
from test_plans import PPO, SMALL, experiment

import rlsim
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment import planning
from rlsim.experiment.placed import PlacedExperiment
from rlsim.experiment.plan_report import search_plan
from rlsim.experiment.planning import PlanSpace, borders
from rlsim.policies.plan import part_of
from rlsim.policies.relaxed import Lagged
from rlsim.workflow.search import Budget

GRPO: dict[str, Any] = {"models": {"reward": SMALL}, "workflow": {"algorithm": "grpo", "steps": 12}}
#: Long enough for generation to weigh as much as the other calls.
LONG = experiment(**GRPO, trace={"fixed": 1024, "cap": 1024}) | {"name": "ahead"}
LONG["workflow"] |= {"responses": 8}


def space_of(given: dict[str, Any], lag: int = 1, **options: Any) -> PlanSpace:
    setup = loaded_of(given)
    return PlanSpace(PlacedExperiment(setup, Lagged(lag=lag).rewired(setup.algorithm), None, None), **options)


def steady_s(result: rlsim.Result, system: str) -> float:
    steps = result.steps.loc[result.steps["system"] == system, "step_time_s"]
    return float(steps.iloc[4:-4].mean())


@pytest.mark.parametrize(
    ("lag", "changes", "seed"), [(1, {}, 3), (3, {}, 5), (1, {**GRPO, "cluster": "2x8xh100"}, 3)], ids=str
)
def test_the_engine_takes_as_long_as_the_estimator_says(lag: int, changes: dict[str, Any], seed: int) -> None:
    given = experiment(**changes)
    given["workflow"]["steps"] = 12
    splits, rng = space_of(given, lag).splits(), np.random.default_rng(seed)
    assert len(splits) >= 7
    plans = []
    while len(plans) < 4:
        space = splits[rng.integers(len(splits))]
        plan = [int(rng.integers(options)) for options in space.problem.sizes]
        if fits(space.problem, [plan])[0]:
            plans.append((space, plan))
    systems = [
        {"name": str(i), "use": [part_of(space.plan(plan), space.workflow), {"lagged": {"lag": lag}}]}
        for i, (space, plan) in enumerate(plans)
    ]
    result = rlsim.run({**given, "systems": systems})
    expected = [float(space.problem.cost_s([plan])[0]) for space, plan in plans]
    assert [steady_s(result, str(i)) for i in range(len(plans))] == pytest.approx(expected, rel=1e-6)
    assert np.ptp(expected) > 0.2 * min(expected)  # a wrong estimate would be seen


def test_the_plan_found_is_the_best_of_all_splits_and_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MICRO_BATCHES_PER_STAGE", 2)
    given = experiment(models={}, trace={"fixed": 1024, "cap": 1024}, workflow={"algorithm": "grpo", "responses": 8})
    given["workflow"]["old_log_probs"] = False
    plans = space_of(given, pipelined=False)
    space, found = plans.search("descent", Budget(evaluations=4_000))
    costs = {}
    for split in plans.splits():
        sizes = split.problem.sizes
        every = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), axis=-1).reshape(-1, len(sizes))
        fitting = every[fits(split.problem, every)]
        if len(fitting):
            costs[split.options["generate"][0][1].strategy.gpus] = split.problem.cost_s(fitting).min()
    assert len(costs) >= 4
    assert found.cost_s == pytest.approx(min(costs.values()), rel=1e-12)
    assert costs[space.options["generate"][0][1].strategy.gpus] == min(costs.values())
    assert found.least_s <= found.cost_s * (1 + 1e-12)


def test_the_plan_found_runs_as_fast_as_it_says_and_faster_than_every_split_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    YAML().dump(LONG, Path("ppo.yaml"))
    files = ("--out", "found.yaml", "--json", "found.json")
    code, shown, _ = call("plan", "ppo.yaml", "--lag", "1", "--evaluations", "4000", *files)
    assert code == 0
    for words in ("generation:", "other calls:", "no plan of this space takes less than"):
        assert words in shown
    parts, told = YAML(typ="safe").load(Path("found.yaml")), json.loads(Path("found.json").read_text())
    assert parts[1] == {"lagged": {"lag": 1}}
    assert parts[0]["plan"]["calls"]["generate"]["gpus"].startswith("0")
    by_hand = [{"one_step_off": {"rollout_gpus": [1, 2, 4]}}]
    result = rlsim.run({**LONG, "systems": [*by_hand, {"name": "found", "use": parts}]})
    times = {name: steady_s(result, name) for name in result.steps["system"].unique()}
    found_s = times.pop("found")
    assert found_s == pytest.approx(told["iteration_time_s"], rel=1e-6)
    assert len(times) == 3
    assert told["least_iteration_time_s"] <= found_s <= min(times.values())
    assert (result.steps.set_index("system").loc["found", "staleness_max"].iloc[1:] == 1).all()
    sides = pd.DataFrame(told["sides"]).set_index("side")
    assert sides["time_s"].max() == pytest.approx(told["iteration_time_s"])
    idle = result.steps.set_index("system").loc["found", ["rollout_idle", "trainer_idle"]].iloc[2:-2].mean()
    assert sides.loc["generation", "idle"] == pytest.approx(idle["rollout_idle"], abs=0.01)


def test_a_searched_plan_beside_lagged_has_a_split_too() -> None:
    real = {"name": "real", "use": [{"real": {"evaluations": 100, "pipelined_generation": False}}, "lagged"]}
    spans = rlsim.run({**LONG, "systems": [real]}, overrides={"workflow.steps": 3}).spans
    generating = spans["kind"].isin(["prefill", "decode", "mixed"])
    border = int((spans["gpu"] + spans["gpus"])[generating].max())
    assert 0 < border <= spans["gpu"][~generating & (spans["kind"] != "weight_sync")].min()


def test_what_cannot_be_split_says_why() -> None:
    with pytest.raises(ConfigError, match="workflow dpo: no weight sync goes before generation"):
        search_plan(
            {**PPO, "models": {}, "workflow": {"algorithm": "dpo", "prompts": 8, "responses": 2, "steps": 2}}, lag=1
        )
    with pytest.raises(ConfigError, match="a cluster of one GPU cannot be split"):
        borders(1)
    with pytest.raises(CapacityError, match=r"no split of the 2 GPUs|fits on no mesh"):
        search_plan(experiment(**GRPO, model="llama-3-70b"), lag=1, evaluations=100)


def test_splits_are_at_most_sixteen_and_at_nodes_too() -> None:
    for gpus in (2, 8, 12, 16, 24, 40, 64, 1024):
        assert 1 <= len(borders(gpus)) <= 16
    assert set(range(8, 64, 8)) <= set(borders(64))
