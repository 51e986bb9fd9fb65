"""Rollout dumps and traces as the projects write them: the same keys in the same order, by the same calls where plain.

Sources and versions stand in data/layouts.yaml.
"""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
from conftest import tables

WORDS = ["one", "two", "three", "four"]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def noted(trace: Any, *words: str) -> None:
    text = "\n".join(trace.meta.notes)
    for word in words:
        assert word in text, text


def words(count: int) -> str:
    return " ".join(WORDS[i % len(WORDS)] for i in range(count))


def tokenizer(folder: Path) -> Path:
    """A tokenizer.json that takes every word as a token, as the tokenizers package writes it."""
    spec = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, **{w: i + 1 for i, w in enumerate(WORDS)}},
                  "unk_token": "[UNK]"},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder / "tokenizer.json"


def verl_row(step: int, prompt: str, length: int, score: float, **extra: Any) -> dict[str, Any]:
    return {"input": f"user\n{prompt}\nassistant\n", "output": words(length), "gts": "72", "score": score, "step": step,
            **extra}  # fmt: skip


def verl(folder: Path, steps: int = 3) -> Path:
    """Two prompts × two responses a step; the third step has the first one's prompts again."""
    for step in range(1, steps + 1):
        rows = [
            verl_row(step, f"prompt {(step - 1) % 2} {p}", 10 * step + 2 * p + s, float(s), acc=bool(s), pred="72")
            for p in range(2)
            for s in range(2)
        ]
        jsonl(folder / f"{step}.jsonl", rows)
    return folder


def areal_row(task: int, sample: int, prompt: str, prompt_len: int, length: int, **other: Any) -> dict[str, Any]:
    return {"task_id": task, "sample_idx": sample, "seqlen": prompt_len + length, "prompt_len": prompt_len,
            "head_version": 0, "tail_version": 1, "reward": 1.0, "prompt": prompt, "completion": words(3),
            **other}  # fmt: skip


def areal(trial: Path) -> Path:
    """A trial's folder: three tasks of two samples."""
    for task, version in ((7, 1), (8, 1), (11, 2)):
        rows = [areal_row(task, s, f"<|user|>q{task}", 20, 100 * task + s, tail_version=version) for s in range(2)]
        jsonl(trial / "rollout" / str(version) / f"{task}.jsonl", rows)
    jsonl(trial / "eval-rollout" / "1" / "3.jsonl", [areal_row(3, 0, "eval", 5, 5)])
    return trial


def nemo_row(index: int, prompt: list[int], mask: list[int], reward: float, **other: Any) -> dict[str, Any]:
    """One line: every value is a list of one, padded to the longest of the batch (here by three)."""
    total = len(prompt) + len(mask)
    loss = [0] * len(prompt) + mask + [0] * 3
    logprobs = [-0.5 * m for m in loss]
    row: dict[str, Any] = {
        "content": [["What is 2+2?", words(4)]], "rewards": [reward], "input_lengths": [total],
        "token_ids": [prompt + [9] * len(mask) + [0] * 3], "token_loss_mask": [loss], "sample_loss_mask": [1.0],
        "advantages": [[0.1] * len(loss)], "generation_logprobs": [logprobs], "prev_logprobs": [logprobs],
    }  # fmt: skip
    return row | other | {"idx": index}


def slime_sample(index: int, prompt: str, prompt_len: int, length: int, **other: Any) -> dict[str, Any]:
    return {
        "group_index": index // 2, "index": index, "rollout_id": None, "prompt": prompt,
        "tokens": [5] * (prompt_len + length), "multimodal_inputs": None, "multimodal_train_inputs": None,
        "response": words(4), "response_length": length, "label": "72", "reward": 1.0, "loss_mask": None,
        "weight_versions": ["3"], "rollout_log_probs": [-0.1] * length, "remove_sample": False,
        "teacher_log_probs": None, "status": "completed", "metadata": {"source": "dapo"}, "train_metadata": None,
        "session_id": None, "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0,
                      "completion_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0}, **other,
    }  # fmt: skip


