"""Bad input: one clear message with file and line where there is one, exit code 2, no traceback, nothing written."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Command, Failing, cases, edited, tables

import rlsim
from rlsim import errors

BIG = {"cluster: 8xh100": "cluster: 16x8xh100", "model: llama-3.1-8b": "model: llama-3-70b"}


@cases("errors", "an experiment with a mistake")
def test_an_experiment_with_a_mistake(failing: Failing, old: str, new: str, message: str) -> None:
    assert message in failing(base=edited((old, new)))


def test_wrong_units_name_those_that_fit(failing: Failing) -> None:
    link = "{name: nvlink, bytes_per_s: 3 ms, latency_s: 1 us}"
    cluster = f"{{gpu: h100-sxm, nodes: 1, gpus_per_node: 8, intra: {link}, host: {link}}}"
    message = failing(base=edited(("8xh100", cluster)))
    assert "cluster: intra.bytes_per_s: unknown unit 'ms' in '3 ms'; a bandwidth takes one of: B/s" in message
    message = failing(base=edited(("seeds: 1", "seeds: 1\nengine: {max_num_batched_tokens: 3 s}")))
    assert message.startswith("base.yaml:8:10: engine.max_num_batched_tokens: unknown unit 's'")


def test_all_mistakes_are_told_at_once(failing: Failing) -> None:
    lines = failing(base=edited(("cap: 1K", "cap: 3 GB"), ("steps: 1", "step: 1"))).splitlines()
    assert [line.rpartition("base.yaml:")[2][:5] for line in lines] == ["5:28:", "6:1: ", "6:38:"]


@cases("errors", "a setting with a mistake")
def test_a_setting_with_a_mistake(failing: Failing, setting: str, message: str) -> None:
    assert message in failing("--set", setting)


@cases("errors", "a trace with a mistake")
def test_a_trace_with_a_mistake(failing: Failing, folder: Path, rows: str, message: str) -> None:
    (folder / "lengths.csv").write_text("prompt_id,sample_id,response_tokens\n" + rows)
    text = failing()
    assert "lengths" in text
    assert message in text


@pytest.mark.parametrize(
    ("files", "command", "message"),
    [pytest.param(of["files"], *row, id=row[0]) for of in tables("errors")["commands"] for row in of["refused"]],
)
def test_a_command_that_is_refused(failing: Failing, files: dict[str, str], command: str, message: str) -> None:
    if " ran" in command:
        rlsim.run(TINY, out=failing.folder / "ran")
    for path, text in ((failing.folder / name, text) for name, text in files.items()):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert message in failing.told(*shlex.split(command))


def test_a_system_too_big_is_an_error_but_one_of_several_is_left_out(
    failing: Failing, folder: Path, call: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsim.experiment.case.remedies", lambda *_: "")  # they take seconds: test_remedies.py
    big = edited(*BIG.items())
    message = failing(base=big.replace("{tp: 4}", "{tp: 1}"))
    assert message.startswith("base.yaml:9:5: system 'verl': llama-3-70b rollout at TP 1 does not fit: weights 141")
    assert "no system could run" in failing(base=big.replace("{tp: 4}", "{tp: [1]}").replace("  - pat\n", ""))

    (folder / "base.yaml").write_text(
        big.replace("{tp: 4}", "{tp: [1, 8]}").replace("  - pat\n", "baseline: verl-tp1\n")
    )
    code, printed, _ = call("run", "base.yaml", "--out", "out")
    assert code == 0
    assert "note: verl-tp1 left out: llama-3-70b rollout at TP 1 does not fit: weights 141" in printed
    assert "note: no speedups: the baseline verl-tp1 was left out" in printed
    assert "verl-tp8" in printed


def test_through_a_process(folder: Path) -> None:
    command = [sys.executable, "-m", "rlsim", "run", "base.yaml", "--set", "trace.cap=24 GB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "rlsim: error: as overridden: trace.cap: unknown unit 'GB' in '24 GB'; a length takes one of: K, k, M, tokens\n"
    )
    assert not (folder / "results").exists()


# Parts that do not go together: each is refused with the reason, by an error of its kind ------------------------------

ROWS = [
    pytest.param(tables("bases").get(str(topic["experiment"]), topic["experiment"]), *row, id=f"{name}: {row[2]}")
    for name, topic in tables("refusals").items()
    for row in topic.get("refused", ())
]


@pytest.mark.parametrize(("experiment", "use", "changes", "told", "kind"), ROWS)
def test_what_does_not_go_together_is_refused(
    experiment: dict[str, Any], use: list[Any] | None, changes: dict[str, Any], told: str, kind: str
) -> None:
    systems = experiment.get("systems") if use is None else [{"name": "wrong", "use": use}]
    whole = {key: value for key, value in changes.items() if "." not in key}
    parts = {key: value for key, value in changes.items() if "." in key}
    with pytest.raises(getattr(errors, kind), match=told):
        rlsim.run({**experiment, "systems": systems, **whole}, overrides=parts)
