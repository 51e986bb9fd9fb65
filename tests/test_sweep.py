"""Sweeps: axes, points, the directory and what may happen to it, processes that die, and reading the results."""

import copy
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from conftest import TINY, Command, cases, contents, sample

import rlsim
from rlsim.cli.tables import setting_texts
from rlsim.errors import CatalogueError, ConfigError, RlsimError
from rlsim.experiment.columns import SUMMARY
from rlsim.results.sweeps import run as running
from rlsim.results.sweeps import task as local
from rlsim.results.sweeps.points import Definition, load_sweep
from rlsim.results.sweeps.schema import SweepSpec, settings_of
from rlsim.results.sweeps.store import Store
from rlsim.results.sweeps.task import Failed


def a_sweep(*axes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    experiment = {**copy.deepcopy(TINY), **changes}
    return {"name": "small", "experiment": experiment, "axes": list(axes) or [{"grid": {"trace.cap": [256, 512]}}]}


#: The sweep of most tests on directories: four points.
FOUR = a_sweep({"grid": {"trace.cap": [128, 256], "workflow.prompts": [1, 2]}})


def values(*axes: dict[str, Any]) -> list[dict[str, Any]]:
    spec = SweepSpec.model_validate(a_sweep(*axes))
    return [{key: value.value for key, value in point.items()} for point in settings_of(spec.axes, "s.yaml")]


def ran(directory: Path) -> list[str]:
    """The points that were run, in order, once for each time."""
    log = directory / "log.jsonl"
    return [json.loads(line)["point"] for line in log.read_text().splitlines()] if log.exists() else []


# ------------------------------------------------------------------------------------------------------- the axes


def test_grid_zip_list_and_random_make_every_combination() -> None:
    found = values(
        {"grid": {"a.x": [1, 2], "b": ["u"]}},
        {"zip": {"c": [1, 2], "d": [3, 4]}},
        {"list": [{"e": 1}, {"e": 2, "f": 3}]},
    )
    assert len(found) == 2 * 2 * 2
    assert found[0] == {"a.x": 1, "b": "u", "c": 1, "d": 3, "e": 1}
    assert found[1] == {"a.x": 1, "b": "u", "c": 1, "d": 3, "e": 2, "f": 3}
    assert found[-1] == {"a.x": 2, "b": "u", "c": 2, "d": 4, "e": 2, "f": 3}


def test_random_points_are_reproducible_and_grow_at_the_end() -> None:
    keys = {
        "u": {"uniform": [0.5, 1]},
        "l": {"loguniform": [1, 1000]},
        "i": {"int": ["1K", "2K"]},
        "c": {"choice": ["p", "q"]},
    }
    few, many = (values({"random": {"points": n, "seed": 3, "keys": keys}}) for n in (5, 200))
    assert many[:5] == few
    assert values({"random": {"points": 5, "seed": 4, "keys": keys}}) != few
    alone = values({"random": {"points": 5, "seed": 3, "keys": {"i": keys["i"]}}})
    assert [point["i"] for point in alone] == [point["i"] for point in few]
    frame = pd.DataFrame(many)
    assert frame["u"].between(0.5, 1).all()
    assert frame["l"].between(1, 1000).all()
    assert 20 < frame["l"].median() < 50  # 10^1.5 = 32
    assert set(frame["c"]) == {"p", "q"}
    assert frame["i"].between(1024, 2048).all()


@cases("sweep", "axes and points that cannot be are refused before anything runs")
def test_axes_and_points_that_cannot_be_are_refused_before_anything_runs(axes: Any, message: str) -> None:
    with pytest.raises(RlsimError, match=message):
        load_sweep({**a_sweep(), "axes": axes})


def test_every_mistake_of_every_point_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(json.dumps(TINY), encoding="utf-8")
    Path("caps.yaml").write_text(sample("sweep_with_mistakes.yaml"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_sweep("caps.yaml")
    first, second = sorted(str(caught.value).splitlines())
    assert first.startswith("caps.yaml:5:24: trace.cap: expected a length such as '24K', got 'lots' (2 of 6 points")
    assert second.startswith("caps.yaml:6:29: workflow.prompts: expected at least 1 (got 0)")
    assert "3 of 6 points, such as trace.cap=256, workflow.prompts=0" in second


def test_a_log_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"log\.jsonl: cannot be written"):
        Store(tmp_path).log({})


def test_nothing_overrules_an_axis_silently() -> None:
    with pytest.raises(ConfigError, match=r"--set sets trace, which is an axis of the sweep \(trace.cap\)"):
        load_sweep(a_sweep(), overrides={"trace": {"fixed": 3}})
    with pytest.raises(ConfigError, match="--seeds sets seeds"):
        load_sweep(a_sweep({"grid": {"seeds": [1, 2]}}), seeds=3)
    with pytest.raises(ConfigError, match=r"case 'short' sets trace\.cap"):
        load_sweep(a_sweep(cases={"short": {"trace.cap": 64}}))


def test_an_experiment_is_a_sweep_of_one_point_until_axes_are_added() -> None:
    assert len(load_sweep("pat_vs_static").points) == 1
    found = load_sweep("pat_vs_static", seeds=2, overrides=["workflow.steps=1"], axes={"trace.cap": ["4K", "8K"]})
    assert [[axis.value for axis in point.axes] for point in found.points] == [[4096], [8192]]
    assert all(point.config["seeds"] == [0, 1] for point in found.points)
    assert all(point.config["workflow"]["steps"] == 1 for point in found.points)
    with pytest.raises(CatalogueError, match="did you mean 'pat_vs_static'"):
        load_sweep("pat_vs_statics")


# ----------------------------------------------------------------------------------------------- points and names


def names(definition: Definition) -> list[str]:
    return [point.name for point in definition.points]


def test_points_are_named_by_what_decides_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = names(load_sweep(a_sweep()))
    assert names(load_sweep(a_sweep(description="other words"))) == name
    assert names(load_sweep(a_sweep({"grid": {"trace.cap": ["0.25K", "0.5K"]}}))) == name
    assert names(load_sweep(a_sweep(seeds=[0]))) == name  # the seeds, not how they are written
    assert names(load_sweep(a_sweep(seeds=2))) != name
    assert names(load_sweep(a_sweep({"grid": {"trace.cap": [512, 256]}}))) == name[::-1]
    trace = tmp_path / "mine.parquet"
    shutil.copy(rlsim.base.catalogue.names("traces", ".parquet")["rollpacker-math"], trace)
    before = names(load_sweep(a_sweep(trace={"path": str(trace), "cap": 512})))
    shutil.copy(rlsim.base.catalogue.names("traces", ".parquet")["rollpacker-code"], trace)
    assert names(load_sweep(a_sweep(trace={"path": str(trace), "cap": 512}))) != before
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for tp in (8, 4):  # code of one's own
        policy = f"from rlsim import RolloutControl\n\nclass Mine(RolloutControl):\n    initial_tp = lambda *_: {tp}\n"
        (tmp_path / "mine_for_sweeps.py").write_text(policy, encoding="utf-8")
        found.append(names(load_sweep(a_sweep(systems=["mine_for_sweeps:Mine"]))))
    assert found[0] != found[1]
    twice = load_sweep(a_sweep({"grid": {"trace.cap": [256, "0.25K", 512]}}))
    assert (twice.asked, len(twice.points)) == (3, 2), "points that come out the same are one"


# ------------------------------------------------------------------------------------------------- what is written


@pytest.mark.usefixtures("in_process")
def test_tables_are_those_of_the_runs_with_axes_as_columns(tmp_path: Path) -> None:
    axes = [{"zip": {"trace.cap": [256, 512], "model": ["llama-3.1-8b", "qwen2.5-7b"]}}]
    found = rlsim.sweep(a_sweep(*axes, systems=[{"verl": {"tp": 2}}, "pat"]), out=tmp_path, tables=["responses"])
    assert found.definition["tables"] == ["steps", "responses", "summary"]
    for (cap, model), rows in found.table("steps").groupby(["trace.cap", "experiment.model"], sort=False):
        alone = rlsim.run(TINY, overrides={"trace.cap": cap, "model": model, "systems": [{"verl": {"tp": 2}}, "pat"]})
        own = rows.drop(columns=["point", "trace.cap", "experiment.model"]).reset_index(drop=True)
        pd.testing.assert_frame_equal(own, alone.steps, check_dtype=False)
    assert list(found.summary().columns) == ["point", "trace.cap", "experiment.model", *(c.name for c in SUMMARY)]
    assert list(found.points["status"]) == ["done"] * 2
    assert found.table("steps", ["trace.cap", "gen_time_s"]).shape == (4, 3)
    with pytest.raises(ConfigError, match="no table 'spans'; it kept: steps, responses, summary"):
        found.table("spans")


@pytest.mark.usefixtures("in_process")
def test_columns_hold_the_values_of_all_points(tmp_path: Path) -> None:
    axes = [
        {"list": [{"memory_utilization": 0.5}, {"workflow.reward.workers": 4}]},
        {"grid": {"systems": [["verl"], [{"verl": {"tp": 4}}]]}},
    ]
    points = rlsim.sweep(a_sweep(*axes), out=tmp_path).points
    assert list(points["memory_utilization"]) == [0.5, 0.5, 0.9, 0.9]  # a default where a point does not set it
    assert list(points["workflow.reward.workers"]) == [16, 16, 4, 4]
    assert list(points["systems"])[:2] == ['["verl"]', '[{"verl": {"tp": 4}}]']


# ------------------------------------------------------------------------------------------ going on, and growing


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`FOUR`, by two processes."""
    directory = tmp_path_factory.mktemp("sweep") / "two"
    rlsim.sweep(FOUR, out=directory, workers=2)
    return directory


@pytest.fixture
def target(two_workers: Path, tmp_path: Path) -> Path:
    """A copy of `two_workers` to change."""
    return shutil.copytree(two_workers, tmp_path / "copy")


@pytest.mark.usefixtures("in_process")
def test_one_process_and_two_workers_write_the_same_bytes(two_workers: Path, tmp_path: Path) -> None:
    rlsim.sweep(FOUR, out=tmp_path / "one")
    assert contents(tmp_path / "one") == contents(two_workers)
    assert len(contents(two_workers)) == 3 * 4 + 2  # steps, calls and summary; sweep.json and points.parquet


def test_units_and_the_whole_configuration_are_in_every_file(two_workers: Path) -> None:
    found = rlsim.read_sweep(two_workers)
    for table in found.definition["tables"]:
        for path in two_workers.glob(f"{table}/point=*/*.parquet"):
            schema = pq.read_schema(path)
            assert schema.field("trace.cap").metadata[b"unit"] == b"tokens"
            assert b"maximum response length" in schema.field("trace.cap").metadata[b"meaning"]
            assert all(schema.field(name).metadata[b"meaning"] for name in schema.names)
    record = found.record(found.points["point"][0])
    assert record["experiment"]["trace"]["cap"] == 128
    assert record["experiment"]["training"]["micro_batch_tokens"] == 16384  # a default
    assert set(record["inputs"]) >= {"trace rollpacker-math", "model llama-3.1-8b", "calibration h100-vllm", "rlsim"}
    assert record["versions"]["pyarrow"]


@pytest.mark.usefixtures("in_process")
def test_a_grown_sweep_runs_only_what_is_new(target: Path, tmp_path: Path) -> None:
    old = set(ran(target))
    grown = a_sweep({"grid": {"trace.cap": [64, 128, 256], "workflow.prompts": [1, 2]}})
    rlsim.sweep(grown, out=target)
    assert len(ran(target)) == 6
    assert set(ran(target)[4:]).isdisjoint(old)
    rlsim.sweep(grown, out=tmp_path / "fresh")
    assert contents(target) == contents(tmp_path / "fresh")


@pytest.mark.usefixtures("in_process")
def test_another_axis_runs_all_points_again_and_can_be_read_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rlsim.sweep(a_sweep({"grid": {"trace.cap": [128, 256]}}), out=out)
    axes = {"grid": {"trace.cap": [128, 256], "training.zero_stage": [None, 3]}}
    store = Store(out)
    store.write_definition(running._described(load_sweep(a_sweep(axes)), store.definition()["tables"]))  # type: ignore[index]
    found = rlsim.read_sweep(out)  # as after a kill before the first point
    assert found.points["status"].tolist() == ["done", "missing", "done", "missing"]
    steps = found.table("steps", ["trace.cap", "step_time_s"])
    assert list(steps) == ["point", "trace.cap", "step_time_s"]
    assert steps["trace.cap"].tolist() == [128, 256]
    assert list(found.table("steps"))[:3] == ["point", "trace.cap", "training.zero_stage"]
    assert found.summary()["training.zero_stage"].isna().all()
    rlsim.sweep(a_sweep(axes), out=out)
    assert len(ran(out)) == 2 + 4
    assert rlsim.read_sweep(out).summary()["training.zero_stage"].notna().sum() == 2


@pytest.mark.usefixtures("in_process")
def test_more_tables_run_the_points_again_and_fewer_keep_what_is_there(target: Path) -> None:
    rlsim.sweep(FOUR, out=target, tables=["spans"])
    assert len(ran(target)) == 8
    again = rlsim.sweep(FOUR, out=target, tables=["calls"])
    assert len(ran(target)) == 8
    assert again.definition["tables"] == ["steps", "calls", "spans", "summary"]


@pytest.mark.usefixtures("in_process")
def test_results_of_another_definition_are_never_mixed_in(target: Path) -> None:
    before = contents(target)
    with pytest.raises(ConfigError, match=r"holds 4 points that this sweep does not have: workflow.steps 1 there, 2 h"):
        rlsim.sweep(a_sweep(workflow={"prompts": 2, "responses": 2, "steps": 2}), out=target)
    with pytest.raises(ConfigError, match=r"holds 3 points that this sweep does not have;"):
        rlsim.sweep(a_sweep(), out=target)
    assert contents(target) == before
    Store(target).fail("p0123456789abcdef", Failed("why it failed"))
    with pytest.raises(ConfigError, match="does not have"):
        rlsim.sweep(a_sweep(), out=target)
    assert Store(target).failure("p0123456789abcdef") == Failed("why it failed"), "a refused sweep removes nothing"
    rlsim.sweep(a_sweep(), out=target, prune=True)
    assert Store(target).failure("p0123456789abcdef") is None
    assert len(ran(target)) == 4 + 2  # the one that stays has fewer axes now
    assert list(rlsim.read_sweep(target).points["trace.cap"]) == [256, 512]


def test_directories_of_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and holds no sweep"):
        rlsim.sweep(a_sweep(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "other").mkdir()
    for text in ('{"method": "grid"}', "[1]"):
        (tmp_path / "other" / "sweep.json").write_text(text)
        with pytest.raises(ConfigError, match="is left as it is; choose another directory"):
            rlsim.sweep(a_sweep(), out=tmp_path / "other")
        assert (tmp_path / "other" / "sweep.json").read_text() == text
    with pytest.raises(ConfigError, match="is a file"):
        rlsim.sweep(a_sweep(), out=tmp_path / "thesis.tex")
    with pytest.raises(ConfigError, match="holds no sweep"):
        rlsim.read_sweep(tmp_path)
    mine = tmp_path / "mine"
    with Store(mine).locked(), pytest.raises(ConfigError, match="another process is running a sweep here"):
        rlsim.sweep(a_sweep(), out=mine)


def flipped(path: Path, share: float = 0.5) -> None:
    """One bit at a share of a file; below 0, in its last page of rows, which zstd's magic number begins."""
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1)) if share >= 0 else data.rindex(b"\x28\xb5\x2f\xfd") + 8] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    (path.parent / ".rlsim-left.parquet").write_bytes(b"PAR1")


