"""Workflows whose steps overlap: whatever lag, batching, rewards, judge and layout, these things hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_workflows import lagged
from typer.testing import CliRunner

import rlsim
from rlsim.cli import app
from rlsim.cli.running import _tables
from rlsim.comparison.verdict import judge

JUDGE = "qwen2.5-1.5b"


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[int, bool, list[Any], dict[str, Any], dict[str, Any]]:
    """A lag, whether it is exact, parts of the system, the workflow's settings, and the trace."""
    lag, exact = draw(st.integers(1, 4)), draw(st.booleans())
    parts: list[Any] = [name for name in ("async_reward", "tail_batching") if draw(st.booleans())]
    reward: dict[str, Any] = {"workers": draw(st.sampled_from([1, 4, 32]))}
    judged = draw(st.booleans())
    if judged:
        reward["judge"] = {"model": JUDGE, "while_training": "apart", "reserved": 0.5}
    sizes = {
        "prompts": draw(st.integers(2, 12)),
        "responses": draw(st.integers(1, 4)),
        "steps": draw(st.integers(2, 6)),
        "reward": reward,
    }
    path = "rollpacker-judge" if judged else draw(st.sampled_from(["rollpacker-code", "rollpacker-math"]))
    return lag, exact, parts, sizes, {"path": path, "cap": draw(st.sampled_from([128, 1024, 4096]))}


@settings(deadline=None, derandomize=True, max_examples=15, suppress_health_check=list(HealthCheck))
@given(overlapping())
def test_steps_that_overlap_keep_every_invariant(
    drawn: tuple[int, bool, list[Any], dict[str, Any], dict[str, Any]],
) -> None:
    lag, exact, parts, sizes, trace = drawn
    found = lagged(lag, *parts, exact=exact, workflow=sizes, trace=trace)
    steps, calls = found.steps, found.calls.set_index(["call", "step"])
    assert len(steps) == sizes["steps"], "every step comes to its end"
    assert (steps["trained"] == sizes["prompts"] * sizes["responses"]).all()
    check_staleness(steps, lag, exact)
    check_order(calls, lag, sizes["steps"])
    check_responses(found, calls)
    check_gpus(found.spans)


def check_staleness(steps: pd.DataFrame, lag: int, exact: bool) -> None:
    """Weights are never older than the lag allows, and just so old where it is exact."""
    assert (steps["staleness_max"] <= lag - 1).all()
    if exact:
        assert (steps["staleness_max"] == steps["step"].clip(upper=lag - 1)).all()


def check_order(calls: pd.DataFrame, lag: int, steps: int) -> None:
    """No call begins before what it needs is there, and each comes once a step."""
    assert not calls.index.duplicated().any()
    needs = [("generate", "train", 0), ("reward", "train", 0), ("train", "push", 0)]
    needs += [("push", "train", 1), ("push", "generate", lag)]
    for source, target, behind in needs:
        for step in range(behind, steps):
            assert calls["start_at"][target, step] >= calls["end_at"][source, step - behind] * (1 - 1e-9)


def check_responses(found: rlsim.Result, calls: pd.DataFrame) -> None:
    """What is trained on is complete and scored before, and trained on once."""
    trained = found.responses[found.responses["trained"]]
    assert not trained.duplicated(["step", "response"]).any()
    begins = calls["start_at"]["train"].loc[trained["step"]].to_numpy() * (1 + 1e-9)
    assert (trained["finish_at"] <= trained["scored_at"]).all()
    assert (trained["scored_at"] <= begins).all()


def check_gpus(spans: pd.DataFrame) -> None:
    """A GPU does one thing at a time, unless it is shared."""
    alone = spans[~spans["shared"]]
    at = {}
    for row in alone.sort_values(["start_at", "end_at"]).itertuples():
        for gpu in range(row.gpu, row.gpu + row.gpus):
            assert row.start_at >= at.get(gpu, 0.0) * (1 - 1e-9), (gpu, row)
            at[gpu] = row.end_at
    assert at


def test_one_step_off_with_tail_batching_asynchronous_rewards_and_a_judge() -> None:
    judge = {"model": JUDGE, "while_training": "apart", "reserved": 0.5}
    sizes = {"prompts": 16, "responses": 4, "steps": 8, "reward": {"workers": 8, "judge": judge}}
    one, two = (
        lagged(lag, "tail_batching", "async_reward", workflow=sizes, trace={"path": "rollpacker-judge", "cap": 2048})
        for lag in (1, 2)
    )
    assert (two.steps["trained"] == 64).all()
    assert two.steps["staleness_max"].tolist() == pytest.approx([0, *[1] * 7])
    assert two.steps["step_time_s"].sum() < one.steps["step_time_s"].sum()


def test_every_table_shows_how_stale_a_system_is_and_none_does_where_nothing_is(tmp_path: Path) -> None:
    found = lagged(3, exact=True, workflow={"steps": 6})
    on_policy = lagged(1, workflow={"steps": 6})
    assert found.summary()["staleness_max"].tolist() == [2]
    for result, shown in ((found, True), (on_policy, False)):
        folder = tmp_path / str(shown)
        result.write(folder)
        summary = result.summary()
        tables = list(_tables(result, "", summary, judge(summary, str(result.manifest["baseline"]))))
        assert any("stale" in heading for table in tables for heading in table.headings) == shown
        for width in (100, 80, 40):
            for table in tables:
                parts = list(table.parts(width))
                shown_words = " ".join(heading for heading, _ in parts).split()
                assert {word for heading in table.headings for word in heading.split()} <= set(shown_words)
                for heading, lines in parts:
                    assert max(map(len, (*heading.split("\n"), *lines))) <= width
                    for name in result.manifest["systems"][""]:
                        assert any(line.startswith(name) for line in lines), "names are whole in every part"
        assert ("stale" in CliRunner().invoke(app, ["compare", str(folder)]).output) == shown
        rlsim.write_report(result, tmp_path / "report.html")
        assert (">stale</th>" in (tmp_path / "report.html").read_text(encoding="utf-8")) == shown
