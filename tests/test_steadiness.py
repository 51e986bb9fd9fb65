"""Which steps means count, which systems are marked as their throughput would not last, and which as they ran few."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from result_tables import RUN, table
from test_asynchronous import run

from rlsim.errors import ConfigError
from rlsim.experiment.steadiness import Window, held_back, unsteady
from rlsim.experiment.summary import KNOWN, half_width, luck, luck_note

STATIC = {"name": "static", "use": [{"verl": {"tp": 1}}]}
OVERLAPPING = [
    {"one_step_off": {"tp": 1, "rollout_gpus": 4}},
    {"areal": {"tp": 1, "rollout_gpus": 4, "eta": [1, 2, 4]}},
    {"verl_fully_async": {"tp": 1, "rollout_gpus": 4, "staleness_threshold": [1, 2], "trigger_parameter_sync_step": 1}},
]
ROUNDS = ["short", "short", "long"]


@pytest.mark.parametrize(
    ("rounds", "lag", "warmup", "fill", "counted"),
    [
        ([""] * 5, 0, None, 0, range(5)),
        ([""] * 5, 0, 2, 0, range(2, 5)),
        ([""] * 6, 1, None, 1, range(1, 5)),
        ([""] * 7, 1, None, 1, range(1, 5)),  # whole periods of two steps
        ([""] * 2, 1, None, 1, range(2)),  # too few: the test of steadiness marks it
        ([""] * 24, 0, None, 9, range(9, 24)),
        ([""] * 24, 0, None, 24, range(12, 24)),  # it never fills
        (ROUNDS * 2 + ["short", "short"], 0, None, 0, range(6)),
        (["short", *ROUNDS * 2], 0, None, 0, range(7)),  # the first cycle is longer
        (ROUNDS * 3, 0, 1, 0, range(3, 9)),
        (["short"] * 3, 0, None, 0, range(3)),  # no cycle is over
    ],
)
def test_steps_are_counted_after_the_fill_in_whole_periods(
    rounds: list[str], lag: int, warmup: int | None, fill: int, counted: range
) -> None:
    block = Window(lag, warmup).blocks(rounds, fill)
    assert np.flatnonzero(block >= 0).tolist() == [*counted]
    assert (np.diff(block[counted]) >= 0).all()


@pytest.mark.parametrize(
    ("rounds", "lag", "fill", "lengths"),
    [
        ([""] * 5, 0, 0, [1] * 5),
        ([""] * 8, 1, 1, [2, 2, 2]),
        ([""] * 24, 0, 9, [3] * 5),  # a quarter of the fill and more
        ([""] * 26, 0, 10, [3, 3, 3, 3, 4]),  # the last takes what is too short
        (ROUNDS * 2 + ["short"], 0, 0, [3, 3]),
        (["short", *ROUNDS * 2], 0, 0, [4, 3]),
        (["short"] * 3, 0, 0, [1] * 3),
    ],
)
def test_blocks_are_of_whole_periods(rounds: list[str], lag: int, fill: int, lengths: list[int]) -> None:
    block = Window(lag, None).blocks(rounds, fill)
    assert np.bincount(block[block >= 0]).tolist() == lengths


def test_a_warm_up_leaves_a_period() -> None:
    Window(1, 3).check(6)
    with pytest.raises(ConfigError, match="warmup 4 of 6 steps leaves too few to measure where 1 more run beside"):
        Window(1, 4).check(6)


def steps(count: int = 12, **columns: Any) -> pd.DataFrame:
    """Steps of 10 s and 1,000 tokens each, with as much outstanding before as after; columns by value or by step."""
    plain: dict[str, Any] = {"tokens": 1000, "trained": 8, "step_time_s": 10.0, "filled": True, "staleness_max": 1}
    given = {**plain, "outstanding_tokens": 500, "steady": lambda i: i >= 2, **columns}
    rows = ({name: of(i) if callable(of) else of for name, of in given.items()} for i in range(count))
    return table("steps", *(RUN | {"step": i} | row for i, row in enumerate(rows)))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({}, ""),
        ({"outstanding_tokens": 0, "step_time_s": lambda i: i + 1.0}, ""),  # nothing goes from step to step
        (
            {"outstanding_tokens": lambda i: 500 + 100 * i},
            "more tokens are begun than trained on in the counted steps (10% of these); take 34 workflow.steps or more",
        ),
        ({"outstanding_tokens": lambda i: 5000 - 50 * i}, "fewer tokens are begun than trained on"),
        ({"outstanding_tokens": lambda i: 500 + 20 * i}, ""),  # 2%
        ({"dropped_tokens": 310}, "prompts dropped as too stale hold 31% of the tokens trained on"),
        (
            {"filled": lambda i: i >= 4, "steady": lambda i: i >= 5},
            "it fills for 4 steps, and 7 are counted, not 2 times as many after that; take 16 workflow.steps or more",
        ),
        ({"filled": lambda i: i >= 3}, "it fills for 3 steps, and 10 are counted"),  # some of them fill
        (
            {"step_time_s": lambda i: 10.0 + i / 2},
            "its tokens/s change by -19% from the first half of the counted steps to the second; take 24 workflow",
        ),
        ({"step_time_s": lambda i: 10.0 + 4 * (i % 2)}, ""),  # no trend
        ({"staleness_mean": lambda i: i / 8}, "its mean staleness changes by +0.62 updates"),
    ],
)
def test_what_would_not_last_is_marked(columns: dict[str, Any], why: str) -> None:
    found = unsteady(steps(**columns))
    assert found.startswith(why) if why else found == ""


def test_what_grows_in_one_seed_and_falls_in_another_is_chance() -> None:
    grows, falls = (steps(outstanding_tokens=lambda i, by=by: 900 + by * i) for by in (50, -50))
    assert held_back(grows) == pytest.approx(0.05)
    both = pd.concat([grows, falls.assign(seed=1)])
    assert (held_back(both), unsteady(both)) == (0.0, "")
    drifts = steps(step_time_s=lambda i: 9.0 + i, block=lambda i: i)
    assert luck(drifts) > KNOWN
    assert [*luck_note(drifts)] == []


@pytest.mark.parametrize(
    ("times_s", "blocks", "share", "said"),
    [
        (
            [10, 12, 14],
            [0, 1, 2],
            4.3027 * 2 / 3**0.5 / 12,
            " are known to ±41.4% by their own 3 steps: ±3% takes about 191",
        ),
        ([4, 20, 6, 18, 5, 19], [0, 0, 1, 1, 2, 2], 0.0, ""),  # periods that are equal
        ([9, 11, 21, 10, 10], [0, 0, 1, 2, 2], 4.3027 * 4.5726 / 3**0.5 / 12.2, " are known to ±93.1%"),  # unlike ones
        ([12.0, 12.1, 11.9, 12.0], [0, 1, 2, 3], 3.1824 * 0.08165 / 2 / 12, ""),  # 1.1%
        ([10, 14], [0, 1], float("nan"), ""),  # nobody knows
    ],
)
def test_few_steps_are_marked_by_how_far_they_differ(
    times_s: list[float], blocks: list[int], share: float, said: str
) -> None:
    rows = [
        RUN | {"step": i, "step_time_s": s, "block": b} for i, (s, b) in enumerate(zip(times_s, blocks, strict=True))
    ]
    own = table("steps", *rows)
    assert luck(own) == pytest.approx(share, rel=1e-3, nan_ok=True)
    assert "".join(luck_note(own)).startswith(f"step times{said}" if said else "")
    assert bool(said) == bool([*luck_note(own)])
    twice = pd.concat([own, own.assign(seed=1)])
    assert half_width(twice, "step_time_s") < half_width(own, "step_time_s") or not share > 0


def first_of(steps: pd.DataFrame, count: int) -> pd.DataFrame:
    """The first steps of a run as a shorter run counts them."""
    parts = []
    for _, own in steps.groupby("seed"):
        first = own.sort_values("step").head(count)
        lag = int(own["system"].iloc[0] == "one_step_off")
        block = Window(lag, None).blocks(first["round"].tolist(), int((~own["filled"]).sum()))
        parts.append(first.assign(steady=block >= 0, block=block))
    return pd.concat(parts)


def measured(steps: pd.DataFrame) -> list[float]:
    """Tokens per second and seconds of a step."""
    steady = steps[steps["steady"]]
    return [float(steady["tokens"].sum() / steady["step_time_s"].sum()), float(steady["step_time_s"].mean())]


@pytest.mark.parametrize(
    ("cap", "prompts", "long", "seeds"), [("2K", 16, 80, 1), pytest.param("4K", 8, 200, 2, marks=pytest.mark.slow)]
)
def test_short_runs_are_within_3_percent_of_long_ones_or_marked(cap: str, prompts: int, long: int, seeds: int) -> None:
    trace, workflow = {"path": "rollpacker-math", "cap": cap}, {"steps": long, "prompts": prompts}
    found = run(STATIC, *OVERLAPPING, trace=trace, workflow=workflow, seeds=seeds)
    drifts, vague = set(), set()
    for system, own in found.steps.groupby("system", sort=False):
        short = first_of(own, 24)
        assert unsteady(own) == "", f"a long run is steady: {system}"
        drifts |= {system} if unsteady(short) else set()
        vague |= {system} if luck(short) > KNOWN else set()
        assert system in drifts | vague or measured(short) == pytest.approx(measured(own), rel=0.03), system
        assert luck(own) < KNOWN or cap == "2K", f"a long run says how long a step takes: {system}"
    assert vague - {"static", "one_step_off"}, "what 24 steps happen to draw"
    assert bool(drifts) == (cap != "2K"), "longer responses fill for longer"
    assert ("static" in vague) == ("one_step_off" in vague) == (cap != "2K"), "fewer responses differ by more"


def test_what_others_allow_moves_no_window() -> None:
    """A system that may be 16 updates stale in a run of 16 steps."""
    eager = {"areal": {"tp": 1, "rollout_gpus": 4, "eta": 16}}
    alone, beside = (
        run(*systems, workflow={"steps": 16}).summary() for systems in (OVERLAPPING[:1], [*OVERLAPPING[:1], eager])
    )
    pd.testing.assert_frame_equal(alone, beside[:1])
    assert beside["unsteady"].tolist()[0] == ""
    assert beside["unsteady"].tolist()[1] != ""


@pytest.mark.parametrize("system", ["verl", "rollpacker"])
def test_what_waits_for_its_own_responses_is_never_marked(system: Any) -> None:
    found = run(system, trace={"path": "rollpacker-math", "cap": "4K"}, workflow={"steps": 10}, seeds=2)
    for _, own in found.steps.groupby("seed"):
        assert unsteady(own) == ""


def test_means_of_steps_at_the_cap_alone() -> None:
    """As PAT's authors average; a seed without such a step has no part in it."""
    few = {"trace": {"path": "rollpacker-math", "cap": "4K"}, "seeds": 4, "certainty": 2}
    sizes = {"prompts": 3, "responses": 2, "steps": 3}
    found = run("verl", "pat", **few, workflow={**sizes, "steps_at_cap": True})
    reached = found.steps["longest_tokens"] == 4096
    assert 0 < reached.sum() < len(found.steps)
    assert found.steps["steady"].tolist() == reached.tolist()
    mean = found.steps[reached].groupby("system")[["step_time_s", "gen_time_s"]].mean()
    summary = found.summary().set_index("system")
    for system, times in mean.iterrows():
        assert summary.loc[system, [*mean]].tolist() == pytest.approx(times.tolist())
    every = run("verl", "pat", **few, workflow=sizes)
    assert every.steps["step_time_s"].tolist() == found.steps["step_time_s"].tolist()
    assert summary["step_time_s"].gt(every.summary().set_index("system")["step_time_s"]).all(), "the long ones"
    capped = {**few, "trace": {"path": "rollpacker-math", "cap": "64K"}, "seeds": 1}
    with pytest.raises(ConfigError, match=r"verl: workflow\.steps_at_cap leaves no step to count"):
        run("verl", **capped, workflow={**sizes, "steps_at_cap": True})
