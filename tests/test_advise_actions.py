"""`rlsim advise` for daily use: the headline, veRL's settings, --quick, processes, and the plan that was found."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_advise import SLOW, SMALL, result_of, rows_of
from typer.testing import CliRunner

import rlsim
from rlsim.advise.advice import Advice, advise
from rlsim.advise.headline import Headline, headline
from rlsim.advise.quick import contenders
from rlsim.advise.ranking import candidates, ranking
from rlsim.advise.scaling import best_doublings, scaling, scaling_rows
from rlsim.cli import app
from rlsim.errors import CapacityError, RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.job import Job, Ran, in_turn, remembering
from rlsim.experiment.load import load_experiment
from rlsim.experiment.run import run_loaded
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import parse_systems
from rlsim.init.parts import Options
from rlsim.sweeps.jobs import in_processes
from rlsim.verl.experiment import from_verl
from rlsim.verl.overrides import FILTER, REWARD_ASYNC, TP, changed, gpus_of, overrides_of

TINY: dict[str, Any] = {"trace.cap": 256, "workflow.prompts": 2, "workflow.responses": 2}
#: On so few GPUs a plan is found in a tenth of the time.
PAIR: dict[str, Any] = {**TINY, "cluster": "2xh100"}
VERL = ("data.train_batch_size=64", "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", "actor_rollout_ref.rollout.n=5",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=64")  # fmt: skip


# The headline ---------------------------------------------------------------------------------------------------------


def said(times: dict[str, list[float]], settings: dict[str, Any], **more: Any) -> Headline:
    return headline(ranking(result_of(times, **more)), "b", settings)


def test_the_headline_says_what_to_do_and_what_it_divides_by() -> None:
    found = said({"b": [10.0, 20.0], "x": [5.0, 10.0]}, {"b": {TP: 2}, "x": {TP: 4}})
    assert found.text == (
        "Run x: 2.00 times the throughput of b (1.07 against 0.533 responses trained on per second, 95% interval 2.00 "
        "to 2.00)"
    )
    assert found.how == "Change these settings of veRL:"
    assert found.changes == (f"{TP}=4",)


@pytest.mark.parametrize("x", [[10.0, 20.0], [12.0, 21.0], [4.0, 40.0]])
def test_the_headline_keeps_what_nothing_beats_beyond_chance(x: list[float]) -> None:
    found = said({"b": [10.0, 20.0], "x": x}, {"b": {TP: 2}, "x": {TP: 4}})
    assert found.text.startswith("Keep b: nothing that was tried gains on its throughput beyond chance")
    assert found.changes == ()


def test_the_headline_says_plainly_that_verl_has_no_switch() -> None:
    times = {"b": [10.0, 20.0], "pat": [5.0, 10.0], "verl-tp1": [8.0, 16.0]}
    found = said(times, {"b": {TP: 2}, "pat": None, "verl-tp1": {TP: 1}})
    assert found.text.startswith("Run pat: 2.00 times")
    assert found.how.startswith("veRL has no switch for pat")
    assert "verl-tp1 has 1.25 times the throughput of b" in found.how
    assert found.changes == (f"{TP}=1",)
    alone = said({name: times[name] for name in ("b", "pat")}, {"b": {TP: 2}, "pat": None})
    assert alone.how.endswith("With veRL's own settings nothing gains: leave them.")
    assert alone.changes == ()


def test_one_seed_is_told_as_such() -> None:
    found = said({"b": [10.0], "x": [5.0]}, {"b": {}, "x": {TP: 4}})
    assert "interval" not in found.text
    assert found.text.endswith("one seed cannot tell that from chance: ask with more --seeds before you spend on it")


def test_the_headline_divides_by_no_baseline_that_puts_off_its_work() -> None:
    found = said({"b": [10.0, 20.0], "x": [5.0, 10.0]}, {}, waiting={"b": 1})
    assert found.text == "Nothing to advise yet: b holds back prompts; ask with more --steps"
    nothing = said({"b": [10.0, 20.0]}, {}, waiting={"b": 1})
    assert "no system could be compared" in nothing.text


# veRL's settings ------------------------------------------------------------------------------------------------------


def test_what_is_advised_is_read_back_the_same(tmp_path: Path) -> None:
    """`init --from-verl` makes of the advised settings the system that they are advised for."""
    for system in ({"verl": {"tp": 1}}, {"verl": {"tp": 4}}):
        (spec,) = parse_systems([system])
        wanted = overrides_of((part.policy, part.parameters) for part in spec.parts)
        assert wanted is not None
        lines = changed({}, {**wanted, **gpus_of(2, 8)})
        made = from_verl([*VERL, *lines], Options(tmp_path, "h100")).data()
        assert made["systems"][0]["use"] == [system]
        assert made["cluster"] == "2x8xh100"
    filtered = from_verl([*VERL, *changed({}, {FILTER: True})], Options(tmp_path, "h100")).data()
    assert "dynamic_sampling" in filtered["systems"][0]["use"]
    beside = from_verl([*VERL, *changed({}, {REWARD_ASYNC: True})], Options(tmp_path, "h100")).data()
    assert beside["workflow"]["reward"]["order"] == "beside_log_probs"


def test_settings_of_systems() -> None:
    assert overrides_of([("verl", {"tp": 2}), ("dynamic_sampling", {})]) == {TP: 2, FILTER: True}
    assert overrides_of([("verl", {"tp": 2}), ("reward_beside", {})]) == {TP: 2, REWARD_ASYNC: True}
    assert overrides_of([("pat", {})]) is None
    assert overrides_of([("verl", {"tp": "best"})]) is None
    assert changed({TP: 2, FILTER: True}, {TP: 2}) == (f"{FILTER}=False",)
    assert changed({TP: 2}, {TP: 2}) == ()


# Processes ------------------------------------------------------------------------------------------------------------


def test_results_are_the_same_bytes_on_any_number_of_workers(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    stated = {"training": {"recompute": "full", "micro_batch_tokens": 4096}, "costs": {"host_per_sequence": 5e-5},
              "weight_sync": "naive", "workflow.reward.time_per_response": 0.01, "memory_utilization": 0.8}  # fmt: skip
    overrides = {**TINY, **stated, "cluster": "4xh100"}
    given: dict[str, Any] = {"overrides": overrides, "top": 1, "most": 1, "skip": SLOW}
    for workers in (1, 2):
        advise(SMALL, **given, workers=workers, out=tmp_path / str(workers), progress=lambda *now: seen.append(now))
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("1", "2"))
    assert [path.name for path in one] == [path.name for path in two]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    worths = json.loads((tmp_path / "1" / "advice.json").read_text())["ledger"]
    assert worths["base"]["step_s"] > 0
    assert "driver's time per token" in [row["name"] for row in worths["assumed"]]
    assert all(end["step_s"] > 0 for row in worths["assumed"] for end in row["ends"])
    assert seen[0] == (0, 1, "what fits")
    assert any(what == "all systems: verl-tp4" for _, _, what in seen)
    assert all(done <= total for done, total, _ in seen)


def test_jobs_come_to_what_runs_in_turn_come_to() -> None:
    systems = ["verl", {"pat": {"start_tp": 1}}, {"name": "found", "use": [{"real": {"evaluations": 1000}}]}]
    loaded = load_experiment(SMALL, {**PAIR, "systems": systems})
    plain, jobs = run_loaded(*loaded), run_loaded(*loaded, execute=in_turn)
    for table in ("steps", "responses", "spans", "calls"):
        pd.testing.assert_frame_equal(getattr(plain, table), getattr(jobs, table), check_exact=True)
    assert plain.manifest["plans"] == jobs.manifest["plans"]
    assert list(plain.manifest["plans"][""]) == ["found"]


def test_no_job_is_done_twice() -> None:
    done: list[str] = []

    def counting(jobs: Sequence[Job], begun: Callable[[Job], None]) -> Iterable[tuple[Job, Ran | RlsimError]]:
        for job, answer in in_turn(jobs, begun):
            done.append(f"{job.name} {job.seeds}")
            yield job, answer

    execute = remembering(counting)
    for seeds in (1, 2):
        run_loaded(*load_experiment(SMALL, {**TINY, "seeds": seeds}), execute=execute)
    assert done == ["verl (0,)", "verl (1,)"]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_goes_wrong_in_a_job_is_one_error(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text(
        "from rlsim.sim.control import RolloutControl\n\n\nclass Breaks(RolloutControl):\n"
        "    def initial_tp(self, context):\n        return 1\n\n"
        "    def on_finish(self, view):\n        raise RuntimeError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {**TINY, "systems": ["verl", "breaks:Breaks"], "baseline": "verl"}
    with pytest.raises(RlsimError, match="no such thing"):
        run_loaded(*load_experiment(SMALL, given), execute=in_processes(workers))


def test_what_is_optional_is_left_out_where_it_does_not_fit() -> None:
    given = {
        **TINY,
        "memory_utilization": 0.3,
        "systems": [{"verl": {"tp": 8}}, {"name": "one", "use": [{"verl": {"tp": 1}}]}],
    }
    result = run_loaded(*load_experiment(SMALL, given), optional=["one"])
    assert any(note.startswith("one left out: ") for note in result.notes)
    with pytest.raises(CapacityError, match="system 'one'"):
        run_loaded(*load_experiment(SMALL, given))


def test_an_interrupt_ends_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlsim.advise.runs.run_loaded", interrupted)
    done = CliRunner().invoke(app, ["advise", "pat_vs_static", "--quick", "--workers", "1"])
    assert done.exit_code == 130
    assert done.output.strip() == "rlsim: interrupted; nothing was written"
    assert not list(tmp_path.iterdir())


# Quick ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Path]:
    out = tmp_path_factory.mktemp("quick") / "out"
    skip = [name for name in SLOW if name != "real"]
    return advise(SMALL, overrides=PAIR, skip=skip, quick=True, what_if=False, out=out), out


def test_quick_screens_all_and_says_what_it_leaves_out(quick: tuple[Advice, Path]) -> None:
    found, out = quick
    screened, ranked = found.tables["screened"], found.tables["ranking"]
    assert len(screened) > len(ranked)
    assert set(ranked["system"]) <= set(screened["system"])
    assert screened["speedup_low"].isna().all()
    assert ranked["speedup_low"].notna().all()
    assert screened["system"].iloc[0] in set(ranked["system"])
    (note,) = [note for note in found.notes if note.startswith("quick: ")]
    assert f"the other {len(screened) - len(ranked)} were dropped" in note
    assert found.conclusions[-1] == "GPUs: no other number than 2 was tried"
    data = json.loads((out / "advice.json").read_text())
    assert data["headline"] == found.headline.text
    assert data["settings"] == {"seeds": [0, 1, 2], "steps": 1, "worth": 1.5, "quick": True}


def test_the_plan_that_was_searched_for_runs_as_it_did(quick: tuple[Advice, Path]) -> None:
    found, out = quick
    plan = found.tables["plan"]
    assert set(plan["call"]) == {"generate", "old_log_prob", "ref_log_prob", "train"}
    assert plan[["tp", "pp", "dp"]].notna().all(axis=None)
    again = rlsim.run(out / "plan.yaml", seeds=1).steps.query("system == 'real (found)'")["step_time_s"].tolist()
    screened = found.tables["screened"].set_index("system")
    assert again == [pytest.approx(screened.loc["real", "step_time_s"], rel=1e-12)]


def test_contenders_are_the_best_the_baseline_and_the_best_in_verl() -> None:
    ranked = ranking(result_of({"b": [9.0], "x": [5.0], "y": [6.0], "z": [7.0], "v": [8.0], "w": [8.5]}))
    assert contenders(ranked, "b", ["b", "v", "w"]) == ["x", "y", "v", "b"]


def test_a_part_that_chooses_its_tp_is_not_run_again_from_it() -> None:
    busy = load_experiment(SMALL, {"workflow.prompts": 512})[0]  # auto is TP 1
    simulator = Simulator(LoadedExperiment.of(busy, Path()), search=False)
    names = [[entry["name"] for entry in candidates(simulator, parse_systems(own))[0]] for own in ([], ["pat"])]
    assert len([name for name in names[0] if name.startswith("pat")]) == 3
    assert len([name for name in names[1] if name.startswith("pat")]) == 2
    assert "real" in names[0]  # its plan is searched for with the runs, not before them


# Numbers of GPUs ------------------------------------------------------------------------------------------------------


def test_the_scaling_table_has_the_means_of_the_summary() -> None:
    result = rlsim.run(SMALL, overrides={**TINY, "workflow.steps": 2})
    row, summary = scaling(scaling_rows(result, 8)).iloc[0], result.summary().iloc[0]
    for name in ("step_time_s", "responses_per_s", "tokens_per_s"):
        assert row[name] == pytest.approx(summary[name], rel=1e-12)


def test_the_fastest_at_a_size_is_so_by_the_mean_that_speedups_are() -> None:
    """`often` has the higher arithmetic mean on 16 GPUs, `mostly` the higher geometric one."""
    rows = pd.concat([rows_of({8: [10.0, 10.0], 16: [1.0, 16.0]}, "often"), rows_of({16: [3.0, 4.0]}, "mostly")])
    best = best_doublings(rows)
    assert best["system"].tolist() == ["often", "mostly"]
    assert best["doubling"].iloc[1] == pytest.approx((10 / 3 * 10 / 4) ** 0.5)
