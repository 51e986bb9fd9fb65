"""Bad input: one clear message with file and line where there is one, exit code 2, no traceback, nothing written."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command, Failing, cases, edited

from rlsim.base.output import results_folder

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


def test_experiment_files_that_are_not_there(folder: Path, call: Command) -> None:
    (folder / "empty.yaml").write_text("")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("nope.yaml", "nope.yaml: no such file"),
        ("pat_vs_statik", "unknown experiment 'pat_vs_statik'; did you mean 'pat_vs_static'"),
        (".", "unknown experiment '.'"),
        ("empty.yaml", "empty.yaml: the file is empty"),
        ("list.yaml", "list.yaml: expected a mapping of keys to values"),
        ("binary.yaml", "binary.yaml: cannot be read"),
    ):
        printed = call("run", name)
        assert printed.code == 2
        assert message in printed.err
    assert not (folder / "results").exists()


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


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", r"..\x", "..", "."])
def test_results_stay_in_their_folder_whatever_the_name(name: str) -> None:
    folder = results_folder(name)
    assert folder.parent == Path("results")
    assert folder.name not in ("", ".", "..")


@pytest.mark.parametrize("arguments", [("--seeds", "0"), ("--seeds", "x"), ("--nonsense",), ("--out",)])
def test_bad_options(folder: Path, call: Command, arguments: tuple[str, ...]) -> None:
    printed = call("run", "base.yaml", *arguments)
    assert printed.code == 2
    assert arguments[0] in printed.err
    assert not (folder / "results").exists()


def test_through_a_process(folder: Path) -> None:
    command = [sys.executable, "-m", "rlsim", "run", "base.yaml", "--set", "trace.cap=24 GB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "rlsim: error: as overridden: trace.cap: unknown unit 'GB' in '24 GB'; a length takes one of: K, k, M, tokens\n"
    )
    assert not (folder / "results").exists()


@cases("errors", "a file that is no experiment says the way out")
def test_a_file_that_is_no_experiment_says_the_way_out(command: str, message: str, folder: Path, call: Command) -> None:
    (folder / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=1\n")
    (folder / "other.sh").write_text("python3 train.py\n")
    (folder / "slime.sh").write_text("python3 train.py --actor-num-nodes 1 --rollout-num-gpus 8\n")
    (folder / "skyrl.sh").write_text(
        "uv run -m skyrl.train.entrypoints.main_base trainer.placement.colocate_all=true\n"
    )
    (folder / "nemo.yaml").write_text("grpo: {num_prompts_per_step: 32}\ncluster: {gpus_per_node: 8}\n")
    (folder / "areal.yaml").write_text("experiment_name: a\nrollout:\n  max_concurrent_rollouts: 256\n")
    (folder / "first.yaml").write_text("name: first\n")
    printed = call(*command.split())
    assert printed.code == 2
    assert message in printed.err
