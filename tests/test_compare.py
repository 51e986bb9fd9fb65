"""The run table: what is compared with what, paired or not, and the figures against SciPy's own tests."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import opened
from conftest import Command, answers_here, tables
from result_tables import RUN, table
from scipy import stats

import rlsim
from rlsim.errors import CatalogueError, ConfigError
from rlsim.experiment.summary import paired_ratio
from rlsim.results.comparison import compare
from rlsim.results.comparison.compare import Baseline, Run, difference_s, runs_in, welch_ratio, why_unpaired
from rlsim.results.sweeps import run as running

EXPERIMENT: dict[str, Any] = tables("bases")["compare"]
CASES = {"cases": {"short": {"trace.cap": 512}, "long": {}}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that differ in one thing each, and a sweep."""
    folder = tmp_path_factory.mktemp("results")
    changes: dict[str, dict[str, Any]] = tables("bases")["compare changes"]
    for name, overrides in changes.items():
        rlsim.run(EXPERIMENT, overrides=overrides, out=folder / name)
    rlsim.run({**copy.deepcopy(EXPERIMENT), **CASES}, out=folder / "cases")
    axes = [{"grid": {"memory_utilization": [0.5, 0.9], "seeds": [2]}}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_answers", answers_here)
        rlsim.sweep({"name": "s", "experiment": EXPERIMENT, "axes": axes}, out=folder / "sweep")
        by_seed = {"name": "by seed", "experiment": EXPERIMENT, "axes": [{"grid": {"seeds": [[0], [1]]}}]}
        rlsim.sweep(by_seed, out=folder / "by-seed")
    return folder


def rows(found: rlsim.Comparison) -> pd.DataFrame:
    frame = found.table.copy()
    frame["directory"] = [Path(directory).name for directory in frame["directory"]]
    return frame.set_index(["directory", "system"])


def by_seed(folder: Path, system: str, metric: str) -> pd.Series:
    """Mean seconds of a step by seed; every step trains on as many responses."""
    steps = pd.read_parquet(folder / "steps.parquet")
    return steps[steps["system"] == system].groupby("seed")[metric].mean()


def test_one_directory_is_compared_with_its_own_baseline(results: Path) -> None:
    found = rlsim.compare([results / "base"])
    table, summary = found.table, rlsim.read_result(results / "base").summary()
    assert list(table["baseline"]) == ["verl-tp2", "verl-tp2"]
    assert list(table["is_baseline"]) == [True, False]
    assert table["paired"].all()
    for column in ("speedup", "speedup_low", "token_speedup", "gen_speedup", "responses_per_s", "tail_fraction"):
        np.testing.assert_allclose(table[column], summary[column], rtol=1e-12)
    assert found.settings == ()
    assert found.differences == {}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("short", "speedup"), [("step", "speedup"), ("gen", "gen_speedup"), ("gen_p90", "gen_p90_speedup")]
)
def test_runs_of_the_same_responses_are_paired_by_seed(results: Path, short: str, speedup: str) -> None:
    table = rows(rlsim.compare([results / "base", results / "sglang"]))
    row = table.loc[("sglang", "verl-tp8")]
    own, theirs = (by_seed(results / name, "verl-tp8", f"{short}_time_s") for name in ("sglang", "base"))
    interval = stats.ttest_1samp(np.log(theirs / own), 0).confidence_interval()
    assert row["paired"]
    assert row[speedup] == pytest.approx(stats.gmean(theirs / own), rel=1e-12)
    assert row[f"{speedup}_low"] == pytest.approx(np.exp(interval.low), rel=1e-9)
    assert row[f"{speedup}_high"] == pytest.approx(np.exp(interval.high), rel=1e-9)
    assert row[f"{short}_difference_s"] == pytest.approx((own - theirs).mean(), rel=1e-9)
    assert row["calibration"] == "h100-sglang"
    assert row["baseline"].endswith("base:verl-tp8")


def test_a_difference_is_for_the_work_of_a_step_of_the_baseline() -> None:
    """10 s for 8 responses are 20 s for the baseline's 16, which takes 12: 8 s more, by hand."""
    one, other = (pd.DataFrame({"trained": [n], "step_time_s": [s]}) for n, s in ((8, 10.0), (16, 12.0)))
    assert difference_s(one, other, "step_time_s", is_paired=True) == pytest.approx(8.0)
    assert difference_s(other, one, "step_time_s", is_paired=False) == pytest.approx(-4.0)


