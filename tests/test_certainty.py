"""Worlds drawn from a calibration's errors, the intervals they give, and whether such intervals hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsim
from rlsim.cost.calibration import Calibration, load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.draw import LARGEST_BATCH, MEASURED, MIDDLE_BATCH, Draw, TransferErrors
from rlsim.cost.layout import Layout
from rlsim.cost.roofline import step_cost
from rlsim.cost.step import Chunk
from rlsim.cost.strategy import TrainStrategy
from rlsim.errors import ConfigError
from rlsim.experiment.summary import model_interval
from rlsim.hardware import load_cluster
from rlsim.models import load_model
from rlsim.report.speedups import verdict
from rlsim.sweeps.jobs import in_processes
from rlsim.validate.coverage import errors_by_setting, inside, line, spread
from rlsim.validate.parts import data_folder
from rlsim.validate.rows import Row
from rlsim.validate.serving import has_runs, read_runs
from rlsim.validate.transfer import kind_rows, shipped_fits

DATA = data_folder(None)
measured = pytest.mark.skipif(not has_runs(DATA), reason="no measured serving runs here")

H100 = load_calibration("h100-sglang")
MODEL, CLUSTER = load_model("llama-3.1-8b"), load_cluster("8xh100")
SMALL: dict[str, Any] = {
    "name": "small",
    "cluster": "8xh100",
    "model": "llama-3.1-8b",
    "calibration": "h100-sglang",
    "trace": {"fixed": 300, "cap": 300},
    "workflow": {"prompts": 8, "responses": 2, "steps": 1},
    "seeds": 1,
    "systems": [{"verl": {"tp": [2, 4]}}, {"name": "again", "use": [{"verl": {"tp": 2}}]}],
}


def with_errors(number: int, **errors: float) -> Calibration:
    """A calibration in a world of these errors only."""
    found = H100.drawn(number)
    found._draw = Draw(number, TransferErrors(**{"rollout": 0.0, "tilt": 0.0, "calls": 0.0, "sync": 0.0, **errors}))
    return found


def run(**changes: Any) -> rlsim.Result:
    return rlsim.run({**SMALL, **changes})


# The worlds -----------------------------------------------------------------------------------------------------------


def test_world_0_is_the_calibration_as_it_was_fitted() -> None:
    draw = Draw()
    assert [draw.iteration(4, 64), draw.call("train"), draw.call("inference"), draw.sync()] == [1.0] * 4
    assert type(step_cost(MODEL, 2, CLUSTER, H100.drawn(0))) is type(step_cost(MODEL, 2, CLUSTER, H100))


def test_worlds_are_spread_as_the_errors_say() -> None:
    draws = [Draw(number, TransferErrors(0.1, 0.05, 0.2, 0.3)) for number in range(1, 2001)]

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
    both = [c.weight_sync("actor", "bucketed", offload=False) for c in (calls, drawn)]
    seconds_of = [s.time_s(Layout.of(0, strategy), Layout(first_gpu=0, tp=2)) for s in both]
    assert seconds_of[1] / seconds_of[0] == pytest.approx(world.draw.sync())


# Intervals ------------------------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    """Two worlds: ln 1.1 and -ln 1.1, standard deviation √2 · 0.0953; Student's t of one degree of freedom: 12.706."""
    half = 12.7062 * math.sqrt(2) * math.log(1.1)
    found = model_interval(1.5, [1.1, 1 / 1.1])
    assert found["speedup_model_low"] == pytest.approx(1.5 * math.exp(-half), rel=1e-4)
    assert found["speedup_model_high"] == pytest.approx(1.5 * math.exp(half), rel=1e-4)
    assert all(math.isnan(end) for end in model_interval(1.5, [1.1]).values())


def test_one_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"certainty: .*one world gives no interval"):
        run(certainty=1)


def ends(result: rlsim.Result) -> Mapping[str, tuple[float, float]]:
    rows = result.summary().to_dict("records")
    return {row["system"]: (row["speedup_model_low"], row["speedup_model_high"]) for row in rows}


def test_what_systems_share_cancels() -> None:
    """The same policy twice is as fast in every world; another TP is not. Processes change nothing."""
    found = ends(run(certainty=4))
    assert found["verl-tp2"] == found["again"] == (1.0, 1.0)
    low, high = found["verl-tp4"]
    assert low < high
    assert all(math.isnan(end) for end in ends(run())["verl-tp4"])


def test_worlds_are_the_same_in_other_processes() -> None:
    from rlsim.experiment.load import load_experiment
    from rlsim.experiment.run import run_loaded

    loaded = load_experiment({**SMALL, "certainty": 2}, {}, None)
    apart = run_loaded(*loaded, execute=in_processes(2)).manifest["worlds"]
    assert apart == run(certainty=2).manifest["worlds"]


def test_a_world_can_be_run_by_itself() -> None:
    """What a world said is what its number gives again, against the seed without errors."""
    worlds = run(certainty=2).manifest["worlds"][""]["verl-tp4"]

    def speedup(draw: int) -> float:
        return float(run(draw=draw).summary().set_index("system").loc["verl-tp4", "speedup"])

    assert worlds == pytest.approx([speedup(1) / speedup(0), speedup(2) / speedup(0)])


@pytest.mark.parametrize(
    ("seeds", "errors", "expected"),
    [
        ((1.02, 1.08), (0.97, 1.12), "not told apart"),
        ((0.99, 1.08), (1.01, 1.12), "not told apart"),
        ((1.02, 1.08), (1.01, 1.12), "faster"),
        ((0.92, 0.98), (0.91, 0.99), "slower"),
        ((1.02, 1.08), (math.nan, math.nan), "faster"),
        ((math.nan, math.nan), (0.97, 1.12), "not told apart"),
        ((math.nan, math.nan), (math.nan, math.nan), "faster"),
    ],
)
def test_a_system_is_faster_only_where_both_intervals_say_so(seeds: Any, errors: Any, expected: str) -> None:
    assert verdict(0.95 if expected == "slower" else 1.05, seeds, errors) == expected


# Whether they hold ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left_out() -> Sequence[Row]:
    """Every serving run, with the fit that has not seen its setting."""
    return kind_rows(read_runs(DATA or Path()), shipped_fits(), "left-out")


@measured
@pytest.mark.parametrize("quantity", ["tpot_s", "ttft_s"])
def test_nine_of_ten_left_out_runs_lie_inside_their_interval(left_out: Sequence[Row], quantity: str) -> None:
    errors = errors_by_setting(left_out, quantity)
    runs = {setting: len(own) for setting, own in errors.items()}
    share = sum(part * runs[setting] for setting, part in inside(errors).items()) / sum(runs.values())
    assert 0.80 < share < 0.97


@measured
def test_the_errors_of_rollouts_are_those_of_left_out_runs(left_out: Sequence[Row]) -> None:
    found = spread(line(own) for own in errors_by_setting(left_out, "tpot_s").values())
    assert (found.level, found.tilt) == pytest.approx((MEASURED.rollout, MEASURED.tilt), abs=6e-4)
