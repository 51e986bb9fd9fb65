"""Running experiments: tables, pairing, tuned systems, cases, what is written, and the command line around it."""

import copy
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from conftest import TINY, Command, loaded_of, tables
from pydantic import Field

import rlsim
from rlsim.base.schema import Schema
from rlsim.errors import CatalogueError, ConfigError
from rlsim.experiment.columns import SUMMARY, TABLES
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result, read_result
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.summary import preemption_notes
from rlsim.sim.actions import Abort
from rlsim.sim.control import Action, ControlContext, RolloutControl, RolloutView

EXPERIMENT: dict[str, Any] = tables("bases")["experiment"]


def experiment(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(EXPERIMENT), **changes}


@pytest.fixture(scope="module")
def result() -> Result:
    return rlsim.run(experiment())


# ------------------------------------------------------------------------------------------------------ the tables


def test_every_table_has_exactly_its_columns_and_rows_in_order_and_type(result: Result) -> None:
    for table, columns in TABLES.items():
        frame: pd.DataFrame = getattr(result, table)
        assert list(frame.columns) == [c.name for c in columns]
        assert [str(t) for t in frame.dtypes] == [str(pd.Series([], dtype=c.dtype).dtype) for c in columns]
        assert len(frame) > 0, table
    names = ["verl-tp1", "verl-tp2", "verl-tp4", "verl-tp8", "verl-best", "pat", "pat-tp1"]
    assert result.manifest["systems"] == {"": names}
    assert list(result.steps["system"].unique()) == names
    assert len(result.steps) == len(names) * 2 * 2
    assert len(result.responses) == len(names) * 2 * 2 * 32
    assert set(result.steps["case"]) == {""}


def test_summary(result: Result) -> None:
    summary = result.summary()
    assert list(summary.columns) == [column.name for column in SUMMARY]
    one_seed = replace(result, steps=result.steps.query("seed == 0")).summary()
    assert one_seed["speedup"].notna().all()
    assert one_seed[["speedup_low", "speedup_high"]].isna().all(axis=None)
    rows = summary.set_index("system")
    assert rows.loc["verl-best", "speedup"] == 1.0
    for system, row in rows.iterrows():
        means = result.steps.groupby(["system", "seed"])["step_time_s"].mean()
        ratios = means["verl-best"] / means[system]
        assert row["speedup"] == pytest.approx(np.exp(np.log(ratios).mean()), rel=1e-12)
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert 0 < row["bound_share"] <= 1


def test_systems_are_paired(result: Result) -> None:
    what = ["step", "response", "prompt_id", "prompt_tokens", "response_tokens"]
    for _, of_seed in result.responses.groupby("seed"):
        first, *others = (rows[what].reset_index(drop=True) for _, rows in of_seed.groupby("system"))
        for rows in others:
            pd.testing.assert_frame_equal(rows, first)
    by_seed = [list(f["response_tokens"]) for _, f in result.responses.groupby("seed")]
    assert by_seed[0] != by_seed[1]


def test_best_is_the_fastest_static_degree(result: Result) -> None:
    steps = result.steps[result.steps["system"].str.startswith("verl-tp")]
    fastest = steps.groupby("system")["step_time_s"].mean().idxmin()
    assert result.manifest["tuned"][""] == {"verl-best": f"tp {fastest.removeprefix('verl-tp')}"}
    for table in TABLES:
        frame: pd.DataFrame = getattr(result, table)
        best = frame[frame["system"] == "verl-best"].drop(columns="system").reset_index(drop=True)
        same = frame[frame["system"] == fastest].drop(columns="system").reset_index(drop=True)
        pd.testing.assert_frame_equal(best, same)
    assert any(
        re.fullmatch(r"verl-best ran with tp \d, its fastest setting on these seeds", note) for note in result.notes
    )


# --------------------------------------------------------------------------------------------- asking for a run


#: One small system.
ONE = experiment(systems=[{"verl": {"tp": 2}}], baseline=None, seeds=1)


def test_overrides_as_texts_or_as_a_mapping(tmp_path: Path) -> None:
    given = copy.deepcopy(ONE)
    texts = rlsim.run(given, overrides=["trace.cap=1K", "workflow.steps=1"])
    assert texts.steps["longest_tokens"].tolist() == [1024]
    assert given == ONE, "the caller's mapping is left alone"
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(given))
    from_file = rlsim.run(path, overrides={"trace.cap": "1K", "workflow.steps": 1}, seeds=1)
    assert from_file.manifest == texts.manifest


