"""Bad input: one clear message with file and line where there is one, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command, Failing, edited

from rlsim.catalogue import data_dir
from rlsim.output import results_folder

BIG = {
    "cluster: 8xh100": "cluster: 16x8xh100",
    "model: llama-3.1-8b": "model: llama-3-70b",
}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cap: 1K", "cpa: 1K", "base.yaml:5:28: trace.cpa: unknown key; did you mean 'cap'?"),
        ("seeds: 1", "sedes: 1", "base.yaml:7:1: sedes: unknown key; did you mean 'seeds'?"),
        (
            "seeds: 1",
            "engine: {enforce_eager: true}",
            "base.yaml:7:10: engine.enforce_eager: unknown key; here it is graphs: false",
        ),
        ("seeds: 1", "name: again", 'base.yaml:7:1: not valid YAML: found duplicate key "name"'),
        ("seeds: 1", "seeds: [1", "not valid YAML"),
        ("prompts: 2", "prompts: two", "base.yaml:6:12: workflow.prompts: expected a whole number"),
        ("prompts: 2", "prompts: 2.5", "base.yaml:6:12: workflow.prompts: expected a whole number"),
        ("prompts: 2", "prompts: 0", "base.yaml:6:12: workflow.prompts: expected at least 1"),
        ("prompts: 2, ", "", "base.yaml:6:1: workflow.prompts: required, but missing"),
        ("cap: 1K", "cap: 24 GB", "base.yaml:5:28: trace.cap: unknown unit 'GB' in '24 GB'; a length takes one of: K"),
        ("cap: 1K", "cap: 1.5", "trace.cap: expected a whole number of tokens, got 1.5"),
        ("cap: 1K", "cap: .nan", "trace.cap: expected a length that is finite, got nan"),
        ("cap: 1K", "cap: -3", "trace.cap: expected at least 1 (got -3)"),
        ("cap: 1K", "cap: [1]", "trace.cap: expected a length such as '24K', got [1]"),
        ("seeds: 1", "seeds: 0", "base.yaml:7:1: seeds: at least one seed is needed (got 0)"),
        ("seeds: 1", "seeds: [3, 3]", "base.yaml:7:1: seeds: the seeds must differ"),
        ("seeds: 1", "seeds: [-1]", "base.yaml:7:1: seeds: a seed is 0 or more"),
        ("seeds: 1", "seeds: many", "base.yaml:7:1: seeds: expected a whole number"),
        ("seeds: 1", "seeds: [1, many]", "base.yaml:7:12: seeds.1: expected a whole number"),
        ("seeds: 1", "memory_utilization: 2", "base.yaml:7:1: memory_utilization: expected at most"),
        ("seeds: 1", "memory_utilization: .nan", "base.yaml:7:1: memory_utilization: expected a finite"),
        ("seeds: 1", "cases: 3", "base.yaml:7:1: cases: expected a mapping of keys to values (got 3)"),
        ("seeds: 1", "cases: {a: 3}", "case 'a': expected settings such as {trace.cap: 8K}, got 3"),
        ("seeds: 1", "cases: {a: {trace.cpa: 3}}", "base.yaml:7:12: case 'a': trace.cpa: unknown key"),
        ("seeds: 1", "cases: {a: {seeds.x: 3}}", "base.yaml:7:12: case 'a': seeds: expected a whole number or a list"),
        ("seeds: 1", "cases: {a: {trace.path: no}}", "unknown trace 'no'"),
        ("8xh100", "8xh10", "unknown cluster '8xh10'; did you mean '8xh100'"),
        ("8xh100", "{gpu: h10}", "base.yaml: cluster: gpu: unknown GPU 'h10'"),
        ("cluster: 8xh100", "cluster: 3", "base.yaml:2:1: cluster: expected text or a mapping of keys"),
        ("llama-3.1-8b", "llama-3.1-8", "unknown model 'llama-3.1-8'; did you mean 'llama-3.1-8b'"),
        ("llama-3.1-8b", "config.json", "config.json: no such file"),
        ("h100-vllm", "h100-vlm", "unknown calibration 'h100-vlm'; did you mean"),
        ("h100-vllm", "a40-vllm", "base.yaml: calibration: a40-vllm is for GPU 'a40', cluster '8xh100' has 'h100-sxm'"),
        ("lengths.csv", "length.csv", "trace.path: length.csv: no such file"),
        ("lengths.csv", "deepscaler", "unknown trace 'deepscaler'; did you mean 'deepscaler-llama-3.1-8b'"),
        ("  - pat", "  - pta", "base.yaml:10:5: unknown policy 'pta'; did you mean 'pat'"),
        ("  - pat", "  - verl", "base.yaml:10:5: system 'verl': two systems have this name"),
        (
            "  - pat",
            "  - {name: twice, use: [pat, async_reward, async_reward]}",
            "base.yaml:10:5: system 'twice': async_reward is named twice",
        ),
        ("  - pat", "  - [pat]", "systems: expected a policy's name, or one with parameters"),
        ("  - pat", "  - pat: 3", "base.yaml:10:5: system 'pat': expected parameters such as {tp: 2}, got 3"),
        ("  - pat", "  - pat: {tp: 3}", "base.yaml:10:5: system 'pat': tp: unknown key"),
        ("  - pat", "  - pat: {start_tp: x}", "base.yaml:10:5: system 'pat': start_tp: expected a whole number"),
        ("  - pat", "  - pat: {start_tp: 3}", "base.yaml:10:5: system 'pat': tp 3 does not divide the 8 GPUs"),
        ("  - pat", "  - pat: {start_tp: [1, 3]}", "base.yaml:10:5: system 'pat-tp3': tp 3 does not divide"),
        ("  - pat", "  - pat: {start_tp: []}", "base.yaml:10:5: system 'pat': start_tp: the list is empty"),
        ("  - pat", "  - pat: {candidates: [3]}", "base.yaml:10:5: system 'pat': none of the candidates TP 3"),
        ("  - pat", "  - use: [pat]", "base.yaml:10:5: a system with `use` has a `name`"),
        ("  - pat", "  - {name: x, use: [pat, verl]}", "base.yaml:10:5: system 'x': PAT and VeRL all decide the"),
        ("  - pat", "  - nowhere:X", "base.yaml:10:5: policy 'nowhere:X' cannot be loaded: No module named 'nowhere'"),
        ("  - pat", "  - ':X'", "base.yaml:10:5: policy ':X' cannot be loaded"),
        ("  - pat", "  - json:JSONDecoder", "base.yaml:10:5: policy 'json:JSONDecoder': json is a module of Python's"),
        ("  - pat", "baseline: tp8", "unknown baseline system 'tp8'; known: verl"),
        ("{tp: 4}", "{tp: 3}", "base.yaml:9:5: system 'verl': tp 3 does not divide the 8 GPUs of a node"),
        ("model: llama-3.1-8b", "model: meta/Llama-3.1-8B", "no such file; did you mean 'llama-3.1-8b', which the"),
        ("8xh100", "16xh100", "cluster '16xh100': a node of h100 has 8 GPUs; did you mean '2x8xh100'?"),
        ("seeds: 1", "training: {mini_batches: 9}", "9 updates a step need as many responses, got 8"),
        ("seeds: 1", "training: {tp: 3}", "training: tp × pp × cp = 3 does not divide the 8 GPUs"),
        ("seeds: 1", "training: {backend: x}", "base.yaml:7:12: training.backend: expected 'fsdp', 'megatron'"),
        ("llama-3.1-8b", "llama-3-70b", "llama-3-70b: call train (DP 8, TP 1, PP 1, ZeRO 3) does not fit on GPU 0: "),
        ("seeds: 1", "memory_utilization: 0.05", "no TP degree is feasible:\nTP1: "),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trace.cap", "--set trace.cap: expected key.path=value"),
        ("=3", "--set =3: expected key.path=value"),
        ("trace.cpa=3", "as overridden: trace.cpa: unknown key; did you mean 'cap'?"),
        ("trace.cap=3 GB", "as overridden: trace.cap: unknown unit 'GB'"),
        ("trace.cap.x=3", "--set trace.cap.x: there is no 'x'"),
        ("systems.7=pat", "--set systems.7: there is no '7'"),
        ("systems.0.verl.tp=3", "base.yaml:9:5: system 'verl': tp 3 does not divide"),
        ("nonsense=[", "as overridden: nonsense: unknown key"),
        ("name=", "as overridden: name: expected text (got None)"),
        ("trace=3", "as overridden: trace: expected a mapping of keys to values (got 3)"),
    ],
)
def test_a_setting_with_a_mistake(failing: Failing, setting: str, message: str) -> None:
    assert message in failing("--set", setting)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,0,5\n0,1,-3\n", "line 3: response_tokens is negative (got -3)"),
        ("0,0,5\n0,1,0\n", "line 3: response_tokens"),
        ("0,0,5\n0,1,2.5\n", "line 3: response_tokens is not a whole number (got 2.5)"),
        ("0,0,5\n0,1,nan\n", "line 3: response_tokens"),
        ("0,0,5\n0,1,inf\n", "line 3: response_tokens"),
        ("0,0,5\n0,1,many\n", "line 3: response_tokens"),
        ("0,0,5\n0,0,6\n", "line 3: prompt_id 0, sample_id 0, epoch 0 stands already in line 2"),
        ("0,0,5,9,9\n", "not valid CSV"),
        ("", "the trace holds no responses"),
        ("0,0,5\n", "1 responses cannot form one group of 4"),
    ],
)
def test_a_trace_with_a_mistake(failing: Failing, folder: Path, rows: str, message: str) -> None:
    (folder / "lengths.csv").write_text("prompt_id,sample_id,response_tokens\n" + rows)
    text = failing()
    assert "lengths" in text
    assert message in text


def test_damaged_trace_files(failing: Failing, folder: Path) -> None:
    whole = (data_dir("traces") / "rollpacker-math.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    assert "cut.parquet: not a readable Parquet file (truncated or damaged?)" in failing(
        "--set", "trace.path=cut.parquet"
    )
    (folder / "lengths.csv").write_text("")
    assert "lengths.csv: the file is empty" in failing()
    (folder / "lengths.csv").write_text("a,b\n1,2\n")
    assert "lengths.csv: no column 'prompt_id' and 'sample_id'" in failing()


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
    failing: Failing, folder: Path, call: Command
) -> None:
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


def test_the_output_is_never_written_over_other_files(
    failing: Failing, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing runs before the output directory is known to be free")

    monkeypatch.setattr("rlsim.experiment.simulator.Simulator.simulate", refuse)
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").write_text("years of work")
    (folder / "file").write_text("")
    assert failing("--out", "other") == "other exists and holds no rlsim results; choose another directory"
    assert failing("--out", "file") == "file is a file; give a directory"
    assert (folder / "other" / "thesis.tex").read_text() == "years of work"


def test_an_output_that_cannot_be_made(failing: Failing, folder: Path) -> None:
    (folder / "file").write_text("")
    assert failing("--out", "file/deep/out").startswith("file/deep/out: cannot be written: ")


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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run frist.yaml", "frist.yaml: no such file; did you mean 'first.yaml'"),
        (
            "advise run.sh",
            "run.sh: expected a mapping of keys to values; make an experiment of a configuration of veRL",
        ),
        (
            "run other.sh",
            "make an experiment of a run script or log of veRL: rlsim init --from-verl other.sh --gpu GPU",
        ),
        ("run nemo.yaml", "nemo.yaml is no experiment of rlsim; make an experiment of a configuration of NeMo-RL: "),
        ("check nemo.yaml", "rlsim init --from-nemo nemo.yaml --gpu GPU"),
        ("check areal.yaml", "rlsim init --from-areal areal.yaml --gpu GPU"),
        ("advise slime.sh", "rlsim reads no configuration of slime: rlsim init NAME --model MODEL --cluster CLUSTER"),
        ("check run.sh", "rlsim init --from-verl run.sh --gpu GPU"),
    ],
)
def test_a_file_that_is_no_experiment_says_the_way_out(command: str, message: str, folder: Path, call: Command) -> None:
    (folder / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=1\n")
    (folder / "other.sh").write_text("python3 train.py\n")
    (folder / "slime.sh").write_text("python3 train.py --actor-num-nodes 1 --rollout-num-gpus 8\n")
    (folder / "nemo.yaml").write_text("grpo: {num_prompts_per_step: 32}\ncluster: {gpus_per_node: 8}\n")
    (folder / "areal.yaml").write_text("experiment_name: a\nrollout:\n  max_concurrent_rollouts: 256\n")
    (folder / "first.yaml").write_text("name: first\n")
    printed = call(*command.split())
    assert printed.code == 2
    assert message in printed.err