def whole_other(target: Path) -> None:
    """All of a point over another's."""
    first, second = (path.name for path in sorted(target.glob("summary/*"))[:2])
    for table in ("steps", "calls", "summary"):
        shutil.copyfile(target / table / second / "part.parquet", target / table / first / "part.parquet")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "damage",
    [
        lambda target: flipped(next(target.glob("steps/*/part.parquet")), -1),  # in the rows
        lambda target: flipped(next(target.glob("steps/*/part.parquet")), 0.6),  # in the record
        lambda target: shutil.copyfile(*sorted(target.glob("steps/*/part.parquet"))[:2]),  # another point's
        lambda target: shutil.rmtree(next(target.glob("calls/*"))),  # killed between the tables
        lambda target: cut(next(target.glob("summary/*/part.parquet"))),
        whole_other,
        lambda target: next(target.glob("steps/*/part.parquet")).unlink(),
        lambda target: flipped(target / "sweep.json", 0.0),
        lambda target: (target / "sweep.json").write_bytes(b""),
        lambda target: (target / "sweep.json").unlink(),
    ],
)
def test_damage_is_told_to_readers_and_mended_by_the_next_run(
    two_workers: Path, target: Path, damage: Callable[[Path], object]
) -> None:
    damage(target)

    def read() -> None:
        found = rlsim.read_sweep(target)
        found.table("calls")
        assert len(found.table("steps")) == len(found.summary()) == 4
        rlsim.compare([target])

    with pytest.raises(ConfigError, match=str(target)):
        read()
    rlsim.sweep(FOUR, out=target)
    read()
    assert contents(target) == contents(two_workers)
    assert len(ran(target)) <= 4 + 2


