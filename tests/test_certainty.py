"""Worlds drawn from a calibration's errors, the intervals they give, and whether such intervals hold."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import tables

import evidence.validate as validation
import rlsim
from evidence.validate.coverage import OUTLIER, inside, level_spread, levels_inside, line, shipped_calls, spread
from evidence.validate.parts import Options
from evidence.validate.published import run as validated
from evidence.validate.weight_sync import left_out, left_out_errors, predicted_errors, read_syncs
from rlsim.cost.assumed import LARGEST_BATCH, MEASURED, MIDDLE_BATCH, Draw, TransferErrors
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.layout import Layout
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import Chunk
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.experiment.load import load_experiment
from rlsim.experiment.run import check_experiment, run_loaded
from rlsim.experiment.summary import model_interval
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.results.sweeps.points import load_sweep
from rlsim.workflow.search.methods import find_best

EVIDENCE = Options().evidence

H100 = load_calibration("h100-sglang")
MODEL, CLUSTER = load_model("llama-3.1-8b"), load_cluster("8xh100")
SMALL: dict[str, Any] = tables("bases")["certainty"]


def with_errors(number: int, **errors: float) -> Calibration:
    """A calibration in a world of these errors only."""
    found = H100.drawn(number)
    found._draw = Draw(
        number, TransferErrors(**{**dict.fromkeys(("family", "rollout", "tilt", "calls", "sync"), 0.0), **errors})
    )
    return found


@cache
def in_worlds(certainty: int = 0, draw: int = 0) -> rlsim.Result:
    """`SMALL` in so many worlds, or in one of a number alone."""
    return rlsim.run({**SMALL, "certainty": certainty, "draw": draw})


def tp4_of(result: rlsim.Result, column: str = "speedup") -> float:
    return float(result.summary().set_index("system").loc["verl-tp4", column])


# The worlds -----------------------------------------------------------------------------------------------------------


def test_world_0_is_the_calibration_as_it_was_fitted() -> None:
    draw = Draw()
    assert [draw.iteration(4, 64), draw.call("train"), draw.call("inference"), draw.sync()] == [1.0] * 4
    assert type(step_cost(MODEL, 2, CLUSTER, H100.drawn(0))) is type(step_cost(MODEL, 2, CLUSTER, H100))


def test_worlds_are_spread_as_the_errors_say() -> None:
    draws = [Draw(number, TransferErrors(0.0, 0.1, 0.05, 0.2, 0.3)) for number in range(1, 2001)]

    def deviation(values: list[float]) -> float:
        return float(np.log(values).std())

    assert deviation([d.iteration(2, MIDDLE_BATCH) for d in draws]) == pytest.approx(0.1, rel=0.06)
    doublings = math.log2(LARGEST_BATCH / MIDDLE_BATCH)
    assert deviation([d.iteration(2, 10**6) for d in draws]) == pytest.approx(
        math.hypot(0.1, 0.05 * doublings), rel=0.06
    )
    assert deviation([d.call("train") for d in draws]) == pytest.approx(0.2, rel=0.06)
    assert deviation([d.sync() for d in draws]) == pytest.approx(0.3, rel=0.06)
    pairs = np.log([[d.iteration(2, MIDDLE_BATCH), d.iteration(4, MIDDLE_BATCH)] for d in draws])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.06, "every TP has an error of its own"
    alike = [Draw(number, TransferErrors(0.4, 0.0, 0.0, 0.0, 0.0)) for number in range(1, 2001)]
    assert deviation([d.iteration(2, 1) for d in alike]) == pytest.approx(0.4, rel=0.06)
    assert all(d.iteration(2, 1) == d.iteration(8, 64) for d in alike), "one of the model, GPU and engine for all"


def test_a_world_changes_what_is_priced_by_its_factors() -> None:
    one, many = MIDDLE_BATCH, 4 * MIDDLE_BATCH
    known, cost = step_cost(MODEL, 2, CLUSTER, H100), step_cost(MODEL, 2, CLUSTER, with_errors(3, rollout=0.1))
    factor = with_errors(3, rollout=0.1).draw.iteration(2, one)
    assert factor != 1.0
    chunks = [Chunk(512, 0)]
    for sequences in (one, many):
        ratio = cost.decode(sequences).steps_s(40_000, 700) / known.decode(sequences).steps_s(40_000, 700)
        assert ratio == pytest.approx(factor)
    assert cost.prefill_s(chunks) / known.prefill_s(chunks) == pytest.approx(factor)
    assert cost.mixed_s(7, 900, chunks) / known.mixed_s(7, 900, chunks) == pytest.approx(factor)

    world = with_errors(5, calls=0.1, sync=0.2)
    calls, drawn = (CallCosts({"actor": MODEL}, CLUSTER, c, "fsdp", None) for c in (H100, world))
    strategy = TrainStrategy(dp=8, zero_stage=3)
    efficiency = H100.training.flop_efficiency["fsdp"]
    found = drawn.of("actor", strategy).efficiency
    assert efficiency / found.flop == pytest.approx(world.draw.call("train"))
    assert efficiency / (found.forward or 0.0) == pytest.approx(world.draw.call("inference"))
    both = [c.weight_sync("actor", "bucketed", c, offload=False) for c in (calls, drawn)]
    seconds_of = [s.time_s(Layout.of(0, strategy), Layout(first_gpu=0, tp=2)) for s in both]
    assert seconds_of[1] / seconds_of[0] == pytest.approx(world.draw.sync())


# Intervals ------------------------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    """Two worlds: ln 1.1 and -ln 1.1, standard deviation √2 · 0.0953; Student's t of one degree of freedom: 12.706."""
    half = 12.7062 * math.sqrt(2) * math.log(1.1)
    found = model_interval("speedup", 1.5, [1.1, 1 / 1.1])
    assert found["speedup_model_low"] == pytest.approx(1.5 * math.exp(-half), rel=1e-4)
    assert found["speedup_model_high"] == pytest.approx(1.5 * math.exp(half), rel=1e-4)
    assert all(math.isnan(end) for end in model_interval("speedup", 1.5, [1.1]).values())
    with pytest.raises(ConfigError, match=r"certainty: .*one world gives no interval"):
        in_worlds(1)


