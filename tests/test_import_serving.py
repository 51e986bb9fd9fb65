"""Serving traces and distributions: Azure, BurstGPT and ServeGen in their own layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dump_samples import servegen

from rlsim.errors import TraceError
from rlsim.trace.importers import import_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00+00:00,2399,6
2024-05-10 00:00:01.509930+00:00,76,0
"""
AZURE_2025 = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15 00:00:00.000000,0,100,5
2024-10-15 00:00:02.000000,2,900,6
"""
BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
110.5,GPT-4,417,276,693,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,,2,ChatGPT,36,29,65,API log
"""


def file(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize(
    ("text", "prompts", "responses", "arrivals"),
    [
        (AZURE, [4808, 3180, 110], [10, 8, 27], [0.0, 0.052, 2.0]),
        (AZURE_2024, [2162, 2399], [5, 6], [0.00993, 0.0]),
        (AZURE_2025, [100, 900], [5, 6], [0.0, 2.0]),
        (BURSTGPT_1, [472, 417], [18, 276], [0.0, 105.5]),
        (BURSTGPT_3, [906, 36], [446, 29], [0.0, 51.0]),
    ],
)
def test_tables(tmp_path: Path, text: str, prompts: list[int], responses: list[int], arrivals: list[float]) -> None:
    trace = import_trace(file(tmp_path, text))
    assert trace.frame["prompt_tokens"].tolist() == prompts
    assert trace.response_tokens.tolist() == responses
    assert trace.frame["arrival_s"].tolist() == pytest.approx(arrivals, abs=1e-9)
    left_out = any("1 requests without a response (failed) are left out" in note for note in trace.meta.notes)
    assert left_out == (len(responses) < text.count("\n") - 1)


def test_burstgpt_tasks_and_its_lines(tmp_path: Path) -> None:
    trace = import_trace(file(tmp_path, BURSTGPT_1))
    assert trace.frame["task"].tolist() == ["ChatGPT Conversation log", "GPT-4 API log"]
    bad = BURSTGPT_1.replace("417,276", "417,-3")
    with pytest.raises(TraceError, match="line 4: response_tokens is negative"):
        import_trace(file(tmp_path, bad))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("GeneratedTokens", "GenratedTokens"), "azure layout, but 'GenratedTokens' should be 'Generated"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "yesterday"), "line 3: TIMESTAMP should be a time such as"),
        (AZURE.replace("3180", "many"), "line 3: prompt_tokens is not a number"),
        (BURSTGPT_1.replace("Request tokens", "Requests token"), "'Requests token' should be 'Request tokens'"),
        (BURSTGPT_1.replace("110.5", "noon"), "line 4: Timestamp is not a number .got 'noon'"),
        ("", "the file is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "the table has a header and no rows"),
    ],
)
def test_near_misses(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_trace(file(tmp_path, text))


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


def test_servegen_alone_without_rates(tmp_path: Path) -> None:
    path = servegen(tmp_path / "m", 1, {10: 0.5, 20: 0.5}, [1.0])
    path.with_name("chunk-1-trace.csv").unlink()
    trace = import_trace(path, rows=10)
    assert sorted(trace.response_tokens.tolist()) == [10] * 5 + [20] * 5
    assert any("1 clients without chunk-<i>-trace.csv" in note for note in trace.meta.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": "{10: 0.5, 20: 0.4}"}, "window 0: output_tokens: the probabilities sum to 0.9, expected 1"),
        ({"output_tokens": "__import__('os').getcwd()"}, "window 0: output_tokens should be the text of a dictionary"),
        ({"output_tokens": "{10: 0.5 20}"}, "window 0: output_tokens is not a dictionary of lengths"),
        ({"output_tokens": {"10": 1.0}}, "window 0: output_tokens should be the text of a dictionary"),
        ({"ouput_tokens": "{10: 1.0}"}, "window 0: no 'output_tokens'; it has input_tokens, ouput_tokens"),
    ],
)
def test_servegen_near_misses(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = servegen(tmp_path / "m", 1, {10: 1.0}, [1.0])
    data = json.loads(path.read_text())
    data["0"] = {"input_tokens": "{50: 1.0}"} | change
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path / "m")


def test_servegen_damaged_files(tmp_path: Path) -> None:
    path = servegen(tmp_path / "m", 1, {10: 1.0}, [1.0])
    rates = path.with_name("chunk-1-trace.csv")
    rates.write_text("0,1.0,0.9,Gamma,1,1\nx,1\n")
    with pytest.raises(TraceError, match="line 2: expected second,rate,cv,pattern"):
        import_trace(tmp_path / "m")
    rates.unlink()
    path.write_text(path.read_text()[:40])
    with pytest.raises(TraceError, match="not valid JSON"):
        import_trace(tmp_path / "m")
    with pytest.raises(TraceError, match=r"no chunk-<i>-dataset.json"):
        import_trace(file(tmp_path, AZURE), format="servegen")


def test_many_rows_without_prompts(tmp_path: Path) -> None:
    count = 50_000
    frame = pd.DataFrame({"TIMESTAMP": pd.date_range("2024-05-10", periods=count, freq="s").astype(str),
                          "ContextTokens": 5, "GeneratedTokens": np.arange(count) % 90 + 1})  # fmt: skip
    frame.to_csv(tmp_path / "a.csv", index=False)
    trace = import_trace(tmp_path / "a.csv")
    assert len(trace) == count
    assert trace.frame["sample_id"].max() == 0
