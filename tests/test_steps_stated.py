"""Experiments of measured steps: what recipes and tables say, and lengths of a stated mean."""

import numpy as np
import pytest
from conftest import TINY, loaded_of, tables

from evidence.validate.asynchronous import experiments, seconds, write_lengths
from evidence.validate.parts import Options
from evidence.validate.published import figures
from evidence.validate.steps_nemo import nemo_experiment
from rlsim import run
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import parse_systems
from rlsim.trace import read_trace

RECIPE = tables("bases")["nemo recipe"]
SMALL = {
    **TINY,
    "model": "qwen2.5-1.5b",
    "trace": {"cap": 512, "default_prompt_tokens": 100},
    "workflow": {"prompts": 4, "responses": 4, "steps": 2, "reference": False},
    "systems": [{"verl": {"tp": 1}}],
}


@pytest.mark.parametrize(("mean", "cap"), [(800, 4096), (3200, 3968)])
def test_lengths_have_the_stated_mean_under_the_cap(mean: int, cap: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    write_lengths(tmp_path / "l.parquet", mean, cap, prompts=64, responses=32)
    tokens = read_trace(tmp_path / "l.parquet").response_tokens
    assert np.mean(tokens) == pytest.approx(mean, rel=0.01)
    assert max(tokens) == cap


def test_a_recipe_one_step_off_policy_splits_the_gpus_and_generates_ahead() -> None:
    experiment = nemo_experiment(RECIPE, "llama-3.1-8b", 100)
    training = experiment["training"]
    assert (training["micro_batch_tokens"], training["log_prob_micro_batch_tokens"]) == (4096, 8192)
    assert (training["mini_batches"], training["recompute"], experiment["trace"]["cap"]) == (4, "full", 3996)
    fixed = {"trace": {"fixed": 400, "cap": 400, "default_prompt_tokens": 100}}
    result = run({**experiment, **fixed})
    calls = result.calls.set_index(["call", "step"])
    started_at = result.responses.groupby("step")["start_at"].min()
    assert calls.end_at["weight_sync", 2] <= started_at[4] < calls.start_at["train", 3]
    assert calls.start_at["old_log_prob", 4] >= calls.end_at["weight_sync", 3]
    colocated = nemo_experiment(RECIPE | {"async_on": False}, "llama-3.1-8b", 100)
    on_policy = seconds(colocated, 400)
    assert on_policy["step"] > sum(on_policy[call] for call in ("generate", "old_log_prob", "ref_log_prob", "train"))


@pytest.mark.parametrize("name", ["verl_steps", "asynchronous"])
def test_every_stated_arm_loads_and_fits(name: str) -> None:
    for run_of in figures(Options(), name).given.values():
        for arm, experiment, _ in experiments(run_of):
            trace = {**experiment["trace"], "fixed": 1024}
            loaded = loaded_of({**experiment, "trace": trace})
            assert len(parse_systems(loaded.experiment.systems)) == 1, arm


def test_the_driver_takes_its_time_for_every_padded_token() -> None:
    trace = {"fixed": 256, "cap": 512, "default_prompt_tokens": 100}
    free, paid = (
        run({**SMALL, "trace": trace, "training": {"driver_per_token": rate}}).calls.query(
            "kind in ('train', 'inference')"
        )
        for rate in (0.0, "2 us")
    )
    longer = (paid["end_at"] - paid["start_at"]).to_numpy() - (free["end_at"] - free["start_at"]).to_numpy()
    assert longer == pytest.approx(2e-6 * 16 * (100 + 512), rel=1e-6)
    assert paid["data_s"].to_numpy() - free["data_s"].fillna(0.0).to_numpy() == pytest.approx(longer)


def test_a_plans_own_budget_of_a_log_prob_call_holds() -> None:
    calls = {"generate": {"tp": 1}, "old_log_prob": {}, "train": {}}
    training = {"log_prob_micro_batch_tokens": 8192, "micro_batch_tokens": 2048}
    for given, budget in (({}, 8192), ({"micro_batch_tokens": 4096}, 4096)):
        plan = {"plan": {"calls": calls | {"old_log_prob": given}}}
        trace = {"fixed": 256, "cap": 512}
        experiment = {**SMALL, "trace": trace, "training": training, "systems": [{"name": "planned", "use": [plan]}]}
        loaded = loaded_of(experiment)
        system = parse_systems(loaded.experiment.systems)[0].make()
        strategy = Simulator(loaded).placed(system).plan.of("old_log_prob").strategy
        assert strategy.budget(backward=False) == budget