def ends(result: rlsim.Result) -> Mapping[str, tuple[float, float]]:
    rows = result.summary().to_dict("records")
    return {row["system"]: (row["speedup_model_low"], row["speedup_model_high"]) for row in rows}


def test_what_systems_share_cancels() -> None:
    """The same policy twice is as fast in every world; another TP is not."""
    found = ends(in_worlds(5))
    assert found["verl-tp2"] == found["again"] == (1.0, 1.0)
    low, high = found["verl-tp4"]
    assert low < high
    assert all(math.isnan(end) for end in ends(in_worlds())["verl-tp4"])
    # What a world said is what its number gives again, against the seed without errors.
    worlds = in_worlds(5).manifest["worlds"][""]["verl-tp4"]
    assert worlds[0] == pytest.approx(tp4_of(in_worlds(draw=1)) / tp4_of(in_worlds()))
    assert worlds[1] == pytest.approx(tp4_of(in_worlds(draw=2)) / tp4_of(in_worlds()))


def test_the_seconds_of_a_step_have_an_interval_too() -> None:
    """As wide as the family's error, which speedups do not see; of five worlds, by Student's t of four degrees."""
    found = in_worlds(5)
    steps = found.manifest["world_steps"][""]["verl-tp4"]
    seconds = [tp4_of(in_worlds(draw=n), "step_time_s") for n in (0, 1)]
    assert steps[0] == pytest.approx(seconds[1] / seconds[0])
    row = found.summary().set_index("system").loc["verl-tp4"]
    half = 2.776445 * float(np.std(np.log(steps), ddof=1))
    assert row["step_time_s_model_high"] == pytest.approx(row["step_time_s"] * math.exp(half), rel=1e-4)
    assert math.isnan(tp4_of(in_worlds(4), "step_time_s_model_low")), "four say too little"


