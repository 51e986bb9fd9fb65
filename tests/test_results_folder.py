"""Results that others write, read or replace at the same time, and arguments of the wrong type."""

import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Command, cases

import rlsim
from rlsim.base.output import results_folder
from rlsim.errors import ConfigError


def test_names_that_differ_have_folders_that_differ() -> None:
    names = ["a/b", "a-b", "a\\b", ".a-b", "a//b"]
    folders = [results_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[1] == Path("results/a-b")


def test_results_are_replaced_by_those_of_the_same_experiment_alone(
    tmp_path: Path, call: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was replaced is said, with the settings that differ."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**TINY, "name": name}))

    def told(*options: str) -> str:
        (line,) = [line for line in call("run", "mine.json", *options).out.splitlines() if line.startswith("results: ")]
        return line

    assert told() == "results: results/mine"
    again = told()
    assert again == "results: results/mine (in place of earlier ones, of the same settings)"
    (tmp_path / "results" / "mine" / "report.html").write_text("")
    changed = told("--seeds", "2")
    assert "(in place of earlier ones and their report, of other settings: " in changed
    assert changed.endswith("seeds [0] there, [0, 1] here)")
    refused = call("run", "other.json", "--out", "results/mine")
    assert refused.code == 2
    assert "results/mine holds the results of another experiment, mine, and this one is other" in refused.err
    assert rlsim.read_result("results/mine").manifest["experiment"]["name"] == "mine"


def test_results_can_be_read_while_they_are_replaced(tmp_path: Path) -> None:
    result, folder = rlsim.run(TINY), tmp_path / "run"
    result.write(folder)
    over, problems = threading.Event(), list[Exception]()

    def write() -> None:
        try:
            for _ in range(12):
                result.write(folder)
        finally:
            over.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not over.is_set():
        try:
            rlsim.read_result(folder)
            reads += 1
        except ConfigError as error:
            problems.append(error)
    writer.join()
    assert (problems, reads > 3) == ([], True)


def swept(out: Path) -> dict[str, str]:
    """In a worker of a pool, which may start no processes."""
    return rlsim.sweep(TINY, axes={"trace.cap": ["64"]}, out=out, workers=2).failed


def test_a_worker_of_a_pool_sweeps_by_itself(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(swept, (tmp_path / "sweep",)) == {}


@cases("results_folder", "arguments of another type are told")
def test_arguments_of_another_type_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rlsim.run(**{"source": TINY, **given})
    assert str(raised.value).startswith(message)