@pytest.mark.usefixtures("in_process")
def test_what_is_the_users_stays_in_a_sweeps_directory(target: Path) -> None:
    mine = [
        target / name for name in (".tmp/a", ".lock", "steps/point=mine/a", "notes.txt", "mine/point=p1/part.parquet")
    ]
    mine.append(sorted(target.glob("steps/point=p*"))[0] / "notes.txt")
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    rlsim.sweep(a_sweep(), out=target, prune=True)
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)


# ------------------------------------------------------------------------------------------------- points that fail

FAILING = {"grid": {"model": ["llama-3.1-8b", "llama-3-70b"], "workflow.steps": [1, 2]}}  # 70B: not on one GPU


@pytest.mark.usefixtures("in_process")
def test_a_failing_point_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Command
) -> None:
    monkeypatch.setattr("rlsim.experiment.case.remedies", lambda *_: "")  # they take seconds: test_remedies.py
    path, out = tmp_path / "sweep.yaml", tmp_path / "out"
    path.write_text(json.dumps(a_sweep(FAILING, systems=[{"verl": {"tp": 1}}])), encoding="utf-8")
    shown = call("sweep", path, "--out", out)
    assert shown.code == 1
    assert "2 failed" in shown.out
    assert " and 1 more: " in shown.err
    assert "GiB" in shown.err or "GB" in shown.err
    found = rlsim.read_sweep(out)
    assert list(found.points["status"]) == ["done", "done", "failed", "failed"]
    assert len(found.summary()) == 2
    assert set(found.failed) == set(found.points["point"][2:])
    call("sweep", path, "--out", out, "-q")
    assert len(ran(out)) == 6  # the failed ones again
    smaller = {"grid": {"model": ["llama-3.1-8b"], "workflow.steps": [1, 2]}}
    rlsim.sweep(a_sweep(smaller, systems=[{"verl": {"tp": 1}}]), out=out)  # failures are in nobody's way
    assert not list((out / "failed").iterdir())