# By default -----------------------------------------------------------------------------------------------------------


def test_two_seeds_of_two_systems_draw_a_world_each() -> None:
    found, asked = (rlsim.run({**SMALL, "seeds": [4, 7], **more}) for more in ({}, {"certainty": 2}))
    assert found.manifest["worlds"] == asked.manifest["worlds"]
    assert [len(ratios) for ratios in found.manifest["worlds"][""].values()] == [2, 2, 2]
    assert found.manifest["experiment"]["certainty"] == 2, "what was drawn, not that it was left to rlsim"
    low, high = ends(found)["verl-tp4"]
    assert low < high


@pytest.mark.parametrize(
    "changes", [{"seeds": 2, "certainty": 0}, {"seeds": 1}, {"seeds": 2, "systems": ["verl"]}, {"seeds": 2, "draw": 3}]
)
def test_nothing_is_drawn_where_nothing_is_compared_or_it_is_not_wanted(changes: dict[str, Any]) -> None:
    found = rlsim.run({**SMALL, **changes})
    assert (found.manifest["worlds"], found.manifest["experiment"]["certainty"]) == ({}, 0)


def test_a_case_in_which_two_systems_run_is_enough() -> None:
    cases = {"one": {"systems": ["verl"]}, "two": {"systems": ["verl", {"name": "b", "use": [{"verl": {"tp": 2}}]}]}}
    assert check_experiment({**SMALL, "systems": ["verl"], "cases": cases, "seeds": 3}).worlds == 3
    assert check_experiment({**SMALL, "systems": ["verl"], "cases": {"one": cases["one"]}, "seeds": 3}).worlds == 0


def test_a_sweep_draws_only_where_it_is_asked() -> None:
    for asked, drawn in (({}, 0), ({"certainty": 2}, 2)):
        experiment = {**SMALL, "seeds": 2, **asked}
        (point,) = load_sweep({"name": "s", "experiment": experiment, "axes": [{"grid": {"trace.cap": [64]}}]}).points
        assert point.config["certainty"] == drawn
    assert validated({**SMALL, "seeds": 2}).manifest["worlds"] == {}
    for path in Path(validation.__file__).parent.glob("*.py"):
        assert "rlsim.experiment.run import" not in path.read_text(encoding="utf-8"), f"{path.name}: runs.run instead"


Told = list[tuple[int, int, str]]


@pytest.fixture(scope="module")
def watched() -> tuple[rlsim.Result, Told]:
    """Two seeds in a world each, and what was told of their progress."""
    told: Told = []
    result = run_loaded(*load_experiment({**SMALL, "seeds": 2}), progress=lambda *now: told.append(now))
    return result, told


def test_progress_counts_the_runs_in_worlds(watched: tuple[rlsim.Result, Told]) -> None:
    _, told = watched
    assert {total for _, total, _ in told} == {8}, "two distinct systems, on two seeds and in two worlds"
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[0][0] == 0
    assert told[-1][0] == 8
    assert any(what == "world 2 of 2" for _, _, what in told)


def test_workers_change_no_result(watched: tuple[rlsim.Result, Told]) -> None:
    one, two = watched[0], run_loaded(*load_experiment({**SMALL, "seeds": 2}), workers=2)
    assert {**one.manifest, "created": ""} == {**two.manifest, "created": ""}
    pd.testing.assert_frame_equal(one.summary(), two.summary())


def test_a_plan_is_searched_for_once_and_kept_in_the_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def counted(*arguments: Any, **more: Any) -> Any:
        searches.append(arguments)
        return find_best(*arguments, **more)

    monkeypatch.setattr("rlsim.experiment.planning.find_best", counted)
    systems = [{"verl": {"tp": 2}}, {"name": "found", "use": [{"real": {"evaluations": 200}}]}]
    loaded = load_experiment({**SMALL, "cluster": "2xh100", "model": "qwen2.5-1.5b", "seeds": 2, "systems": systems})
    assert len(run_loaded(*loaded).manifest["worlds"][""]["found"]) == 2
    assert len(searches) == 1


