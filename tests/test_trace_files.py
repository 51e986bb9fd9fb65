"""The schema of a trace: what is read, what is refused and with which words, and that writing is exact."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlsim.errors import TraceError
from rlsim.trace import COLUMNS, TraceMeta, make_trace, read_trace, write_trace

GOOD = pd.DataFrame(
    {
        "prompt_id": ["a", "a", "b"],
        "sample_id": [0, 1, 0],
        "prompt_tokens": [10, 10, None],
        "response_tokens": [100, 2000, 30],
    }
)


def csv(tmp_path: Path, frame: pd.DataFrame, name: str = "t.csv") -> Path:
    path = tmp_path / name
    frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_every_format_reads_the_same(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"some.trace{suffix}"
    if suffix == ".parquet":
        GOOD.to_parquet(path)
    elif suffix.startswith(".csv"):
        GOOD.to_csv(path, index=False)
    else:
        GOOD.to_json(path, orient="records", lines=True)
    trace = read_trace(path)
    assert trace.meta.name == "some.trace"
    assert trace.frame["prompt_id"].tolist() == ["a", "a", "b"]
    assert trace.response_tokens.tolist() == [100, 2000, 30]
    assert trace.frame["prompt_tokens"].isna().tolist() == [False, False, True]
    assert trace.frame["epoch"].tolist() == [0, 0, 0]
    assert not trace.capped.any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "response_tokens is negative"),
        (0, "response_tokens is zero"),
        (1.5, "response_tokens is not a whole number"),
        (np.nan, "response_tokens is missing or NaN"),
        (np.inf, "response_tokens is infinite"),
        (2.0**40, "response_tokens is above"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_lengths_no_response_can_have(tmp_path: Path, value: float, message: str, suffix: str) -> None:
    frame = GOOD.assign(response_tokens=[100.0, value, 30.0])
    path = tmp_path / f"t{suffix}"
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
    row = "line 3" if suffix == ".csv" else "row 2"
    with pytest.raises(TraceError, match=f"{path.name}: {row}: {message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_tokens": ["100", "many", "30"]}, "line 3: response_tokens is not a number .got 'many'"),
        ({"prompt_tokens": [10, -3, None]}, "line 3: prompt_tokens is negative"),
        ({"prompt_tokens": [10, 0, None]}, "line 3: prompt_tokens is zero"),
        ({"sample_id": [0, 0.5, 0]}, "line 3: sample_id is not a whole number"),
        ({"prompt_id": ["a", None, "b"]}, "line 3: prompt_id is missing"),
        ({"capped": ["yes!", "0", "0"]}, "line 2: capped is neither true nor false"),
        ({"reward_time_s": [1.0, -0.5, 0]}, "line 3: reward_time_s is negative"),
        ({"test_run_s": ["[1, 2]", "[1, -2]", "[]"]}, "line 3: test_run_s is not a list of finite numbers"),
        ({"sample_id": [0, 0, 0]}, "line 3: prompt_id a, sample_id 0, epoch 0 stands already in line 2"),
        ({"epochs": [0, 0, 0]}, "unknown column 'epochs'; did you mean 'epoch'"),
        ({"Response_Tokens": [1, 1, 1], "response_tokens": None}, "did you mean 'response_tokens'"),
    ],
)
def test_other_bad_values(tmp_path: Path, change: dict[str, list[object] | None], message: str) -> None:
    frame = GOOD.assign(**change)
    frame = frame.drop(columns=[name for name, values in change.items() if values is None])
    with pytest.raises(TraceError, match=message):
        read_trace(csv(tmp_path, frame))


def test_missing_column_names_the_nearest(tmp_path: Path) -> None:
    frame = GOOD.rename(columns={"response_tokens": "output_tokens"})
    with pytest.raises(TraceError, match=r"no column 'response_tokens'.*--column response_tokens=output_tokens"):
        read_trace(csv(tmp_path, frame))


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.parquet")
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)
    (tmp_path / "t.xlsx").write_bytes(b"x")
    (tmp_path / "e.csv").write_bytes(b"")
    with pytest.raises(TraceError, match="cannot tell the format"):
        read_trace(tmp_path / "t.xlsx")
    with pytest.raises(TraceError, match="the file is empty"):
        read_trace(tmp_path / "e.csv")
    with pytest.raises(TraceError, match="holds no responses"):
        read_trace(csv(tmp_path, GOOD.head(0)))
    whole = tmp_path / "whole.parquet"
    GOOD.to_parquet(whole)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(TraceError, match="truncated or damaged"):
        read_trace(cut)
    GOOD.to_json(tmp_path / "t.jsonl.gz", orient="records", lines=True)
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "t.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(TraceError, match="truncated or damaged"):
        read_trace(tmp_path / "cut.jsonl.gz")
    GOOD.to_csv(tmp_path / "t.csv.gz", index=False)
    (tmp_path / "cut.csv.gz").write_bytes((tmp_path / "t.csv.gz").read_bytes()[:-12])
    with pytest.raises(TraceError, match="truncated or damaged"):
        read_trace(tmp_path / "cut.csv.gz")


def test_text_files_that_are_not_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_id": 1, "sample_id": 0, "response_tokens": 5}\n{"prompt_id": \n')
    with pytest.raises(TraceError, match="line 2: not valid JSON"):
        read_trace(path)
    path.write_text("\n[1, 2]\n")
    with pytest.raises(TraceError, match="line 2: expected an object"):
        read_trace(path)
    path = tmp_path / "t.csv"
    path.write_text("prompt_id,sample_id,response_tokens\n1,0,5\n2,0,6,7\n")
    with pytest.raises(TraceError, match="not valid CSV"):
        read_trace(path)
    path.write_bytes(b"prompt_id,sample_id,response_tokens\n\xff\xfe,0,5\n")
    with pytest.raises(TraceError, match=r"t\.csv: cannot be read"):
        read_trace(path)


def test_blank_lines_keep_the_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_id,sample_id,response_tokens\n1,0,5\n\n\n2,0,-6\n\n")
    with pytest.raises(TraceError, match="line 5: response_tokens is negative"):
        read_trace(path)


def test_ids_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_id,sample_id,response_tokens\n007,0,5\n8,0,6\n")
    assert read_trace(path).frame["prompt_id"].tolist() == ["007", "8"]
    path.write_text("prompt_id,sample_id,response_tokens\n7,0,5\n8,0,6\n")
    assert read_trace(path).frame["prompt_id"].tolist() == [7, 8]


def test_the_cap_is_taken_from_marked_responses(tmp_path: Path) -> None:
    frame = GOOD.assign(finish_reason=["stop", "length", "stop"])
    trace = read_trace(csv(tmp_path, frame))
    assert trace.meta.cap_tokens == 2000
    assert trace.capped.tolist() == [False, True, False]
    assert any("cap 2000" in note for note in trace.meta.notes)
    assert read_trace(csv(tmp_path, GOOD), cap_tokens=2000).capped.tolist() == [False, True, False]
    with pytest.raises(TraceError, match="line 3: response_tokens 2000 is above the trace's cap 1024"):
        read_trace(csv(tmp_path, GOOD), cap_tokens=1024)


def test_unknown_columns_are_noted_and_constant_sources_kept() -> None:
    trace = make_trace(GOOD.assign(client=1))
    assert trace.meta.notes == ("columns left out: client",)


def test_write_and_read_back_with_the_same_bytes(tmp_path: Path) -> None:
    frame = GOOD.assign(
        task="math", capped=[False, True, False], test_run_s=[[0.5, 1.0], None, []], reward=[1.0, -1.0, 0.0]
    )
    meta = TraceMeta(name="x", source="somewhere", cap_tokens=2000, recipe={"seed": 1}, notes=("n",))
    trace = make_trace(frame, meta)
    write_trace(trace, tmp_path / "a.parquet")
    write_trace(trace, tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    back = read_trace(tmp_path / "a.parquet")
    assert back.meta == trace.meta
    assert back.digest() == trace.digest()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]
    with pytest.raises(TraceError, match="ends in"):
        write_trace(trace, tmp_path / "a.csv")
    with pytest.raises(TraceError, match="does not exist"):
        write_trace(trace, tmp_path / "no" / "a.parquet")


def test_columns_describe_themselves() -> None:
    assert len({c.name for c in COLUMNS}) == len(COLUMNS)
    assert all(c.meaning and (c.unit or not c.name.endswith(("_s", "_tokens"))) for c in COLUMNS)
    assert all(c.unit == "s" for c in COLUMNS if c.name.endswith("_s"))


def test_damaged_metadata(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(GOOD).replace_schema_metadata({"rlsim.trace": json.dumps({"cap_tokens": -4})})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="damaged rlsim metadata"):
        read_trace(tmp_path / "t.parquet")
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(TraceError, match=r"g\.jsonl\.gz: the file is empty"):
        read_trace(tmp_path / "g.jsonl.gz")