DEADLY = """\
import os, signal
from pathlib import Path
from pydantic import BaseModel
from rlsim.sim.control import RolloutControl

class Deadly(BaseModel, RolloutControl):
    tp: int = 8
    lives: int = 1

    def initial_tp(self, context):
        found = len(list(Path({folder!r}).glob(f"died-{{self.tp}}-*")))
        if found < self.lives:
            (Path({folder!r}) / f"died-{{self.tp}}-{{found}}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.tp

class Broken(RolloutControl):
    def initial_tp(self, context):
        raise KeyError("a mistake in the policy")
"""


def test_a_worker_that_dies_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(local, "MOST_ATTEMPTS", 2)  # a process takes seconds to start
    (tmp_path / "deadly_policy.py").write_text(DEADLY.format(folder=str(tmp_path)), encoding="utf-8")
    systems = [
        ["deadly_policy:Broken"],
        [{"deadly_policy:Deadly": {"tp": 4, "lives": 1}}],
        [{"deadly_policy:Deadly": {"tp": 2, "lives": 100}}],
    ]
    found = rlsim.sweep(a_sweep({"grid": {"systems": systems}}), out=tmp_path / "out", workers=1)
    assert list(found.points["status"]) == ["failed", "done", "failed"]
    assert len(list(tmp_path.glob("died-4-*"))) == 1
    assert len(list(tmp_path.glob("died-2-*"))) == 2
    broken, killed = (found.failed[found.points["point"][n]] for n in (0, 2))
    assert killed == "its worker process died (out of memory?), 2 times"
    assert "system 'broken': Broken.initial_tp: deadly_policy.py:19: KeyError: 'a mistake in the policy'" in broken
    failure = Store(tmp_path / "out").failure(found.points["point"][0])
    assert failure.details.endswith("initial_tp")