def test_seeds_by_number_or_by_name() -> None:
    some, again = (rlsim.run(ONE, overrides={"seeds": seeds}) for seeds in ([7, 3], 4))
    assert list(some.steps["seed"].unique()) == [7, 3]
    mine, theirs = (r.responses[r.responses["seed"] == 3]["finish_at"].tolist() for r in (some, again))
    assert mine == theirs
    with pytest.raises(ConfigError, match="at least one seed"):
        rlsim.run(ONE, seeds=0)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    small = experiment(systems=[{"verl": {"tp": 2}}, "pat"], baseline=None)
    one = rlsim.run(small, out=tmp_path / "one")
    rlsim.run(small, out=tmp_path / "two")
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == sorted(["manifest.json", *(f"{t}.parquet" for t in TABLES)])
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    back = read_result(tmp_path / "one")
    assert back.manifest == one.manifest
    for table in TABLES:
        pd.testing.assert_frame_equal(getattr(back, table), getattr(one, table))
    pd.testing.assert_frame_equal(back.summary(), one.summary())
    for table, columns in TABLES.items():
        schema = pq.read_schema(tmp_path / "one" / f"{table}.parquet")
        assert schema.names == [c.name for c in columns]
        for column in columns:
            metadata = schema.field(column.name).metadata
            assert metadata == {b"unit": column.unit.encode(), b"meaning": column.meaning.encode()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("where", "what"), [("simulator.Simulator.simulate", KeyboardInterrupt), ("result.write_parquet", RuntimeError)]
)
def test_a_run_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise what

    monkeypatch.setattr(f"rlsim.experiment.{where}", fail)
    with pytest.raises(what):
        rlsim.run(ONE, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_once_a_run() -> None:
    told: list[tuple[int, int, str]] = []
    rlsim.run(experiment(seeds=1), progress=lambda *a: told.append(a))
    # The tuned system and the variants share their runs: four static degrees, PAT from two layouts.
    assert told == [
        (0, 6, "verl-tp1"), (1, 6, "verl-tp2"), (2, 6, "verl-tp4"), (3, 6, "verl-tp8"), (4, 6, "pat"),
        (5, 6, "pat-tp1"), (6, 6, ""),
    ]  # fmt: skip


def test_tuning_takes_the_largest_geometric_mean_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the speedup does: TP 2 has rates of 2.5 and 0.1, all others of 1."""
    tables = Simulator.tables

    def timed(simulator: Simulator, spec: Any, seed: int) -> Any:
        frames = tables(simulator, spec, seed)
        steps = frames["steps"]
        steps["step_time_s"] = steps["trained"] / ((2.5, 0.1)[seed] if steps["initial_tp"].iloc[0] == 2 else 1.0)
        return frames

    monkeypatch.setattr(Simulator, "tables", timed)
    result = rlsim.run(experiment(systems=[{"verl": {"tp": "best"}}], baseline=None), overrides={"trace.cap": "1K"})
    assert result.manifest["tuned"] == {"": {"verl": "tp 1"}}


# -------------------------------------------------------------------------------------------------------- systems


def test_a_system_under_a_name_of_its_own() -> None:
    named = [{"name": "a", "use": ["pat"]}, {"name": "b", "use": "pat"}, {"name": "c", "use": [{"verl": {"tp": 2}}]}]
    steps = rlsim.run(experiment(seeds=1, baseline="a", systems=[*named, "pat"])).steps
    times = steps.groupby("system")["step_time_s"].sum()
    assert list(times.index) == ["a", "b", "c", "pat"]
    assert times.drop("c").nunique() == 1
    assert set(steps.loc[steps["system"] == "c", "initial_tp"]) == {2}


class Impatient(Schema, RolloutControl):
    """Starts at a degree and drops whatever is left at the first finish."""

    tp: int = Field(default=4, description="degree")

    def initial_tp(self, context: ControlContext) -> int:
        return self.tp

    def on_finish(self, view: RolloutView) -> Action:
        return Abort(tuple(r.id for replica in view.replicas() for r in replica.requests))


class Plain(RolloutControl):
    def initial_tp(self, context: ControlContext) -> int:
        return 2


def test_a_policy_by_module_and_class() -> None:
    mine = f"{__name__}:Impatient"
    result = rlsim.run(experiment(seeds=1, baseline=None, systems=[mine, {mine: {"tp": [2, 8]}}, f"{__name__}:Plain"]))
    assert list(result.manifest["systems"][""]) == ["impatient", "impatient-tp2", "impatient-tp8", "plain"]
    impatient = result.responses[result.responses["system"] == "impatient"]
    assert 0 < impatient["aborted"].sum() < len(impatient)
    assert (impatient["finish_at"].isna() == impatient["aborted"]).all()
    # What was aborted is not trained on.
    rows = result.steps.groupby("system")[["tokens", "train_time_s", "prep_time_s"]].sum()
    kept = impatient[~impatient["aborted"]]
    assert rows.loc["impatient", "tokens"] == (kept["prompt_tokens"] + kept["response_tokens"]).sum()
    assert rows.loc["impatient", "train_time_s"] < rows.loc["plain", "train_time_s"]
    with pytest.raises(ConfigError, match="Plain takes no parameters"):
        rlsim.run(experiment(baseline=None, systems=[{f"{__name__}:Plain": {"tp": 2}}]))


def test_a_policy_of_an_installed_package(monkeypatch: pytest.MonkeyPatch, output: Callable[..., str]) -> None:
    points = [EntryPoint("impatient", f"{__name__}:Impatient", "rlsim.policies")]
    monkeypatch.setattr("rlsim.policies.registry.entry_points", lambda group: points)
    result = rlsim.run(experiment(seeds=1, baseline=None, systems=["impatient", {"impatient": {"tp": [2]}}]))
    assert result.manifest["systems"] == {"": ["impatient", "impatient-tp2"]}
    with pytest.raises(CatalogueError, match="did you mean 'impatient'"):
        rlsim.run(experiment(baseline=None, systems=["impatent"]))
    assert "drops whatever is left" in output("list", "policies")


def test_the_baseline_is_a_system_that_runs_somewhere() -> None:
    """Under the first case none does, under the second TP 8 does not divide the model."""
    cases = {"a": {"model": "qwen2.5-32b", "cluster": "8xa40", "calibration": "a40-vllm"}, "b": {"model": "qwen2.5-7b"}}
    result = rlsim.run(experiment(seeds=1, cases=cases, baseline=None, systems=[{"verl": {"tp": [8, 1, 2]}}]))
    assert result.manifest["systems"] == {"a": [], "b": ["verl-tp1", "verl-tp2"]}
    assert result.manifest["baseline"] == "verl-tp1"
    assert result.summary()["speedup"].notna().all()
    assert not any("no speedups" in note for note in result.notes)


def test_cases() -> None:
    cases = {"1K": {"trace.cap": "1K"}, "2K": {"trace.cap": "2K", "workflow.steps": 1}}
    given = experiment(seeds=1, baseline="verl", systems=["verl", {"pat": {"start_tp": 2}}])
    result = rlsim.run({**given, "cases": cases})
    assert result.steps.groupby("case")["longest_tokens"].max().to_dict() == {"1K": 1024, "2K": 2048}
    assert result.steps.groupby("case").size().to_dict() == {"1K": 4, "2K": 2}
    summary = result.summary()
    assert (summary["case"] + " " + summary["system"]).tolist() == ["1K verl", "1K pat", "2K verl", "2K pat"]
    alone = rlsim.run(given, overrides=cases["2K"])
    assert alone.steps["step_time_s"].tolist() == result.steps[result.steps["case"] == "2K"]["step_time_s"].tolist()
    assert any(note.startswith("1K: verl ran with tp ") for note in result.notes)


# --------------------------------------------------------------------------------------------------------- traces


def _trace(path: Path, groups: int, **columns: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompt, sample = np.divmod(np.arange(64), groups)
    frame = pd.DataFrame({"prompt_id": prompt, "sample_id": sample, "response_tokens": rng.integers(1, 900, 64)})
    frame.assign(**columns).to_csv(path, index=False)
    workflow = {"prompts": 4, "responses": 4, "steps": 1}
    trace = {"path": str(path), "cap": 512}
    return experiment(seeds=1, baseline=None, systems=["verl"], trace=trace, workflow=workflow)


def test_a_trace_without_groups_or_all_prompt_lengths(tmp_path: Path) -> None:
    result = rlsim.run(_trace(tmp_path / "flat.csv", groups=1))
    assert any("no prompt has more than 1 of the 4 samples" in note for note in result.notes)
    assert any("have no prompt length: taken as 256 tokens" in note for note in result.notes)
    assert set(result.responses["prompt_tokens"]) == {256}
    assert result.steps["longest_tokens"].max() == 512
    short = rlsim.run(_trace(tmp_path / "flat.csv", groups=4), overrides={"trace.default_prompt_tokens": "1K"})
    assert set(short.responses["prompt_tokens"]) == {1024}
    assert not any("samples" in note for note in short.notes)
    known = [None if i < 32 else 100 for i in range(64)]
    some = rlsim.run(_trace(tmp_path / "some.csv", groups=4, prompt_tokens=known))
    assert any("50.0% of the responses have no prompt length" in note for note in some.notes)
    assert set(some.responses["prompt_tokens"]) <= {100, 256}


def test_a_considerable_share_of_preempted_responses_is_noted() -> None:
    """A KV cache of which a quarter of the responses do not find enough, beside one that has room for all."""
    settings = {"workflow.steps": 1, "systems": [{"verl": {"tp": [1, 8]}}], "baseline": "verl-tp1", "trace.cap": "16K"}
    result = rlsim.run("planner_preemption", seeds=1, overrides=settings)
    steps = result.steps.set_index("system")
    each = steps["preemptions"] / steps["launched"]
    assert each["verl-tp1"] > 0.1
    (note,) = (note for note in result.notes if note.startswith("responses were preempted"))
    responses = result.responses[result.responses["system"] == "verl-tp1"]
    share = (responses["preemptions"] > 0).mean()
    assert f"verl-tp1 ({share:.0%} of its responses, {each['verl-tp1']:.2f} times each on average)" in note
    assert "KV cache is too small" in note
    assert "memory_utilization" in note
    assert "verl-tp8" not in note
    few, many = pd.Series([0] * 96 + [1] * 4), pd.Series([0] * 95 + [2] * 5)
    assert not list(preemption_notes({"few": few}))
    (note,) = preemption_notes({"few": few, "many": many})
    assert "few" not in note
    assert "many (5% of its responses, 0.10 times each on average)" in note


def test_what_bears_on_what_was_run_is_noted() -> None:
    small = experiment(seeds=1, baseline=None, systems=["verl"], model="llama-3-70b", cluster="16x8xh100")
    result = rlsim.run(small, overrides={"workflow.prompts": 64, "trace.cap": "1K", "workflow.steps": 1})
    note = next(note for note in result.notes if "infeasible" in note)
    assert note.startswith("TP1 is infeasible: llama-3-70b rollout at TP 1 does not fit")
    assert (result.steps["initial_tp"] > 1).all()
    notes = rlsim.run(ONE, overrides={"trace": {"path": "dapo-growing", "cap": "32K"}, "workflow.steps": 1}).notes
    assert any("the cap of 32768 tokens is above its own cap of 20480 tokens" in note for note in notes)


# ------------------------------------------------------------------------------------------------ the command line


@pytest.fixture
def output(call: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command prints that ends well."""
    monkeypatch.setenv("COLUMNS", "200")

    def printed(*arguments: str) -> str:
        done = call(*arguments)
        assert not done.code, done.err
        return done.out

    return printed


def test_run_prints_a_comparison_and_writes_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(json.dumps({**ONE, "systems": [{"verl": {"tp": 2}}, "pat"], "seeds": 2}))
    printed = output("run", "x.yaml", "--set", "trace.cap=1K")
    assert "speedup: responses/s over those of verl;" in printed
    assert "results: results/small" in printed
    assert set(read_result("results/small").steps["system"]) == {"verl", "pat"}
    assert output("run", "x.yaml", "-q", "--seeds", "1", "--out", "o") == "o\n"


def test_what_lies_beside_an_experiment_and_a_directory_of_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pat_vs_static").mkdir()
    assert load_experiment("pat_vs_static")[0].name == "pat-vs-static"
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "my_idea.py").write_text(
        "import rlsim\n\n\nclass Idea(rlsim.RolloutControl):\n    def initial_tp(self, context):\n        return 8\n"
    )
    (tmp_path / "exp" / "x.yaml").write_text(json.dumps({**ONE, "systems": ["my_idea:Idea"]}))
    assert output("run", "exp/x.yaml", "-q", "--out", "o") == "o\n"
    assert set(read_result("o").steps["initial_tp"]) == {8}
    monkeypatch.delitem(sys.modules, "my_idea")