# Whether they hold ----------------------------------------------------------------------------------------------------


def test_the_worlds_of_rollouts_are_those_of_unseen_families() -> None:
    """The page's own words, which `rlsim validate transfer --check` keeps true; nine of ten runs lie inside."""
    page = (EVIDENCE.parent / "docs/validation.md").read_text(encoding="utf-8")
    found = re.search(r"TPOT scatter by ([\d., ]+) over .*; worlds draw ([\d., ]+)\.", page)
    assert found[2] == f"{MEASURED.family:.3f}, {MEASURED.rollout:.3f}, {MEASURED.tilt:.3f}"
    scatter, drawn = (list(map(float, told.split(", "))) for told in found.groups())
    assert all(one <= other for one, other in zip(scatter, drawn, strict=True)), "worlds draw less than was seen"
    everything = re.search(r"^\| all \| \d+ \| (\d+)% \| (\d+)% \|$", page, re.MULTILINE)
    assert all(int(share) >= 85 for share in everything.groups())


def test_spreads_over_families_and_their_settings_by_hand() -> None:
    """Two families of two settings, levels 0.3 and 0.1, 0 and -0.4: means 0.2 and -0.2, 0.1 and 0.2 beside them, times
    the root of 4 / 2. One setting's errors grow by 0.1 a doubling."""
    users = np.arange(-1.0, 2.0)
    levels = {"a/x": 0.3, "a/y": 0.1, "b/x": 0.0, "b/y": -0.4}
    slopes = {"a/x": 0.1}
    errors = {name: np.stack([users, level + slopes.get(name, 0.0) * users], axis=1) for name, level in levels.items()}
    found = spread(errors)
    assert found == pytest.approx((0.2, math.sqrt(2 * (0.01 + 0.04) / 2), 0.05, 0.0), abs=1e-12)
    assert inside(errors)["a/y"] == 1.0
    flat = line(np.array([[0.0, 0.1], [1.0, 0.3]]))
    assert (flat.level, math.isnan(flat.tilt)) == (pytest.approx(0.2), True), "two numbers of users give no slope"
    # Of two other settings, each counted once: 2.920 (Student's t) times the root of their mean square.
    errors = {"a": np.array([0.1, -0.1]), "b": np.array([0.1]), "c": np.array([0.29, 0.30])}
    assert levels_inside(errors) == {"a": 2, "b": 1, "c": 1}
    assert level_spread({"a": np.array([0.3, 0.3, 0.3]), "b": np.array([0.1])}) == pytest.approx(math.sqrt(0.05))


@pytest.mark.parametrize(("outlier", "inside_of"), [(False, (60, 66)), (True, (64, 68))])
def test_nine_of_ten_left_out_calls_lie_inside_their_interval(outlier: bool, inside_of: tuple[int, int]) -> None:
    errors = shipped_calls().log_errors(outlier)
    found = levels_inside(errors)
    assert (sum(found.values()), sum(map(len, errors.values()))) == inside_of
    assert 0.80 < inside_of[0] / inside_of[1] < 0.97
    assert found.get(OUTLIER, 0) == 0, "the run that the model cannot tell lies outside; it is counted all the same"
    assert (MEASURED.calls == pytest.approx(level_spread(errors), abs=6e-4)) == outlier, "worlds are drawn with it"


def test_weight_syncs_lie_inside_their_interval() -> None:
    """All of the predicted, five of which are too few for nine of ten; seven of eight that know nothing of theirs."""
    found = read_syncs(EVIDENCE)
    unseen = left_out({row: time for row, (_, time) in found.items()})
    for errors, inside_of in ((predicted_errors(found), (5, 5)), (left_out_errors(found, unseen), (7, 8))):
        assert (sum(levels_inside(errors).values()), sum(map(len, errors.values()))) == inside_of
        assert inside_of[0] / inside_of[1] > 0.80
    assert level_spread(predicted_errors(found)) == pytest.approx(MEASURED.sync, abs=6e-4)
