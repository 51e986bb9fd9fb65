"""`rlsim advise --max-staleness`: the search for a peak and for a split, the bound, and what an advice says of both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import cases
from result_tables import table
from test_advise import SMALL
from typer.testing import CliRunner

import rlsim
from rlsim.base.reading import parse_yaml
from rlsim.cli import app
from rlsim.errors import CatalogueError, ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.case import in_turn
from rlsim.experiment.load import load_experiment
from rlsim.experiment.result import Result
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import parse_systems
from rlsim.frameworks.keys import Keys, line_of
from rlsim.policies.registry import BUILTIN
from rlsim.results.advise.advice import Advice, advise, read_tables
from rlsim.results.advise.asynchronous import MOST_AGE, families, steps_for
from rlsim.results.advise.bound import Bound
from rlsim.results.advise.headline import headline
from rlsim.results.advise.peak import peak, together
from rlsim.results.advise.runs import Runner
from rlsim.results.advise.split_search import Search
from rlsim.results.advise.staleness import Allowed, allowed_steps
from rlsim.results.advise.texts import texts

SHORT: dict[str, Any] = {
    **SMALL,
    "model": "qwen2.5-1.5b",
    "trace": {"path": "deepscaler-llama-3.1-8b", "cap": 512},
    "workflow": {"prompts": 8, "responses": 4, "steps": 4},
}
#: On four GPUs there are fewer splits; two systems that are stale show as much as all.
FOUR: dict[str, Any] = {**SHORT, "cluster": "4xh100", "workflow": {**SHORT["workflow"], "prompts": 4}}
OTHERS = [name for name in BUILTIN if name not in ("verl", "roll_flash", "one_step_off", "lagged")]


# The peak -------------------------------------------------------------------------------------------------------------


def found_by(search: Any, values: list[float]) -> tuple[Any, int]:
    """What a search over the positions of values returns, and the rounds it took."""
    wanted, rounds = next(search, None), 0
    while wanted is not None:
        rounds += 1
        try:
            wanted = search.send([values[at] for at in wanted])
        except StopIteration as stop:
            return stop.value, rounds
    return {}, rounds


@pytest.mark.parametrize("count", range(1, 35))
def test_the_peak_is_found_wherever_it_is(count: int) -> None:
    for top in range(count):
        values = [-abs(at - top) - (at > top) * 0.5 for at in range(count)]
        found, _ = found_by(peak(range(count), float), values)
        assert max(found, key=found.__getitem__) == top
        assert {top - 1, top + 1} & set(range(count)) <= set(found), "its neighbours are known"
        assert list(found) == sorted(found)
        assert len(found) <= 4 + 1.6 * count**0.5, "few are evaluated"


def test_of_several_peaks_one_is_found_that_beats_its_neighbours() -> None:
    values = [1.0, 5.0, 2.0, 9.0, 3.0, 3.0, 8.0, 1.0, 4.0, 2.0]
    found, _ = found_by(peak(range(10), float), values)
    best = max(found, key=found.__getitem__)
    assert values[best] >= max(values[best - 1], values[best + 1])


def test_searches_side_by_side_take_as_long_as_the_longest() -> None:
    values = [float(-((at - 20) ** 2)) for at in range(40)]
    alone = [found_by(peak(range(first, 40), float), values) for first in (0, 15, 39)]
    both, rounds = found_by(together([peak(range(first, 40), float) for first in (0, 15, 39)]), values)
    assert both == [found for found, _ in alone]
    assert list(peak([], float)) == list(together([])) == [], "nothing to search"
    assert rounds == max(own for _, own in alone)


# The search for a split -----------------------------------------------------------------------------------------------


def search_on(changes: dict[str, Any], most: int = 1) -> tuple[Search, Simulator]:
    experiment, shown, folder = load_experiment(SHORT, changes)
    simulator = Simulator(LoadedExperiment.of(experiment, folder, shown), search=False)
    bound, steps = Bound("max", most), steps_for(most, experiment, 1)
    return Search(Runner(SHORT, changes, in_turn, None), simulator, bound, steps), simulator


def chosen_families(simulator: Simulator, *names: str, most: int = 1) -> list[Any]:
    return [family for family in families(most, simulator.loaded.experiment) if family.name in names]


def test_the_search_finds_the_split_that_trying_all_finds() -> None:
    search, simulator = search_on({})
    splits = search(chosen_families(simulator, "roll_flash"))
    assert {tp: list(grid) for tp, grid in splits.grids.items()} == {1: [1, 2, 3, 4, 5, 6, 7], 2: [2, 4, 6], 4: [4]}
    (row,) = splits.summary().to_dict("records")
    systems = [
        {"name": f"{tp} {count}", "use": [{"roll_flash": {"tp": tp, "rollout_gpus": count, "alpha": 1}}]}
        for tp, grid in splits.grids.items()
        for count in grid
    ]
    rates = rlsim.run(SHORT, overrides={"systems": systems, "seeds": 1}).summary().set_index("system")
    best = rates["responses_per_s"].idxmax()
    assert f"{row['tp']} {row['rollout_gpus']}" == best
    assert row["responses_per_s"] == pytest.approx(rates.loc[best, "responses_per_s"], rel=1e-9)
    assert row["tried"] <= row["feasible"] == 11


def test_training_must_divide_what_generation_leaves() -> None:
    search, simulator = search_on({"training.tp": 2, "training.backend": "megatron"})
    (family,) = chosen_families(simulator, "streamrl")
    assert search._has_grids(family)
    assert search._grids == {1: [2, 4, 6], 2: [2, 4, 6], 4: [4]}
    search, simulator = search_on({"cluster": "8x8xh100"})  # many nodes are split whole
    assert search._has_grids(chosen_families(simulator, "roll_flash")[0])
    assert search._grids[1] == search._grids[4] == [8, 16, 24, 32, 40, 48, 56]


def test_what_fits_nowhere_says_why() -> None:
    search, simulator = search_on({"cluster": "1xh100"})
    splits = search(chosen_families(simulator, "roll_flash"))
    assert splits.best == {}
    assert splits.summary().empty
    assert splits.refused == {"roll_flash": "no split of the GPUs fits"}


def test_a_looser_variant_that_breaks_the_bound_gives_way_to_a_stricter_one() -> None:
    """Twice the prompts under way come to be two updates old; the paused ones are fewer then."""
    search, simulator = search_on({"trace.cap": "2K", "workflow.prompts": 16, "cluster": "4xh100"})
    splits = search(chosen_families(simulator, "colocated_async", "areal"))
    stale = {point: probe["staleness_max"] for point, probe in splits.tried.items()}
    assert max(stale.values()) > 1
    assert all(stale[point] <= 1 for point in splits.best.values())
    assert splits.best["colocated_async"].variant > 0
    assert line_of(splits.best["colocated_async"].spec("x")) == "- colocated_async: {active: 1.5}"


def test_parameters_follow_the_bound_up_to_an_age() -> None:
    experiment = load_experiment(SHORT)[0]
    for most, age in ((1, 1), (3, 3), (100, MOST_AGE)):
        found = {family.name: family for family in families(most, experiment)}
        assert found["areal"].variants[0] == {"eta": age}
        assert found["nemo_async"].variants == ({"max_trajectory_age_steps": age},)
        assert (f"one_step_off-lag{age}" in found) == (most > 1)
        assert steps_for(most, experiment, 2) == 2 * age + 2 * (age + 1)
    assert "areal" not in [family.name for family in families(1, experiment, skip=["areal"])]
    four = load_experiment(SHORT, {"training.mini_batches": 4})[0]
    (quota,) = [family for family in families(1, four) if family.name == "verl_fully_async"]
    assert quota.variants[0]["trigger_parameter_sync_step"] == 4


# The bound ------------------------------------------------------------------------------------------------------------


def stale_result(staleness: dict[str, int]) -> Result:
    rows = [
        {"system": system, "seed": seed, "step_time_s": 10.0 - updates, "tokens": 1000, "trained": 8,
         "staleness_max": updates * step, "staleness_mean": updates / 2, "staleness_counts": f"{updates}:8",
         "step": step, "steady": step == 0}
        for system, updates in staleness.items() for seed in (0, 1) for step in (0, 1)
    ]  # fmt: skip
    manifest = {"baseline": "b", "tuned": {"": {}}, "systems": {"": list(staleness)}, "setups": {"": {"responses": 4}}}
    nothing = pd.DataFrame()
    return Result(table("steps", *rows), nothing, nothing, nothing, nothing, nothing, manifest)


def test_what_breaks_the_bound_in_any_step_is_left_out_and_told() -> None:
    allowed, result = Allowed(Bound("max", 1), baseline="b", steps=4), stale_result({"b": 0, "one": 1, "two": 2})
    ranked = allowed.ranking(result)
    assert ranked["system"].tolist() == ["one", "b"]
    assert ranked["staleness_p95"].tolist() == [1.0, 0.0]
    why = "its run was 2 updates stale in every response trained on (staleness_max), more than the 1 allowed"
    assert allowed.over(result) == {"two": why}
    nothing = {"ranking": ranked, "splits": pd.DataFrame()}
    assert allowed.conclusions(nothing) == ("staleness: up to 1 update allowed, in every response trained on",)
    assert (Allowed().over(result), Allowed().notes) == ({}, []), "nothing is added where no staleness is allowed"


def test_a_baseline_that_breaks_the_bound_is_never_advised() -> None:
    """It stays as what the others are compared with; what was tried and keeps the bound is named."""
    allowed, result = Allowed(Bound("max", 1), baseline="b", steps=4), stale_result({"b": 2, "one": 1, "two": 2})
    ranked, over = allowed.ranking(result), allowed.over(result)
    assert set(ranked["system"]) == {"b", "one"}
    assert set(over) == {"b", "two"}
    specs = {name: parse_systems([{"name": name, "use": [{"verl": {"tp": 2}}]}])[0] for name in ("b", "one")}
    found = headline(ranked, "b", Keys("", "vllm", 8), specs, over["b"])
    assert found.text.startswith("b itself is not allowed: its run was 2 updates stale")
    assert "Run one: 0.89 times" in found.text
    assert "Keep b" not in found.text


@pytest.mark.parametrize("bad", [-1, 1.5, True, "eta:0.5", "mean:", "p95:x", "mean:-1", "mean:nan"])
def test_a_bound_is_a_number_of_updates(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_staleness: expected a (whole )?number of updates, 0 or more"):
        advise(SHORT, max_staleness=bad)


def test_the_command_refuses_a_negative_bound() -> None:
    done = CliRunner().invoke(app, ["advise", "pat_vs_static", "--max-staleness=-1"])
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(CatalogueError, match="unknown kind of staleness bound 'p90'; did you mean 'p95'"):
        Bound.of("p90:1")


@cases("advise_staleness", "a bound is of what its user means")
def test_a_bound_is_of_what_its_user_means(bound: str, left_out: list[str]) -> None:
    """A response in a hundred that is three updates old excludes no system whose setting or mean is one."""
    old = {"staleness_mean": 1.02, "staleness_p95": 2.0, "staleness_max": 3, "staleness_counts": "1:90 2:9 3:1"}
    one = {"staleness_mean": 1.0, "staleness_p95": 1.0, "staleness_max": 1, "staleness_counts": "1:100"}
    found = stale_result({"b": 0})
    plain = {"step_time_s": 9.0, "tokens": 1000, "trained": 100}
    rows = table("steps", plain | {"system": "old"} | old, plain | {"system": "one"} | one)
    both = replace(found, steps=pd.concat([found.steps, rows]))
    allowed = Allowed(Bound.of(bound), baseline="b", own={"old": 1, "one": 1})
    assert [name for name in ("old", "one") if name in allowed.over(both)] == left_out


# An advice ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Path]:
    out = tmp_path_factory.mktemp("bounded") / "out"
    return advise(FOUR, max_staleness=1, quick=True, what_if=False, workers=1, skip=OTHERS, out=out), out


def test_an_advice_under_a_bound(bounded: tuple[Advice, Path]) -> None:
    found, out = bounded
    ranked = found.tables["ranking"]
    stale = ranked[ranked["staleness_max"] > 0]
    assert len(stale) >= 2
    assert (stale["staleness_mean"] <= 1.05).all()
    assert stale["rollout_idle"].notna().all()
    assert found.settings["max_staleness"] == "eta:1"
    assert found.not_applicable["lagged"] == "--max-staleness tries whole systems: name it among the systems"
    assert [text.partition(":")[0] for text in found.conclusions][2:] == ["staleness", "split"]
    data = json.loads((out / "advice.json").read_text())
    assert data["splits"][0]["tried"] <= data["splits"][0]["feasible"]
    assert len(data["splits_tried"]) >= len(data["splits"])
    assert len(read_tables(out)["splits"]) == len(data["splits"])
    shown = {text.name: text for text in texts(found.tables)}
    assert "trainer idle" in shown["ranking"].headings
    assert "GPUs that generate, and GPUs that train" in (rlsim.write_report(out)).read_text(encoding="utf-8")


def test_the_line_that_is_advised_runs_as_it_did(bounded: tuple[Advice, Path]) -> None:
    found, _ = bounded
    row = found.tables["splits"].iloc[0]
    steps = int(found.result.manifest["experiment"]["workflow"]["steps"])
    systems = parse_yaml(f"systems:\n  {row['line']}\n", "line")["systems"]
    again = rlsim.run(FOUR, overrides={"systems": systems, "seeds": 1, "workflow.steps": steps}).steps
    own = found.result.steps.query("system == @row.system and seed == 0")
    assert again["step_time_s"].tolist() == pytest.approx(own["step_time_s"].tolist(), rel=1e-12)


def test_a_full_advice_under_a_bound_runs_enough_steps_for_it() -> None:
    skip = [*OTHERS, "one_step_off"]
    found = advise({**FOUR, "cluster": "2xh100"}, max_staleness=1, what_if=False, skip=skip)
    steps = found.result.manifest["experiment"]["workflow"]["steps"]
    assert steps == allowed_steps(1, load_experiment(FOUR)[0], quick=False) > FOUR["workflow"]["steps"]
    assert found.tables["splits"]["system"].tolist() == ["roll_flash"]
