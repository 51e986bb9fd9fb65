"""The schema of a trace: what is read, what is refused and with which words, and that writing is exact."""

import os
from pathlib import Path

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


HEADER = b"prompt_id,sample_id,response_tokens\n"


def written(path: Path, frame: pd.DataFrame) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif ".csv" in path.suffixes:
        frame.to_csv(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_every_format_reads_the_same(tmp_path: Path, suffix: str) -> None:
    trace = read_trace(written(tmp_path / f"some.trace{suffix}", GOOD))
    assert trace.meta.name == "some.trace"
    assert trace.frame["prompt_id"].tolist() == ["a", "a", "b"]
    assert trace.response_tokens.tolist() == [100, 2000, 30]
    assert trace.frame["prompt_tokens"].isna().tolist() == [False, False, True]
    assert trace.frame["epoch"].tolist() == [0, 0, 0]
    assert not trace.capped.any()


def test_a_file_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", GOOD)
    known = read_trace(path)
    assert read_trace(path) is known
    written(path, GOOD.assign(response_tokens=[7, 8, 9]))
    os.utime(path, ns=(0, 0))  # a clock of a few milliseconds may not tell the two apart
    assert read_trace(path).response_tokens.tolist() == [7, 8, 9]


def test_ids_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(HEADER + b"007,0,5\n8,0,6\n")
    assert read_trace(path).frame["prompt_id"].tolist() == ["007", "8"]
    path.write_bytes(HEADER + b"7,0,5\n8,0,6\n")
    assert read_trace(path).frame["prompt_id"].tolist() == [7, 8]


def test_the_cap_is_taken_from_marked_responses(tmp_path: Path) -> None:
    frame = GOOD.assign(finish_reason=["stop", "length", "stop"])
    trace = read_trace(written(tmp_path / "t.csv", frame))
    assert trace.meta.cap_tokens == 2000
    assert trace.capped.tolist() == [False, True, False]
    assert any("cap 2000" in note for note in trace.meta.notes)
    assert read_trace(written(tmp_path / "t.csv", GOOD), cap_tokens=2000).capped.tolist() == [False, True, False]
    with pytest.raises(TraceError, match="line 3: response_tokens 2000 is above the trace's cap 1024"):
        read_trace(written(tmp_path / "t.csv", GOOD), cap_tokens=1024)


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