def pt_file(path: Path, pickled: bytes) -> Path:
    """The archive that `torch.save` writes, for tests without torch."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"{path.stem}/{name}", data)
    return path


def slime(path: Path, rollout_id: int, samples: list[Any]) -> Path:
    return pt_file(path, pickle.dumps({"rollout_id": rollout_id, "samples": samples}, protocol=2))


def trl(folder: Path, step: int, completions: list[tuple[str, int]], **columns: list[Any]) -> Path:
    count = len(completions)
    table = {
        "step": [step] * count, "prompt": [p for p, _ in completions], "completion": [words(n) for _, n in completions],
        **(columns or {"accuracy_reward": [1.0] * count}), "advantage": [0.0] * count,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    pd.DataFrame(table).to_parquet(path)
    return path


def roll_step(step: int, prompts: list[str], lengths: list[int], **other: Any) -> dict[str, Any]:
    """One line for a whole step, in no particular order of columns."""
    count = len(prompts)
    settings = {"generation_config": {"max_new_tokens": 8, "num_return_sequences": 1}, "global_step": step}
    return {
        "id": [str(i // 2) for i in range(count)], "source": ["deepmath"] * count, "difficulty": ["6"] * count,
        "prompt": prompts, "messages": [json.dumps([{"role": "user", "content": p}]) for p in prompts],
        "ground_truth": ["72"] * count, "tag": ["deepmath_103k"] * count, "domain": ["math_rule"] * count,
        "responses": [words(n) for n in lengths], "scores": [1.0, 0.0] * (count // 2),
        "sampling_params": [json.dumps(settings)] * count, "global_step": [step] * count, **other,
    }  # fmt: skip


def servegen(folder: Path, client: int, output: dict[int, float], rates: list[float]) -> Path:
    """A client with two windows of two rates each; the second window has no requests."""
    folder.mkdir(exist_ok=True)
    data = {
        "0": {"input_tokens": str({50: 0.5, 70: 0.5}), "output_tokens": str(output), "reason_ratio": str({0.0: 1.0})},
        "1200": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
    }
    path = folder / f"chunk-{client}-dataset.json"
    path.write_text(json.dumps(data, indent=2))
    lines = [f"{600 * i},{rate},0.9,Gamma,1.2,3.4" if rate else f"{600 * i},0,0,,0,0" for i, rate in enumerate(rates)]
    (folder / f"chunk-{client}-trace.csv").write_text("\n".join(lines) + "\n")
    return path


#: Published serving traces and distributions, by layout and year or version.
TABLES = tables("bases")["serving traces"]
MOONCAKE = [
    {"timestamp": 3000 * i, "input_length": 100 + i, "output_length": 50 + i, "hash_ids": [i]} for i in range(4)
]


def layouts(folder: Path) -> dict[str, Path]:
    """A file or folder of every layout that is imported, each in a folder of its own."""
    made = {"verl": verl(folder / "verl"), "areal": areal(folder / "areal")}
    nemo = [nemo_row(i, [7, 8, 9], [1, 1, 0, 1, 1], 0.5) for i in range(4)]
    made["nemo-rl"] = jsonl(folder / "nemo" / "train_data_step3.jsonl", nemo)
    (folder / "slime").mkdir()
    answers = [slime_sample(i, f"q{i // 2}", 5, 6 + i) for i in range(4)]
    answers[1] |= {"loss_mask": [1, 1, 0, 0, 1, 1, 1], "reward": {"score": 0.5, "acc": True}}
    made["slime"] = slime(folder / "slime" / "0.pt", 0, answers)
    made["trl"] = trl(folder / "trl", 5, [("a", 3), ("a", 4), ("b", 5), ("b", 6)])
    step = roll_step(1, ["a", "a", "b", "b"], [3, 4, 5, 6])
    made["roll"] = jsonl(folder / "roll" / "rollout_dump_data.step_1.jsonl", [step])
    board = {"prompt": "p", "response": "r r", "response_tokens": ["r", "r", "", ""], "new_response_mask": [1, 1, 0, 0],
             "logprobs": [-0.1] * 4, "reward": 1.0, "step": 1}  # fmt: skip
    made["roll board"] = jsonl(folder / "board" / "data_1.jsonl", [board, board])
    client = servegen(folder / "servegen", 0, {10: 0.5, 200: 0.25, 900: 0.25}, [0.5, 0.0, 2.0, 0.1])
    made["servegen"] = client.parent
    made["mooncake"] = jsonl(folder / "mooncake" / "trace.jsonl", MOONCAKE)
    for name, text in TABLES.items():
        made[name] = folder / name / "table.csv"
        made[name].parent.mkdir()
        made[name].write_text(text)
    return made
