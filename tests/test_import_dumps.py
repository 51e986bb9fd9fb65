"""Rollout dumps of RL frameworks: each read from a sample in exactly its project's field names."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import cases
from dump_samples import (
    areal,
    areal_row,
    jsonl,
    nemo_row,
    noted,
    pt_file,
    roll_step,
    slime,
    slime_sample,
    tokenizer,
    trl,
    verl,
    verl_row,
    words,
)

from rlsim.errors import TraceError
from rlsim.trace import Trace
from rlsim.trace.importers import import_trace
from rlsim.trace.importers.dumps import epochs


def column(trace: Trace, name: str) -> list[Any]:
    return trace.frame[name].tolist()


# veRL -----------------------------------------------------------------------------------------------------------------


def test_verl_folder_in_order_of_its_steps(tmp_path: Path) -> None:
    trace = import_trace(verl(tmp_path / "rollouts"), tokenizer=tokenizer(tmp_path / "model"))
    assert column(trace, "response_tokens") == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]
    assert column(trace, "prompt_tokens") == [5] * 12  # user, prompt, a number, a number, assistant
    assert column(trace, "epoch") == [0] * 8 + [1] * 4  # the third step's prompts have been seen
    assert trace.frame["prompt_id"].nunique() == 4
    assert column(trace, "sample_id") == [0, 1] * 6
    assert column(trace, "reward") == [0.0, 1.0] * 6
    assert column(trace, "correct") == [False, True] * 6
    assert trace.meta.name == "rollouts"
    noted(trace, "veRL's dump of generations", "model/tokenizer.json", "one token (its end) shorter", "3 steps in 2 ep")
    folder = import_trace(tmp_path / "rollouts", tokenizer=tmp_path / "model")
    pd.testing.assert_frame_equal(folder.frame, trace.frame)
    for step in (10, 9, 2):
        jsonl(tmp_path / "d" / f"{step}.jsonl", [verl_row(step, f"p{step}", step, 0.0)])
    trace = import_trace(tmp_path / "d", tokenizer=tokenizer(tmp_path))
    assert column(trace, "response_tokens") == [2, 9, 10]
    some = import_trace(tmp_path / "d" / "*0.jsonl", tokenizer=tokenizer(tmp_path))
    assert column(some, "response_tokens") == [10]


def test_verl_without_a_tokenizer_guesses_nothing(tmp_path: Path) -> None:
    folder = verl(tmp_path / "rollouts", 1)
    with pytest.raises(TraceError, match=r"texts and no token counts.*--tokenizer PATH.*--column.*metric log") as error:
        import_trace(folder)
    assert "nothing is downloaded" in str(error.value)
    rows = [verl_row(1, "p", 3, 0.0, n_tokens=400 + s) for s in range(2)]
    trace = import_trace(jsonl(tmp_path / "1.jsonl", rows), columns={"response_tokens": "n_tokens"})
    assert column(trace, "response_tokens") == [400, 401]
    assert trace.frame["prompt_id"].nunique() == 1
    assert "prompt_tokens" not in trace.frame


def test_verl_rows_that_are_cut_empty_or_odd(tmp_path: Path) -> None:
    rows = [verl_row(1, "p", n, 0.5, acc=0.5) for n in (7, 8, 9, 0)]
    trace = import_trace(jsonl(tmp_path / "1.jsonl", rows), tokenizer=tokenizer(tmp_path), cap_tokens=8)
    assert column(trace, "response_tokens") == [7, 8, 8, 1]
    assert trace.capped.tolist() == [False, True, True, False]
    assert "correct" not in trace.frame
    noted(
        trace,
        "1 responses are empty texts: they ended at once",
        "1 responses are longer than the cap of 8",
        "correctness is not 0 or 1",
    )
    rows = [verl_row(1, "look", 4 + s, 0.0, uid=f"{u}_{s}_0") for u in ("a-b", "c-d") for s in range(2)]
    trace = import_trace(jsonl(tmp_path / "1.jsonl", rows), tokenizer=tokenizer(tmp_path))
    assert trace.frame["prompt_id"].nunique() == 2
    assert column(trace, "sample_id") == [0, 1, 0, 1]
    (tmp_path / "1.jsonl").write_text(json.dumps(verl_row(1, "p", 0, 0.0) | {"output": "one \ud83d two"}) + "\n")
    assert column(import_trace(tmp_path / "1.jsonl", tokenizer=tokenizer(tmp_path)), "response_tokens") == [3]


def test_verl_gzip_and_columns(tmp_path: Path) -> None:
    rows = [verl_row(1, "p", 3, -1.0, data_source="gsm8k", judged=2.5)]
    with gzip.open(tmp_path / "1.jsonl.gz", "wt") as file:
        file.write(json.dumps(rows[0]) + "\n")
    columns = {"task": "data_source", "reward": "judged"}
    trace = import_trace(tmp_path / "1.jsonl.gz", tokenizer=tokenizer(tmp_path), columns=columns)
    assert (column(trace, "task"), column(trace, "reward")) == (["gsm8k"], [2.5])
    with pytest.raises(TraceError, match=r"line 1: no 'data_sorce'.*did you mean 'data_source'"):
        import_trace(tmp_path / "1.jsonl.gz", tokenizer=tokenizer(tmp_path), columns={"task": "data_sorce"})


def test_a_large_dump_is_never_in_memory_at_once(tmp_path: Path) -> None:
    text, count = words(8_000), 60
    with (tmp_path / "1.jsonl").open("w") as file:
        for i in range(count):
            row = verl_row(1, f"p{i // 4}", 1, 0.0, n_tokens=8_000) | {"output": text}
            file.write(json.dumps(row) + "\n")
    size = (tmp_path / "1.jsonl").stat().st_size
    tracemalloc.start()
    import_trace(tmp_path / "1.jsonl", columns={"response_tokens": "n_tokens"})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 4


@cases("import_near_misses", "tokenizers that are none")
def test_tokenizers_that_are_none(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TraceError, match=message):
        import_trace(verl(tmp_path / "d", 1), tokenizer=tmp_path / path)


# AReaL ----------------------------------------------------------------------------------------------------------------


def test_an_areal_trial(tmp_path: Path) -> None:
    trace = import_trace(areal(tmp_path / "trial"))
    assert column(trace, "response_tokens") == [700, 701, 800, 801, 1100, 1101]
    assert column(trace, "prompt_tokens") == [20] * 6
    assert column(trace, "sample_id") == [0, 1] * 3
    noted(trace, "6 responses are of tasks that more than one version", "3 files under trial/rollout")


def test_areal_turns_have_prompts_of_their_own(tmp_path: Path) -> None:
    rows = [areal_row(1, i, "first" if i < 2 else f"first answer {i} tool", 10 + 50 * (i > 1), 5) for i in range(4)]
    trace = import_trace(jsonl(tmp_path / "1.jsonl", rows))
    assert trace.frame.groupby("prompt_id").size().tolist().count(2) == 1
    assert trace.frame["prompt_id"].nunique() == 3


# NeMo-RL --------------------------------------------------------------------------------------------------------------


def test_nemo_rl_folder(tmp_path: Path) -> None:
    first = [nemo_row(i, [3, 4, 5 + i // 2], [1] * (6 + i), float(i % 2)) for i in range(4)]
    tools = [nemo_row(0, [3, 4, 9], [1, 1, 0, 0, 0, 1, 1, 1], 0.5)]
    jsonl(tmp_path / "exp" / "train_data_step2.jsonl", first)
    jsonl(tmp_path / "exp" / "train_data_step10.jsonl", tools)
    jsonl(tmp_path / "exp" / "val_data_step10.jsonl", [{"content": [[]], "rewards": [1.0], "idx": 0}])
    trace = import_trace(tmp_path / "exp")
    assert column(trace, "response_tokens") == [6, 7, 8, 9, 8]  # of the last with what tools wrote, as its turns say
    assert [turn[:2] for turn in trace.frame["turns"].iloc[4]] == [(2, 3), (3, 0)]
    assert column(trace, "prompt_tokens") == [3] * 5
    assert column(trace, "sample_id") == [0, 1, 0, 1, 0]
    assert column(trace, "reward") == [0.0, 1.0, 0.0, 1.0, 0.5]
    noted(
        trace, "1 trajectories have several turns", "1 files of validation samples are left out", "2 steps, one epoch"
    )
    rows = []
    for index in range(2):
        row = nemo_row(index, [1, 2, 3, 4], [1] * (5 + index), 1.0)
        kept = ("content", "rewards", "generation_logprobs", "prev_logprobs", "input_lengths", "idx")
        rows.append({key: row[key] for key in kept})
    trace = import_trace(jsonl(tmp_path / "train_data_step1.jsonl", rows))
    assert column(trace, "response_tokens") == [5, 6]
    assert column(trace, "prompt_tokens") == [4, 4]
    noted(trace, "2 responses without token_loss_mask")


# slime ----------------------------------------------------------------------------------------------------------------


def test_slime_folder(tmp_path: Path) -> None:
    samples = [slime_sample(i, f"q{i // 2}", 10, 100 + i) for i in range(4)]
    samples[3] |= {"status": "truncated", "reward": {"score": -1.0, "acc": False, "pred": "x"}}
    samples[2] |= {"loss_mask": [1] * 60 + [0] * 30 + [1] * 12, "weight_versions": ["3", "4"]}
    samples[1] |= {"loss_mask": [1, 0] * 50 + [1], "non_generation_time": 4.0}
    slime(tmp_path / "rollout_7.pt", 7, samples)
    more = [slime_sample(4, "q0", 10, 50), slime_sample(5, "q0", 10, 0, status="aborted")]
    slime(tmp_path / "rollout_12.pt", 12, more)
    slime(tmp_path / "rollout_eval_12.pt", 12, [slime_sample(0, "held out", 4, 4)])
    trace = import_trace(tmp_path)
    assert column(trace, "response_tokens") == [100, 101, 102, 103, 50]
    assert [turn[:2] for turn in trace.frame["turns"].iloc[2]] == [(60, 30), (12, 0)]
    assert {turn[2] for turn in trace.frame["turns"].iloc[1]} == {4.0 / 50}
    assert column(trace, "prompt_tokens") == [10] * 5
    assert column(trace, "epoch") == [0, 0, 0, 0, 1]
    assert trace.capped.tolist() == [False, False, False, True, False]
    assert column(trace, "finish_reason") == ["stop", "stop", "stop", "length", "stop"]
    assert column(trace, "reward") == [1.0, 1.0, 1.0, -1.0, 1.0]
    assert trace.frame["correct"].dropna().tolist() == [False]
    assert trace.meta.cap_tokens == 103
    noted(trace, "1 samples that are aborted", "1 trajectories have several turns", "more than one version",
          "1 files of validation samples", "1 trajectories' seconds")  # fmt: skip
    import pickle

    with pytest.raises(TraceError, match=r"not a rollout of slime, a dictionary with rollout_id and samples .*model"):
        import_trace(pt_file(tmp_path / "m.pt", pickle.dumps({"model": {}, "epoch": 1}, protocol=2)))


def test_slime_as_torch_saves_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import numpy as np

    samples = [slime_sample(i, "q", 10, 20 + i) for i in range(2)]
    samples[0] |= {"tokens": torch.arange(30), "reward": np.float64(0.25), "rollout_log_probs": torch.zeros(20)}
    samples[1] |= {
        "rollout_routed_experts": np.zeros((31, 2, 2)),
        "metadata": {"flag": np.bool_(True), "n": np.int32(4)},
    }
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    trace = import_trace(tmp_path / "3.pt")
    assert column(trace, "response_tokens") == [20, 21]
    assert column(trace, "prompt_tokens") == [10, 10]
    assert column(trace, "reward") == [0.25, 1.0]


# TRL ------------------------------------------------------------------------------------------------------------------


def test_trl_folder_and_table(tmp_path: Path) -> None:
    folder = tmp_path / "completions"
    trl(folder, 1, [("one two", 5), ("one two", 6), ("three", 7), ("three", 8)])
    trl(folder, 2, [("one two", 5), ("one two", 6), ("three", 7), ("three", 8)])  # the same batch serves two steps
    trl(folder, 3, [("four", 9), ("four", 10)])
    trace = import_trace(folder, tokenizer=tokenizer(tmp_path))
    assert column(trace, "response_tokens") == [5, 6, 7, 8, 9, 10]
    assert column(trace, "prompt_tokens") == [2, 2, 1, 1, 1, 1]
    assert column(trace, "reward") == [1.0] * 6
    assert column(trace, "epoch") == [0] * 6
    noted(trace, "4 responses are left out that were logged again", "2 steps, one epoch")
    frame = pd.read_parquet(trl(tmp_path / "c", 4, [("one\ntwo", 5), ("three", 6)], reward=[0.5, 1.0]))
    frame.assign(step=frame["step"].astype(str)).to_parquet(tmp_path / "old.parquet")
    frame.to_csv(tmp_path / "table.csv", index=False)
    for name in ("old.parquet", "table.csv"):
        trace = import_trace(tmp_path / name, tokenizer=tokenizer(tmp_path))
        assert (column(trace, "response_tokens"), column(trace, "reward")) == ([5, 6], [0.5, 1.0])


def test_trl_of_several_rewards_takes_the_one_asked_for(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"accuracy_reward": [1.0, None], "format_reward": [0.5, 0.5], "extra": ["a", "b"]}
    path = trl(tmp_path / "c", 1, [("one", 5), ("one", 6)], **columns)
    trace = import_trace(path, tokenizer=tokenizer(tmp_path))
    assert "reward" not in trace.frame
    noted(trace, "several columns may be rewards", "accuracy_reward, format_reward", "--column reward=NAME")
    trace = import_trace(path, tokenizer=tokenizer(tmp_path), columns={"reward": "format_reward"})
    assert column(trace, "reward") == [0.5, 0.5]


# ROLL -----------------------------------------------------------------------------------------------------------------


def test_roll_folder_and_logging_board(tmp_path: Path) -> None:
    for step, first in ((2, 3), (10, 5)):
        row = roll_step(step, [f"one two {step}"] * 2 + ["four"] * 2, [first, first + 1, first + 2, 8])
        jsonl(tmp_path / "dump" / f"rollout_dump_data.step_{step}.jsonl", [row])
    trace = import_trace(tmp_path / "dump", tokenizer=tokenizer(tmp_path), cap_tokens=8)
    assert column(trace, "response_tokens") == [3, 4, 5, 8, 5, 6, 7, 8]
    assert column(trace, "prompt_tokens") == [3, 3, 1, 1, 3, 3, 1, 1]
    assert column(trace, "sample_id") == [0, 1, 0, 1, 0, 1, 2, 3]
    assert column(trace, "task") == ["math_rule"] * 8
    assert column(trace, "reward") == [1.0, 0.0] * 4
    assert trace.capped.sum() == 2
    noted(trace, "8 responses were sampled under max_new_tokens 8", "without what a chat template adds")

    def line(length: int) -> dict[str, Any]:
        pad = ["<|endoftext|>"] * 5
        return {
            "log_probs2": [-0.1] * length, "logprobs": [-0.1] * length,
            "new_response_mask": [True] * length + [False] * 5,
            "prompt": "<|endoftext|>one two", "response": words(length), "old_log_probs2_entropy": [0.2] * length,
            "ref_logprobs": [-0.1] * length, "values": [0.0] * length, "token_rewards": [0.0] * length, "reward": 0.5,
            "step": 4, "response_tokens": ["one"] * length + pad,
        }  # fmt: skip

    trace = import_trace(jsonl(tmp_path / "data_20260101_120000_007.jsonl", [line(7), line(9)]))
    assert column(trace, "response_tokens") == [7, 9]
    assert column(trace, "reward") == [0.5, 0.5]
    assert trace.frame["prompt_id"].nunique() == 1
    assert "prompt_tokens" not in trace.frame


# Steps and epochs -----------------------------------------------------------------------------------------------------


def test_single_prompts_that_come_twice_begin_no_epoch() -> None:
    import numpy as np

    step = [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    prompt = np.array([0, 1, 2, 3, 0, 4, 5, 6, 3, 2, 1, 0, 4, 5, 6, 9])
    assert epochs(step, prompt).tolist() == [0] * 8 + [1] * 8
    assert epochs([], np.array([], np.int64)).tolist() == []