def test_only_the_seeds_that_both_have_are_paired(results: Path) -> None:
    row = rows(rlsim.compare([results / "base", results / "fewer-seeds"])).loc[("fewer-seeds", "verl-tp8")]
    assert row["paired"]
    assert row["speedup"] == pytest.approx(1, abs=1e-12)  # the same seeds gave the same times
    assert row["step_difference_s"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("other", "why"), [("capped", "trace.cap is 1024 against 2048"), ("other-seeds", "they have no seed in common")]
)
def test_other_responses_are_not_paired_and_it_says_so(results: Path, other: str, why: str) -> None:
    found = rlsim.compare([results / "base", results / other])
    row = rows(found).loc[(other, "verl-tp8")]
    own, theirs = (by_seed(results / name, "verl-tp8", "gen_time_s") for name in (other, "base"))
    interval = stats.ttest_ind(np.log(theirs), np.log(own), equal_var=False).confidence_interval()
    assert not row["paired"]
    assert row["gen_speedup"] == pytest.approx(stats.gmean(theirs) / stats.gmean(own), rel=1e-12)
    assert row["gen_speedup_low"] == pytest.approx(np.exp(interval.low), rel=1e-9)
    assert row["gen_speedup_high"] == pytest.approx(np.exp(interval.high), rel=1e-9)
    assert any(note.startswith(f"not paired ({why})") and "Welch" in note for note in found.notes)


def test_another_trace_or_a_draw_that_changed_is_not_paired(results: Path, tmp_path: Path) -> None:
    base = rlsim.read_result(results / "base")
    replace(base, manifest={**base.manifest, "hashes": {"trace": "other"}}).write(tmp_path / "trace")
    more = base.steps["response_tokens"] + 1
    replace(base, steps=base.steps.assign(response_tokens=more)).write(tmp_path / "draw")
    notes = rlsim.compare([results / "base", tmp_path / "trace"]).notes
    assert "the traces differ" in notes[0]
    notes = rlsim.compare([results / "base", tmp_path / "draw"]).notes
    assert "the responses differ (seed 0, step 0: " in notes[0]


def test_systems_that_put_responses_off_are_paired_with_those_that_do_not(tmp_path: Path) -> None:
    ahead = {"name": "ahead", "use": ["verl", {"overcommit": {"delta": 2}}]}
    tail = {"name": "tail", "use": [{"verl": {"tp": 2}}, {"tail_batching": {"eta": 2}}]}
    workflow = {"prompts": 4, "responses": 4, "steps": 5}
    experiment = {**EXPERIMENT, "workflow": workflow, "systems": [{"verl": {"tp": 2}}, ahead, tail], "seeds": 2}
    rlsim.run(experiment, out=tmp_path / "x")
    plain, *others = runs_in(tmp_path / "x")
    batch = workflow["prompts"] * workflow["responses"]
    for run in others:
        assert (run.steps["launched"] == batch).any(), "a step that would look plain, were it not for those before"
        assert why_unpaired(run, plain) == ""
        assert run.plain_tokens.isna().all()
    assert plain.plain_tokens.notna().all()
    assert rlsim.compare([tmp_path / "x"]).table["paired"].all()


