"""`rlsim check`, and what `rlsim run` checks before it simulates or searches."""

from pathlib import Path

import pytest
from conftest import BASE, Command, cases

from rlsim.experiment.run import check_experiment
from rlsim.results.sweeps.points import check_sweep

CASES = BASE.replace(
    "  - pat\n", "  - pat\n  - real\ncases:\n  a: {trace.cap: 1K}\n  b: {trace.cap: 512, workflow.steps: 2}\n"
)


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing is simulated or searched for before everything is checked")

    monkeypatch.setattr("rlsim.experiment.simulator.Simulator.simulate", refuse)
    monkeypatch.setattr("rlsim.experiment.planning.PlanSpace.__init__", refuse)


def test_check_says_what_an_experiment_is(folder: Path, call: Command) -> None:
    before = sorted(folder.rglob("*"))
    assert call("check", "base.yaml") == (0, "probe: 2 systems × 1 seed × 1 case = 2 runs\n", "")
    seven = call("check", "base.yaml", "--seeds", "7")
    assert seven == (0, "probe: 2 systems × (7 seeds + 7 worlds) × 1 case = 28 runs\n", "")
    (folder / "base.yaml").write_text(CASES, encoding="utf-8")
    code, said, _ = call("check", "base.yaml")
    assert code == 0
    assert said.splitlines()[0] == "probe: 3 systems × 1 seed × 2 cases = 6 runs"
    assert "note: whether the plans of real fit" in said
    assert call("check", "pat_vs_static").out.startswith("pat-vs-static: 8 systems × (20 seeds + 20 ")
    assert sorted(folder.rglob("*")) == before
    assert check_experiment("pat_vs_static", {"systems": ["verl"], "baseline": "verl"}, seeds=3).runs == 3


def test_a_point_of_a_sweep_is_checked_as_an_experiment_is() -> None:
    """What nobody wrote is not taken for given there: without chunked prefill vLLM refuses what is."""
    _, points = check_sweep("asynchrony", ["certainty=0", "cases={}"], 1)
    assert points == [check_experiment("asynchrony", {"certainty": 0, "cases": {}}, 1)]
    assert not points[0].refused


@cases("check", "check finds what a later case has wrong")
def test_check_finds_what_a_later_case_has_wrong(folder: Path, call: Command, change: str, message: str) -> None:
    (folder / "base.yaml").write_text(CASES, encoding="utf-8")
    for arguments in (("check", "base.yaml"), ("run", "base.yaml", "--out", "out")):
        checked = call(*arguments, "--set", change)
        assert checked.code == 2
        assert message in checked.err


def test_check_looks_at_every_point_of_a_sweep(folder: Path, call: Command) -> None:
    sweep = "name: many\nexperiment: base.yaml\naxes:\n  - grid: {trace.cap: [1K, 2K], memory_utilization: [0.9, %s]}\n"
    (folder / "many.yaml").write_text(sweep % "0.8", encoding="utf-8")
    said = "many: 4 points (the first: 2 systems × 1 seed × 1 case = 2 runs); 8 runs in all"
    assert call("check", "many.yaml") == (0, f"{said}\n", "")
    (folder / "many.yaml").write_text(sweep % "0.05", encoding="utf-8")
    code, _, said = call("check", "many.yaml")
    assert code == 2
    assert "no TP degree is feasible" in said
    assert "memory_utilization=0.05" in said


def test_one_point_of_a_sweep_is_told_as_one(folder: Path, call: Command) -> None:
    (folder / "one.yaml").write_text("name: one\nexperiment: base.yaml\nset: {systems: [pat]}\naxes: []\n")
    said = "one: 1 point (the first: 1 system × 1 seed × 1 case = 1 run); 1 run in all"
    assert call("check", "one.yaml") == (0, f"{said}\n", "")


def test_check_leaves_with_2_where_an_engine_or_framework_would_not_start(folder: Path, call: Command) -> None:
    code, said, _ = call("check", "base.yaml", "--set", "training.zero_stage=1")
    assert code == 2
    assert "it has no ZeRO 1: FSDP does not start with it" in said