def test_public_names() -> None:
    assert sorted(dir(rlsim)) == sorted(rlsim.__all__)
    for name in rlsim.__all__:
        assert getattr(rlsim, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rlsim.nonsense  # noqa: B018


def test_prompts_that_leave_no_room_are_left_out(folder: Path) -> None:
    rows = "prompt_id,sample_id,prompt_tokens,response_tokens\n"
    rows += "".join(f"{prompt},{sample},{100 * prompt + 100},500\n" for prompt in range(4) for sample in range(2))
    (folder / "lengths.csv").write_text(rows)
    given = {**TINY, "trace": {"path": "lengths.csv", "cap": 512, "max_model_len": 400}}
    found = rlsim.run(given)
    assert "1 of 4 prompts are left out: they fill trace.max_model_len, 400 tokens" in found.notes
    total = found.responses["prompt_tokens"] + found.responses["response_tokens"]
    assert total.tolist() == [400] * 4
    loaded = loaded_of(given)
    assert (loaded.longest_response, loaded.longest_sequence) == (300, 400)
    short = rlsim.run(given, overrides={"trace.max_prompt_tokens": 200})
    assert "2 of 4 prompts are left out: they exceed trace.max_prompt_tokens, 200 tokens" in short.notes
    assert short.responses["prompt_tokens"].max() == 200
    with pytest.raises(ConfigError, match=r"every prompt of trace lengths fills trace.max_model_len, 100 tokens"):
        rlsim.run(given, overrides={"trace.max_model_len": 100})