def test_the_baseline_is_a_system_a_directory_or_both(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [results / "base", results / "pat"]
    default = rows(rlsim.compare(pair))
    assert default.loc[("pat", "pat"), "baseline"] == f"{results / 'base'}:verl-tp2"  # it has no pat: its own baseline
    both = rows(rlsim.compare(pair, baseline=f"{results / 'base'}:verl-tp8"))
    assert both.loc[("pat", "pat"), "baseline"] == f"{results / 'base'}:verl-tp8"
    assert both.loc[("base", "verl-tp2"), "baseline"] == "verl-tp8"
    system = rlsim.compare(pair, baseline="verl-tp8")
    assert rows(system).loc[("base", "verl-tp2"), "baseline"] == "verl-tp8"
    assert rows(system).loc[("pat", "pat"), "baseline"] == ""
    assert np.isnan(rows(system).loc[("pat", "pat"), "speedup"])
    assert any(note.startswith("no baseline with the same settings: ") for note in system.notes)
    directory = rows(rlsim.compare([results / "base", results / "sglang"], baseline=str(results / "sglang")))
    assert directory.loc[("base", "verl-tp8"), "baseline"] == f"{results / 'sglang'}:verl-tp8"
    with pytest.raises(CatalogueError, match="unknown baseline 'verl-tp88'; did you mean 'verl-tp8'"):
        rlsim.compare(pair, baseline="verl-tp88")
    monkeypatch.chdir(results)
    assert len(rlsim.compare(["base", "./base/", "base/"]).table) == 2
    found = rlsim.compare(["base", "pat/"], baseline="./base/:verl-tp8").table
    assert set(found["baseline"]) == {"verl-tp8", "base:verl-tp8"}
    assert set(rlsim.compare(["base", "sglang"], baseline="./sglang").table["baseline"]) == {
        "sglang:verl-tp2", "sglang:verl-tp8", "verl-tp2", "verl-tp8",
    }  # fmt: skip


def test_points_of_a_sweep_are_rows_and_an_axis_can_be_the_baseline(results: Path) -> None:
    found = rlsim.compare([results / "sweep"])
    assert found.settings == ("memory_utilization", "experiment.seeds")
    assert len(found.table) == 4
    assert list(found.table["baseline"]) == ["verl-tp2"] * 4
    axis = rlsim.compare([results / "sweep"], baseline="memory_utilization=0.9").table
    assert list(axis["baseline"]) == [f"memory_utilization=0.9:verl-tp{tp}" for tp in (2, 8)] + ["verl-tp2", "verl-tp8"]
    assert axis["paired"].all()
    beside = rlsim.compare([results / "sweep", results / "base"], baseline=str(results / "base"))
    assert list(beside.table["memory_utilization"]) == [0.5, 0.5, 0.9, 0.9, 0.9, 0.9]
    assert (beside.table["baseline"] != "").all()
    # A run without the axis is compared with the point of its own settings.
    other = rlsim.compare([results / "sweep", results / "base"]).table
    assert list(other["baseline"][-2:]) == [f"{results / 'sweep'}:verl-tp{tp}" for tp in (2, 8)]
    assert other["speedup"][-2:].tolist() == pytest.approx([1.0] * 2)


def test_points_of_single_seeds_are_put_together(results: Path) -> None:
    table = rows(rlsim.compare([results / "base", results / "by-seed"]))
    same = ["seeds", *(f"{name}_time_s" for name in ("step", "gen", "gen_p90")), "responses_per_s", "bubble_fraction"]
    pd.testing.assert_frame_equal(table.loc["base"][same], table.loc["by-seed"][same])
    own = rlsim.compare([results / "by-seed"]).table
    summary = rlsim.read_result(results / "base").summary()
    np.testing.assert_allclose(own["speedup_high"], summary["speedup_high"], rtol=1e-12)


def test_cases_and_tuned_systems(results: Path, tmp_path: Path) -> None:
    found = rlsim.compare([results / "cases"])
    assert list(found.table["case"]) == ["short", "short", "long", "long"]
    assert list(found.table["trace.cap"]) == [512, 512, 2048, 2048]
    tuned = rlsim.compare([results / "tuned"]).table
    assert list(tuned["tuned"]) == ["tp 8", ""]
    block = {"trace": {"path": "rollpacker-math", "cap": "1K"}, "workflow": EXPERIMENT["workflow"]}
    rlsim.run({**copy.deepcopy(EXPERIMENT), "cases": {"block": block, "key": {"trace.cap": "1K"}}}, out=tmp_path / "x")
    table = rlsim.compare([results / "capped", tmp_path / "x"]).table
    found = table[table["directory"] == str(tmp_path / "x")]
    assert set(found["case"]) == {"block", "key"}
    assert found["paired"].all()
    assert found["speedup"].tolist() == pytest.approx([1.0] * 4)


def test_axes_that_go_together_are_a_baseline_together() -> None:
    steps = pd.DataFrame({"seed": [0]})
    places = [("8xh100", "h100-vllm"), ("8xh200", "h200-vllm")]
    axes = [{"cluster": c, "calibration": k, "cap": cap} for c, k in places for cap in (1024, 2048)]
    runs = [Run("d", f"p{i}", each, "", "a", "a", {}, "", "", steps) for i, each in enumerate(axes)]
    baseline = Baseline(runs, "cluster=8xh100, calibration=h100-vllm")
    assert [one.point if (one := baseline.of(run)) else "" for run in runs] == ["p0", "p1", "p0", "p1"]
    alone = Baseline(runs, "cluster=8xh100")
    assert [alone.of(run) is None for run in runs] == [False, False, True, True]
    with pytest.raises(CatalogueError, match="unknown baseline"):
        Baseline(runs, "cluster=8xh100,calibration=h200-vllm")


@pytest.mark.filterwarnings("error")
def test_times_of_zero_have_no_speedup() -> None:
    def rates(gen_s: Sequence[float]) -> pd.Series:
        steps = (RUN | {"seed": i, "step_time_s": 1.0, "trained": 8, "gen_time_s": s} for i, s in enumerate(gen_s))
        return Run("d", "", {}, "", "a", "a", {}, "", "", table("steps", *steps)).by_seed["responses_per_gen_s"]

    some, none, few = rates([2.0, 4.0, 8.0]), rates([0.0] * 3), rates([1.0, 2.0, 0.0])
    for one, other in ((some, none), (none, some), (none, none)):
        assert np.isnan([*paired_ratio(one, other), *welch_ratio(one, other)]).all()
    assert paired_ratio(few, some) == pytest.approx((2.0, 2.0, 2.0)), "of the seeds that have both"


def test_the_work_to_find_baselines_grows_with_the_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = pd.DataFrame({"seed": [0]})
    runs = [Run("d", f"p{i}", {"x": i}, "", name, "a", {}, "", "", steps) for i in range(200) for name in "ab"]
    looked_at, hashable = list[object](), compare._hashable
    monkeypatch.setattr(compare, "_hashable", lambda values: looked_at.append(values) or hashable(values))
    baseline = Baseline(runs, None)
    found = [baseline.of(run) for run in runs]
    assert [(one.point, one.system) for one in found if one] == [(run.point, "a") for run in runs]
    assert len(runs) <= len(looked_at) <= 4 * len(runs)


def test_the_command_line(results: Path, tmp_path: Path, call: Command) -> None:
    def printed(*arguments: object) -> str:
        done = call("compare", *arguments)
        assert done.code == 0
        return done.out

    base, other = str(results / "base"), str(results / "capped")
    with pytest.raises(ConfigError, match="at least one directory"):
        rlsim.compare([])
    shown = printed(base, other)
    assert f"A = {base}" in shown
    assert "trace.cap: 2048 in A; 1024 in B" in shown
    assert "* not paired by seed" in shown
    found = rlsim.compare([base, results / "sglang", other])
    named = {key: [*values.values()] for key, values in found.differences.items()}
    assert named == {"calibration": ["h100-vllm", "h100-sglang", "h100-vllm"], "trace.cap": [2048, 2048, 1024]}
    written = json.loads(printed(base, other, "--json", "-"))
    assert [run["trace.cap"] for run in written["runs"]] == [2048, 2048, 1024, 1024]
    assert written["notes"]
    assert printed(base, "--csv", tmp_path / "runs.csv", "--json", tmp_path / "runs.json")
    table = pd.read_csv(tmp_path / "runs.csv")
    assert list(table["system"]) == ["verl-tp2", "verl-tp8"]
    assert json.loads((tmp_path / "runs.json").read_text())["runs"][1]["speedup"] == table["speedup"][1]


def test_the_intervals_are_drawn(results: Path, tmp_path: Path, call: Command) -> None:
    base, other = str(results / "base"), str(results / "capped")
    assert call("compare", base, other, "--chart", tmp_path / "one.html", "--quiet").out == f"{tmp_path}/one.html\n"
    assert call("compare", base, other, "--chart", tmp_path / "one.svg").code == 0
    drawn = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert float(re.findall(r'<svg[^>]*width="([\d.]+)"', drawn)[0]) <= 1280
    for text in ("Times as fast as A", f"B = {other}", "B · verl-tp2*", "by tokens", "90% by"):
        assert text in drawn
    alone = call("compare", base, "--baseline", "verl-tp2", "--chart", tmp_path / "one.pdf")
    assert "a chart is written as one of" in alone.err
    assert "<svg" in opened(tmp_path / "one.html", tmp_path / "browser")
