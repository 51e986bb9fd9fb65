"""Serving traces, tables and distributions of other programs in their own layouts, and what is nearly one of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import cases
from dump_samples import TABLES, jsonl, layouts, servegen

from rlsim.errors import TraceError
from rlsim.trace import read_trace
from rlsim.trace.importers import import_trace


def saved(folder: Path, text: str, name: str = "t.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


@cases("import_near_misses", "tables that are read")
def test_tables(tmp_path: Path, layout: str, prompts: list[int], responses: list[int], arrivals: list[float]) -> None:
    trace = import_trace(layouts(tmp_path)[layout])
    assert trace.frame["prompt_tokens"].tolist() == prompts
    assert trace.response_tokens.tolist() == responses
    assert trace.frame["arrival_s"].tolist() == pytest.approx(arrivals, abs=1e-9)
    assert trace.frame["prompt_id"].tolist() == list(range(len(prompts)))
    notes = "\n".join(trace.meta.notes)
    assert "prompt of its own" in notes
    assert layout.partition(" ")[0] in notes.lower()
    left_out = layout in TABLES and len(responses) < TABLES[layout].count("\n") - 1
    assert ("1 requests without a response (failed) are left out" in notes) == left_out


def test_tasks_of_burstgpt(tmp_path: Path) -> None:
    trace = import_trace(saved(tmp_path, TABLES["burstgpt"]))
    assert trace.frame["task"].tolist() == ["ChatGPT Conversation log", "GPT-4 API log"]


@cases("import_near_misses", "tables")
def test_near_misses(tmp_path: Path, layout: str, old: str, new: str, message: str) -> None:
    assert old in TABLES[layout]
    text = TABLES[layout].replace(old, new)
    with pytest.raises(TraceError, match=message):
        import_trace(saved(tmp_path, text))


@cases("import_near_misses", "columns")
def test_near_misses_of_columns(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], layout: str | None, message: str
) -> None:
    path = jsonl(tmp_path / "t.jsonl", [row])
    with pytest.raises(TraceError, match=message):
        import_trace(path, columns=columns, format=layout)


def test_what_reading_lacks_importing_makes(tmp_path: Path) -> None:
    pd.DataFrame({"prompt_id": [1, 1], "response_tokens": [3, 4]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"no column 'sample_id'.*`rlsim trace import IN OUT` numbers samples"):
        read_trace(tmp_path / "t.parquet")


def test_renamed_columns_and_numbered_samples(tmp_path: Path) -> None:
    frame = pd.DataFrame({"uid": ["x", "x", "y"], "output_len": [5, 6, 7], "length_of_prompt": [1, 1, 2]})
    frame.to_parquet(tmp_path / "r.parquet")
    columns = {"prompt_id": "uid", "response_tokens": "output_len", "prompt_tokens": "length_of_prompt"}
    trace = import_trace(tmp_path / "r.parquet", columns=columns, cap_tokens=7, name="n", source="s")
    assert trace.frame["sample_id"].tolist() == [0, 1, 0]
    assert trace.capped.tolist() == [False, False, True]
    assert (trace.meta.name, trace.meta.source, trace.meta.cap_tokens) == ("n", "s", 7)


def test_lists_of_tokens_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 2, 3], "completion_ids": [5] * n, "reward": 1.0} for n in (4, 6)]
    path = jsonl(tmp_path / "prime.jsonl", rows)
    with pytest.raises(TraceError, match="--column response_tokens=completion_ids --column prompt_tokens=prompt_ids"):
        import_trace(path)
    columns = {"response_tokens": "completion_ids", "prompt_id": "prompt_ids"}
    frame = import_trace(path, columns=columns).frame
    assert frame["response_tokens"].tolist() == [4, 6]
    assert frame["prompt_id"].nunique() == 1


def test_many_rows_without_prompts(tmp_path: Path) -> None:
    count = 20_000
    frame = pd.DataFrame({"TIMESTAMP": pd.date_range("2024-05-10", periods=count, freq="s").astype(str),
                          "ContextTokens": 5, "GeneratedTokens": np.arange(count) % 90 + 1})  # fmt: skip
    frame.to_csv(tmp_path / "a.csv", index=False)
    trace = import_trace(tmp_path / "a.csv")
    assert len(trace) == count
    assert trace.frame["sample_id"].max() == 0


# ServeGen -------------------------------------------------------------------------------------------------------------


def test_servegen_clients_weigh_by_their_requests(tmp_path: Path) -> None:
    """Client 1 has 600 · (3 + 1) requests in the window that has any, client 2 has 600 · 4 of them, client 3 none."""
    servegen(tmp_path / "m", 1, {10: 0.25, 20: 0.75}, [3.0, 1.0, 0.0, 0.0])
    servegen(tmp_path / "m", 2, {1000: 1.0}, [0.0, 4.0, 9.0, 0.0])
    servegen(tmp_path / "m", 3, {7: 1.0}, [0.0, 0.0, 0.0, 0.0])
    trace = import_trace(tmp_path / "m", rows=800)
    lengths, counts = np.unique(trace.response_tokens, return_counts=True)
    assert dict(zip(lengths.tolist(), counts.tolist(), strict=True)) == {10: 100, 20: 300, 1000: 400}
    by = trace.frame.groupby("response_tokens")["prompt_tokens"].agg(["min", "max"])
    assert by.loc[10].tolist() == [50, 50]  # the lowest quarter of responses goes with the lowest half of prompts
    assert by.loc[20].tolist() == [50, 70]
    assert "3 clients" in trace.meta.notes[0]


def test_servegen_windows_of_unequal_length(tmp_path: Path) -> None:
    """One request a second for 300 s by client 1, for 900 s by client 2."""
    for client, (length, ends) in enumerate(((10, "300"), (20, "900")), 1):
        path = servegen(tmp_path / "m", client, {length: 1.0}, [])
        rates = f"0,1.0,1,Gamma,1,1\n{ends},0,0,,0,0\n1200,0,0,,0,0\n"
        path.with_name(f"chunk-{client}-trace.csv").write_text(rates)
    counts = np.unique(import_trace(tmp_path / "m", rows=400).response_tokens, return_counts=True)[1]
    assert counts.tolist() == [100, 300]


def test_servegen_alone_without_rates_and_with_windows_by_number(tmp_path: Path) -> None:
    path = servegen(tmp_path / "m", 1, {10: 0.5, 20: 0.5}, [1.0])
    path.with_name("chunk-1-trace.csv").unlink()
    data = json.loads(path.read_text())
    path.write_text(json.dumps({"0": data["0"], "0600": data["1200"]}))
    trace = import_trace(path, rows=10)
    assert sorted(trace.response_tokens.tolist()) == [10] * 5 + [20] * 5
    assert any("1 clients without chunk-<i>-trace.csv" in note for note in trace.meta.notes)


@cases("import_near_misses", "servegen")
def test_servegen_that_is_not_read(
    tmp_path: Path, window: str, change: dict[str, Any], rates: str | None, message: str
) -> None:
    path = servegen(tmp_path / "m", 1, {10: 0.5, 200: 0.5}, [0.5, 0.0])
    data = json.loads(path.read_text())
    window_of = {"input_tokens": "{50: 1.0}", **({} if "ouput_tokens" in change else {"output_tokens": "{10: 1.0}"})}
    path.write_text(json.dumps(data | {window: window_of | change}))
    if rates is not None:
        path.with_name("chunk-1-trace.csv").write_bytes(rates.encode("latin-1"))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "m")


def test_servegen_cut_and_absent(tmp_path: Path) -> None:
    path = servegen(tmp_path / "m", 1, {10: 1.0}, [1.0])
    path.write_text(path.read_text()[:40])
    with pytest.raises(TraceError, match="not valid JSON"):
        import_trace(tmp_path / "m")
    with pytest.raises(TraceError, match=r"no chunk-<i>-dataset.json"):
        import_trace(saved(tmp_path, TABLES["azure"]), format="servegen")