# ------------------------------------------------------------------------------------------ killed and interrupted


def _until(command: list[str], line: str, then: signal.Signals) -> tuple[int, str]:
    """Run until such a line of progress, then send the process group a signal: exit code and the rest of stderr."""
    # A shell's background jobs ignore interrupts, and what they start inherits that.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeds
    ) as process:
        for shown in process.stderr:
            if shown.startswith(line):
                os.killpg(process.pid, then)
                break
        rest = process.stderr.read()  # until the last of the group has gone
    return process.returncode, rest


@pytest.mark.usefixtures("in_process")
def test_interrupted_killed_and_continued_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    path, whole, torn = tmp_path / "sweep.yaml", tmp_path / "whole", tmp_path / "torn"
    axes = {"grid": {"trace.cap": [100, 200, 300, 400], "workflow.prompts": [1, 2]}}
    path.write_text(json.dumps(a_sweep(axes)), encoding="utf-8")
    told = "import rlsim.cli.common as common; common.BETWEEN_LINES_S = 0; import rlsim.cli; rlsim.cli.main()"
    command = [sys.executable, "-c", told, "sweep", str(path), "--workers", "1", "--out", str(torn)]
    code, rest = _until(command, "rlsim: 2 of 8", signal.SIGINT)
    assert code == 130
    assert f"interrupted; what is done is in {torn}, and the same command goes on" in rest
    assert "Traceback" not in rest
    assert list(rlsim.read_sweep(torn).points["status"]).count("done") >= 2
    assert pq.read_table(torn / "points.parquet").num_rows == 8
    code, _ = _until(command, "rlsim: 5 of 8", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert 2 < len(rlsim.read_sweep(torn).table("steps")) < 8
    for out in (whole, torn):
        rlsim.sweep(path, out=out)
    assert contents(torn) == contents(whole)
    assert not list(torn.rglob(".rlsim-*"))
    assert 8 <= len(ran(torn)) <= 8 + 2 * 2  # at most what the worker and the writer had in hand is done twice


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.usefixtures("in_process")
def test_the_command_line(tmp_path: Path, call: Command) -> None:
    path, out = tmp_path / "tiny.yaml", str(tmp_path / "out")
    path.write_text(json.dumps(TINY), encoding="utf-8")
    arguments = ["sweep", path, "--grid", "trace.cap=[128, 0.25K]", "--set", "workflow.prompts=1"]
    for options, expected in {
        "--dry-run": "2 points",
        f"--out {out}": "2 points, 0 failed; results: ",
        f"--out {out}2 --set name=again": " (2 of 2 points)",
        f"--out {out} --quiet": out,
        f"--out {out}[/b] --set name=[i]t[/i]": f"results: {out}[/b]",
        f"--out {out} --json -": '"status": "done"',
        "--dry-run --json -": '"trace.cap": 128',
    }.items():
        shown = call(*arguments, *options.split())
        assert shown.code == 0
        assert expected in shown.out
    assert len(ran(tmp_path / "out")) == 2


# ------------------------------------------------------------------------------------- what a sweep cannot be made of


@pytest.mark.parametrize("read", [load_sweep, rlsim.run])
def test_parameters_of_systems_are_finite(read: Callable[[Any], Any], tmp_path: Path) -> None:
    systems = [{"name": "mine", "use": ["verl", {"mine:Mine": {"limits": [1.0, float("nan")]}}]}]
    experiment = {**TINY, "systems": systems}
    (tmp_path / "mine.yaml").write_text(json.dumps(experiment).replace("NaN", ".nan"))
    for source in (experiment, tmp_path / "mine.yaml"):
        with pytest.raises(ConfigError, match=r"systems: 0.use.1.mine:Mine.limits.1 is nan; param"):
            read(source)


def test_what_is_wrong_is_told_before_the_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for changes, why in (({"tables": ["stepz"]}, "unknown table 'stepz'"), ({"executor": "ray"}, "needs Ray")):
        with pytest.raises(ConfigError, match=why):
            rlsim.sweep(a_sweep(), out=tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()


def test_settings_that_look_alike_stand_apart() -> None:
    assert setting_texts([0.500001, 0.500002], 20) == ["0.500001", "0.500002"]
    assert setting_texts([0.5, None, 2.0, "a" * 50], 20) == ["0.5", "–", "2", "a" * 19 + "…"]
    assert setting_texts(["a" * 50 + "b", "a" * 50 + "c"], 20) == [f'"{"a" * 50}b"', f'"{"a" * 50}c"']


# ------------------------------------------------------------------------------------------------------------- on Ray

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'rlsim[ray]'")


@needs_ray
@pytest.mark.ci
@pytest.mark.usefixtures("in_process")
def test_ray_writes_the_same_bytes_though_a_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly_policy.py").write_text(DEADLY.format(folder=str(tmp_path)), encoding="utf-8")
    lengths = rlsim.base.catalogue.names("traces", ".parquet")["rollpacker-math"].read_bytes()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.parquet").write_bytes(lengths)  # beside the sweep: to be sent along
    systems = [["verl"], [{"deadly_policy:Deadly": {"tp": 4, "lives": 1}}]]
    axes = {"grid": {"systems": systems, "trace.cap": [128, 256]}}
    path, out = tmp_path / "sweep.yaml", tmp_path / "ray"
    path.write_text(json.dumps(a_sweep(axes, trace={"path": "data/mine.parquet", "cap": 512})), encoding="utf-8")
    command = [sys.executable, "-m", "rlsim", "sweep", str(path), "--quiet", "--workers", "2", "--out", str(out)]
    subprocess.run([*command, "--executor", "ray"], check=True, stdout=subprocess.DEVNULL)
    assert len(list(tmp_path.glob("died-4-*"))) == 1  # so it was killed, once
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deadly_policy", raising=False)  # of another test
    rlsim.sweep(path, out=tmp_path / "here")
    assert contents(out) == contents(tmp_path / "here")
    assert len(ran(out)) == 4


@needs_ray
def test_a_cluster_of_ray_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps(a_sweep()), encoding="utf-8")
    command = [sys.executable, "-m", "rlsim", "sweep", str(path), "--executor", "ray", "--address", "127.0.0.1:9"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot connect to Ray at 127.0.0.1:9" in done.stderr
