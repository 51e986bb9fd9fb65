"""Importing other programs' traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dump_samples import jsonl

from rlsim.errors import TraceError
from rlsim.trace import read_trace
from rlsim.trace.importers import import_trace

MOONCAKE = [
    {"timestamp": 3000 * i, "input_length": 100 + i, "output_length": 50 + i, "hash_ids": [i]} for i in range(4)
]


def test_mooncake(tmp_path: Path) -> None:
    trace = import_trace(jsonl(tmp_path / "m.jsonl", MOONCAKE))
    assert trace.response_tokens.tolist() == [50, 51, 52, 53]
    assert trace.frame["prompt_tokens"].tolist() == [100, 101, 102, 103]
    assert trace.frame["arrival_s"].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert trace.frame["prompt_id"].tolist() == [0, 1, 2, 3]
    assert any("Mooncake" in n for n in trace.meta.notes)
    assert any("prompt of its own" in n for n in trace.meta.notes)


def test_vidur_variants(tmp_path: Path) -> None:
    full = pd.DataFrame({"arrived_at": [0.0, 1.5], "num_prefill_tokens": [300, 200], "num_decode_tokens": [100, 50]})
    full["num_total_tokens"] = full.num_prefill_tokens + full.num_decode_tokens
    full["pd_ratio"] = full.num_prefill_tokens / full.num_decode_tokens
    for kept in (
        ["arrived_at", "num_prefill_tokens", "num_decode_tokens"],
        ["num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio"],
        ["num_total_tokens", "pd_ratio"],
    ):
        full[kept].to_csv(tmp_path / "v.csv", index=False)
        trace = import_trace(tmp_path / "v.csv")
        assert trace.response_tokens.tolist() == [100, 50]
        assert trace.frame["prompt_tokens"].tolist() == [300, 200]
        assert ("arrival_s" in trace.frame) == ("arrived_at" in kept)


def test_renamed_columns_and_numbered_samples(tmp_path: Path) -> None:
    frame = pd.DataFrame({"uid": ["x", "x", "y"], "output_len": [5, 6, 7], "length_of_prompt": [1, 1, 2]})
    frame.to_parquet(tmp_path / "r.parquet")
    columns = {"prompt_id": "uid", "response_tokens": "output_len", "prompt_tokens": "length_of_prompt"}
    trace = import_trace(tmp_path / "r.parquet", columns=columns, cap_tokens=7, name="n", source="s")
    assert trace.frame["sample_id"].tolist() == [0, 1, 0]
    assert trace.capped.tolist() == [False, False, True]
    assert (trace.meta.name, trace.meta.source, trace.meta.cap_tokens) == ("n", "s", 7)


@pytest.mark.parametrize(
    ("columns", "layout", "message"),
    [
        ({"response_token": "output_len"}, None, "no column 'response_token'; did you mean 'response_tokens'"),
        ({"response_tokens": "output_length"}, None, "no column 'output_length' .*did you mean 'output_len'"),
        ({}, None, "no column 'response_tokens'"),
        ({}, "moncake", "unknown format 'moncake'; did you mean 'mooncake'"),
        ({}, "mooncake", "not in the mooncake layout, which needs timestamp, input_length, output_length"),
        ({}, "histogram", "not in the histogram layout"),
    ],
)
def test_near_misses(tmp_path: Path, columns: dict[str, str], layout: str | None, message: str) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"output_len": 5}])
    with pytest.raises(TraceError, match=message):
        import_trace(path, columns=columns, format=layout)


def test_near_miss_of_a_layout(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 1, "output_lenght": 2}]
    with pytest.raises(TraceError, match="mooncake layout, but 'output_lenght' should be 'output_length'"):
        import_trace(jsonl(tmp_path / "t.jsonl", rows))
    pd.DataFrame({"num_prefill_token": [1], "num_decode_tokens": [1]}).to_csv(tmp_path / "v.csv", index=False)
    with pytest.raises(TraceError, match="'num_prefill_token' should be 'num_prefill_tokens'"):
        import_trace(tmp_path / "v.csv", format="vidur")


def test_bad_lengths_name_the_line(tmp_path: Path) -> None:
    rows = [*MOONCAKE[:2], MOONCAKE[2] | {"output_length": -4}]
    with pytest.raises(TraceError, match="line 3: response_tokens is negative"):
        import_trace(jsonl(tmp_path / "t.jsonl", rows))
    (tmp_path / "v.csv").write_text("num_total_tokens,pd_ratio\n10,1\n10,x\n")
    with pytest.raises(TraceError, match="line 3: pd_ratio is not a finite number"):
        import_trace(tmp_path / "v.csv")


def test_histogram_and_cdf(tmp_path: Path) -> None:
    pd.DataFrame({"response_tokens": [10, 20, 40], "count": [1, 2, 1]}).to_csv(tmp_path / "h.csv", index=False)
    trace = import_trace(tmp_path / "h.csv", rows=100)
    assert np.unique(trace.response_tokens, return_counts=True)[1].tolist() == [25, 50, 25]
    frame = pd.DataFrame({"task": ["a", "a", "b", "b"], "length": [10, 100, 10, 30], "cdf": [0.0, 0.9, 0.0, 1.0]})
    frame.to_csv(tmp_path / "c.csv", index=False)
    trace = import_trace(tmp_path / "c.csv", rows=100)
    first = trace.frame[trace.frame.task == "a"]
    assert first.capped.sum() == 10
    assert set(first.response_tokens[first.capped]) == {100}
    assert not trace.frame[trace.frame.task == "b"].capped.any()
    frame.assign(cdf=frame.cdf * 100).to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(TraceError, match="give shares, not percent"):
        import_trace(tmp_path / "c.csv")


def test_files_that_look_right_and_are_not(tmp_path: Path) -> None:
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    with pytest.raises(TraceError, match="line 1: not valid JSON"):
        import_trace(deep)
    flag = jsonl(tmp_path / "flag.jsonl", [{"prompt_id": "a", "response_tokens": True}])
    with pytest.raises(TraceError, match="response_tokens is not a number"):
        import_trace(flag)
    wide = tmp_path / "wide.csv"
    wide.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47,3,4,5\n"
    )
    with pytest.raises(TraceError, match="not valid CSV"):
        import_trace(wide)


def test_a_trace_without_sample_id_hears_of_the_import(tmp_path: Path) -> None:
    pd.DataFrame({"prompt_id": [1, 1], "response_tokens": [3, 4]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"no column 'sample_id'.*`rlsim trace import IN OUT` numbers samples"):
        read_trace(tmp_path / "t.parquet")


def test_lists_of_tokens_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "prime.jsonl"
    jsonl(path, [{"prompt_ids": [1, 2, 3], "completion_ids": [5] * n, "reward": 1.0} for n in (4, 6)])
    with pytest.raises(TraceError, match="--column response_tokens=completion_ids --column prompt_tokens=prompt_ids"):
        import_trace(path)
    columns = {"response_tokens": "completion_ids", "prompt_id": "prompt_ids"}
    frame = import_trace(path, columns=columns).frame
    assert frame["response_tokens"].tolist() == [4, 6]
    assert frame["prompt_id"].nunique() == 1
