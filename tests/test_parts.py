"""The parts of a step: what the trainer did, or what it waited for."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import tables
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import rlsim
from rlsim.errors import ConfigError
from rlsim.experiment.parts import Floats

SCENARIOS = Path(__file__).parent / "scenarios"
PARTS = ("gen_exposed_s", "prep_time_s", "train_time_s", "sync_time_s", "waiting_time_s")
#: Which of the calls that run on the trainer's GPUs says what a moment is part of: the first of these.
BUSY = (("train", 2), ("inference", 1), ("reward", 1), ("sync", 3), ("generate", 0))
KINDS = {"generate": "generate", "reward": "reward", "score": "inference", "train": "train", "push": "sync"}

# Random runs that overlap ---------------------------------------------------------------------------------------------

BASE: dict[str, Any] = tables("bases")["parts"]
RULES: list[Any] = tables("bases")["parts rules"]


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """An experiment of one system, and the GPUs that generate alone."""
    rule, apart = draw(st.sampled_from(RULES)), draw(st.sampled_from([2, 4, 4, 6, 0]))
    shared = "lagged" in rule or rule == "active_groups"  # all others need GPUs of their own
    rollout = apart or (0 if shared else 4)
    parts: list[Any] = [{"verl": {"tp": 1}}, rule, *([{"split": {"rollout_gpus": rollout}}] if rollout else [])]
    parts += [part for part in ("async_reward", "rollout_log_probs") if draw(st.booleans())]
    windows = draw(st.sampled_from([0, 0, 2, 4])) if rollout and "async_reward" in parts else 0
    parts += [{"training_windows": {"parts": windows}}] if windows else []
    workflow = {
        "algorithm": draw(st.sampled_from(["grpo", "grpo", "ppo"])),
        "prompts": 4 * draw(st.integers(1, 3)),
        "responses": draw(st.sampled_from([1, 4])),
        "steps": 5,
        "reference": draw(st.booleans()),
        "reward": {"workers": draw(st.sampled_from([1, 4, 64]))},
    }
    training = {
        "backend": "megatron",
        "micro_batch_tokens": 4096,
        "mini_batches": windows or 1,
        "recompute": draw(st.sampled_from(["full", "none"])),
    }
    path, cap = draw(st.sampled_from(["rollpacker-code", "rollpacker-math"])), draw(st.sampled_from([32, 64, 512]))
    system = {"name": "s", "use": parts}
    given = {"workflow": workflow, "training": training, "trace": {"path": path, "cap": cap}, "systems": [system]}
    return {**BASE, **given}, rollout


def waited_for(found: rlsim.Result, trainer: range) -> tuple[Floats, Floats]:
    """The parts of every step, moment by moment from the tables of a run, and the seconds in which no trainer works."""
    kinds = found.calls.set_index("call")["kind"].to_dict()
    edges = np.append(0.0, found.steps["step_time_s"].cumsum())
    spans = found.spans.assign(what=found.spans["kind"].map(kinds).fillna("generate"))
    spans["here"] = (spans["gpu"] < trainer.stop) & (spans["gpu"] + spans["gpus"] > trainer.start)
    columns = ("start_at", "end_at", "step", "what", "here")
    start, end, step, what, here = (spans[name].to_numpy() for name in columns)
    whole = found.calls.loc[found.calls["kind"] == "generate", ["start_at", "end_at"]].to_numpy()
    scored = found.responses.dropna(subset="scored_at")[["score_start_at", "scored_at"]].to_numpy()
    finishes = found.responses["finish_at"].dropna()
    moments = np.unique(np.concatenate([edges, start, end, whole.ravel(), scored.ravel(), finishes]))
    moments = moments[(moments >= 0) & (moments <= edges[-1])]
    of_step = dict(iter(found.responses[found.responses["trained"]].groupby("step")))
    times = (moments[1:] + moments[:-1]) / 2
    windows = np.searchsorted(edges, times) - 1
    now = (start < times[:, None]) & (times[:, None] < end)
    at_work = {kind: (now & (what == kind)).any(axis=1) for kind in dict.fromkeys(KINDS.values())}
    on = {kind: (now & here & (what == kind)).any(axis=1) for kind in at_work}
    own = (now & here & (what == "generate") & (step == windows[:, None])).any(axis=1)
    generates, scoring = (
        ((of[:, 0] < times[:, None]) & (times[:, None] < of[:, 1])).any(axis=1) for of in (whole, scored)
    )
    rows, idle_s = np.zeros((len(edges) - 1, len(PARTS))), np.zeros(len(edges) - 1)
    calling = np.flatnonzero(here & (what != "generate"))
    complete: dict[tuple[int, float], float] = {}
    for i, (t, window, seconds) in enumerate(zip(times, windows, np.diff(moments), strict=True)):
        busy = [part for kind, part in BUSY if on[kind][i]]
        if not busy:
            idle_s[window] += seconds
            later = calling[start[calling] > t]
            complete_at = -np.inf
            if len(later):
                following = later[start[later].argmin()]
                sync, of = what[following] == "sync", (step[following], start[following])
                if not sync and of not in complete:
                    complete[of] = _complete_at(of_step[of[0]], of[1])
                complete_at = np.inf if sync else complete[of]
            generated = generates[i] or at_work["generate"][i]
            if t < complete_at and generated:
                busy = [0]
            elif scoring[i] or at_work["inference"][i] or at_work["reward"][i]:
                busy = [1]
            else:
                busy = [3] if at_work["sync"][i] else [0] if generated else [4]
        rows[window, 0 if own[i] else busy[0]] += seconds
    return rows, idle_s


def _complete_at(responses: pd.DataFrame, now: float) -> float:
    """When the last response to arrive before a call was complete: by its reward, or by itself."""
    best = (-np.inf, -np.inf)
    for finish_at, scored_at in responses[["finish_at", "scored_at"]].itertuples(index=False):
        arrived = [at for at in (finish_at, scored_at) if at <= now * (1 + 1e-9)]
        if arrived:
            best = max(best, (max(arrived), finish_at))
    return best[1]


@pytest.mark.parametrize("runs", [14, pytest.param(200, marks=pytest.mark.slow)])
def test_parts_are_what_the_trainer_did_and_waited_for(runs: int) -> None:
    settings(
        deadline=None,
        derandomize=True,
        max_examples=runs,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(overlapping())(_parts_are_those_of_spans))()


def _parts_are_those_of_spans(drawn: tuple[dict[str, Any], int]) -> None:
    experiment, rollout = drawn
    try:
        found = rlsim.run(experiment)
    except ConfigError:
        return  # parts that do not go together
    steps, (expected, idle_s) = found.steps, waited_for(found, range(rollout, 8))
    np.testing.assert_allclose(steps[list(PARTS)].sum(axis=1), steps["step_time_s"], rtol=1e-9)
    np.testing.assert_allclose(steps[list(PARTS)], expected, rtol=1e-6, atol=1e-6 * steps["step_time_s"].max())
    if rollout:
        np.testing.assert_allclose(steps["trainer_idle"] * steps["step_time_s"], idle_s, atol=1e-6 * idle_s.max())


def test_steps_are_trained_in_their_order() -> None:
    """Rewards of 30 s hold a step back; the one after it was trained first, and both ended at one moment."""
    parts = [{"verl": {"tp": 1}}, {"lagged": {"lag": 2}}, {"split": {"rollout_gpus": 4}}, "rollout_log_probs"]
    workflow = {"prompts": 8, "responses": 1, "steps": 6, "reward": {"workers": 64}}
    lengths = {"path": "rollpacker-code", "cap": 64}
    found = rlsim.run({**BASE, "workflow": workflow, "trace": lengths, "systems": [{"name": "s", "use": parts}]})
    trained = found.calls[found.calls["call"] == "train"].sort_values("step")
    assert (trained["start_at"].to_numpy()[1:] >= trained["end_at"].to_numpy()[:-1]).all()
    assert found.steps["reward_time_s"].max() > 10 * found.steps["train_time_s"].max()


# What misled users ----------------------------------------------------------------------------------------------------


def test_a_trainer_that_is_never_idle_is_what_a_step_waits_for() -> None:
    """Training in 16 windows: 0.4 s of 17 idle; it was shown as 12.6 s of generation and 3.6 s of training."""
    row = rlsim.run(SCENARIOS / "x_lognorm.yaml").summary().set_index("system").loc["vfa-step16"]
    assert row["trainer_idle"] < 0.03
    assert row["gen_exposed_s"] + row["prep_time_s"] == pytest.approx(row["trainer_idle"] * row["step_time_s"])
    assert row["train_time_s"] > 0.9 * row["step_time_s"]


def test_a_larger_lag_shows_the_same_parts_where_the_trainer_is_the_slower_side() -> None:
    """At lag 4 a step was shown as mostly generation, at lag 1 as mostly training."""
    rows = rlsim.run(SCENARIOS / "s1b.yaml").summary().set_index("system")[list(PARTS)]
    same = ["onestep", "onestep_bare", "onestep_lag4", "eta-eta1", "eta-eta4", "rf-alpha4", "nemo-steps4"]
    np.testing.assert_allclose(rows.loc[same], [[0, 2.41, 9.24, 0.10, 0]] * len(same), atol=0.01)
    np.testing.assert_allclose(rows.loc["eta-eta0"], rows.loc["split"], rtol=1e-9), "nothing overlaps in either"
