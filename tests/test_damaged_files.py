"""Files of other programs that ended in tracebacks or were taken in silence, as fuzzing found: each is one error."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dump_samples as samples
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_calibrate_import import collective_rows, nccl_json

from rlsim import tables
from rlsim.calibrate.importers import aiconfigurator, nccl_tests
from rlsim.calibrate.importers.reading import read_table
from rlsim.errors import CalibrationError, ConfigError, TraceError
from rlsim.trace import read_trace
from rlsim.trace.files import write_trace
from rlsim.trace.importers import import_trace
from rlsim.trace.importers.tables import from_cdf
from rlsim.verl.log import read_log
from rlsim.verl.run import batch_of

HUGE = 10**400  # a whole number that no float holds


def one_error(kind: type[Exception], *words: str, of: Callable[[], Any]) -> None:
    with pytest.raises(kind) as found:
        of()
    for word in words:
        assert word in str(found.value), found.value


# Traces ---------------------------------------------------------------------------------------------------------------

ROW = {"prompt_id": "a", "sample_id": 0, "response_tokens": 5}


@pytest.mark.parametrize("column", ["response_tokens", "prompt_tokens", "arrival_s", "test_run_s"])
def test_numbers_that_no_float_holds(tmp_path: Path, column: str) -> None:
    value = [HUGE] if column == "test_run_s" else HUGE
    path = samples.jsonl(tmp_path / "t.jsonl", [ROW | {column: value}])
    one_error(TraceError, "t.jsonl: line 1", of=lambda: read_trace(path))
    if column != "test_run_s":
        text = pd.DataFrame([ROW | {column: HUGE}]).to_csv(index=False)
        (tmp_path / "t.csv").write_text(text)
        one_error(TraceError, "t.csv: line 2", of=lambda: read_trace(tmp_path / "t.csv"))


def parquet(path: Path, **columns: Any) -> Path:
    base = {"prompt_id": pa.array([1, 2]), "sample_id": pa.array([0, 0]), "response_tokens": pa.array([5, 6])}
    pq.write_table(pa.table(base | columns), path)
    return path


def test_bytes_in_a_text_column(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", task=pa.array([b"math", b"\xff"]))
    one_error(TraceError, "row 1: task is bytes, not text", of=lambda: read_trace(path))
    path = parquet(tmp_path / "t.parquet", response_tokens=pa.array([b"5", b"6"]))
    one_error(TraceError, "row 1: response_tokens is not a number", of=lambda: read_trace(path))


def test_dates_are_no_numbers(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", arrival_s=pa.array([1, 2], pa.timestamp("s")))
    one_error(TraceError, "row 1: arrival_s is not a number", of=lambda: read_trace(path))


def test_half_a_character_can_be_written(tmp_path: Path) -> None:
    path = samples.jsonl(tmp_path / "t.jsonl", [ROW | {"task": "x"}])
    path.write_text(json.dumps(ROW | {"prompt_id": "a\ud800", "task": "\udfff", "o\ud800dd": 1}) + "\n")
    write_trace(read_trace(path), tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.frame["prompt_id"].tolist() == ["a?"]
    assert trace.meta.notes == ("columns left out: o?dd",)


def test_a_file_of_blank_lines_is_empty(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n \n")
    one_error(TraceError, "t.jsonl: the file is empty", of=lambda: read_trace(tmp_path / "t.jsonl"))
    one_error(TraceError, "t.jsonl: the file is empty", of=lambda: import_trace(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.csv.gz"])
def test_compressed_bombs_and_cut_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_GROWN_BYTES", 100_000)
    line = b'{"prompt_id": 1}\n' if "json" in name else b"prompt_id,sample_id,response_tokens\n"
    packed = gzip.compress(line + b" " * 20_000_000 + b"\n")
    (tmp_path / name).write_bytes(packed)
    one_error(TraceError, name, "grows to more than", of=lambda: read_trace(tmp_path / name))
    (tmp_path / name).write_bytes(packed[:-9])
    one_error(TraceError, name, of=lambda: import_trace(tmp_path / name))


def servegen(folder: Path, change: Callable[[dict[str, Any]], None] | None = None, rates: bytes | None = None) -> Path:
    path = samples.servegen(folder, 0, {10: 0.5, 200: 0.5}, [0.5, 0.0, 2.0, 0.1])
    data = json.loads(path.read_text())
    if change is not None:
        change(data)
    path.write_text(json.dumps(data))
    if rates is not None:
        (folder / "chunk-0-trace.csv").write_bytes(rates)
    return folder


@pytest.mark.parametrize(
    ("pdf", "message"),
    [
        ("{1:2:3}", "not a dictionary of lengths"),
        ("{1e99: 1.0}", "whole number of tokens"),
        ("{-5: 1.0}", "whole number of tokens"),
        ("{1e: 1.0}", "not a dictionary of lengths"),
    ],
)
def test_servegen_distributions(tmp_path: Path, pdf: str, message: str) -> None:
    folder = servegen(tmp_path / "s", lambda data: data["0"].update(output_tokens=pdf))
    one_error(TraceError, "window 0: output_tokens", message, of=lambda: import_trace(folder))


def test_servegen_windows_by_number(tmp_path: Path) -> None:
    folder = servegen(tmp_path / "s", lambda data: data.update({"0600": data.pop("1200")}))
    assert len(import_trace(folder, rows=10)) == 10
    folder = servegen(tmp_path / "t", lambda data: data.update({"²": data["0"]}))
    one_error(TraceError, "window '²' should be the second it begins", of=lambda: import_trace(folder))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        (b"", "the file is empty"),
        (b"0,1\n\xff\xfe,2\n", "cannot be read"),
        (b"0,nan\n", "line 1: expected second,rate"),
        (b"0,-1\n", "line 1: expected second,rate"),
        (b"0,1e999\n", "line 1: expected second,rate"),
        (b"600,1\n0,1\n", "line 2: second 0 does not come after 600"),
        (b"0,1\n\n", "line 2: expected second,rate"),
    ],
)
def test_servegen_rates(tmp_path: Path, rates: bytes, message: str) -> None:
    folder = servegen(tmp_path / "s", rates=rates)
    one_error(TraceError, "chunk-0-trace.csv", message, of=lambda: import_trace(folder))


def test_slime_values_of_other_kinds(tmp_path: Path) -> None:
    odd = [samples.slime_sample(i, "q", 5, 6, weight_versions=3, group_index=[i // 2]) for i in range(4)]
    assert len(import_trace(samples.slime(tmp_path / "0.pt", 0, odd))) == 4
    path = samples.slime(tmp_path / "1.pt", 2**70, [samples.slime_sample(0, "q", 5, 6)])
    one_error(TraceError, "1.pt: sample 1: _step should be a whole number", of=lambda: import_trace(path))


def test_areal_roles_and_roll_steps(tmp_path: Path) -> None:
    trial = samples.areal(tmp_path / "trial")
    sessions = [samples.session(7, 0, 1.0, 0.5, role=["rollout"])]
    samples.jsonl(trial / "session_tracer" / "rollout" / "sessions-r0.jsonl", sessions)
    assert len(import_trace(trial)) == 6
    step = samples.roll_step(10**30, ["a", "a"], [3, 4])
    path = samples.jsonl(tmp_path / "rollout_dump_data.step_1.jsonl", [step])
    words = samples.tokenizer(tmp_path / "tokens")
    one_error(TraceError, "line 1", "global_step should be a whole number",
              of=lambda: import_trace(path, tokenizer=words))  # fmt: skip


def test_a_tokenizer_that_cannot_count(tmp_path: Path) -> None:
    words = samples.tokenizer(tmp_path / "tokens")
    spec = json.loads(words.read_text())
    spec["model"]["unk_token"] = "missing"
    spec["model"]["vocab"] = {"one": 0}
    words.write_text(json.dumps(spec))
    one_error(TraceError, "--tokenizer", of=lambda: import_trace(samples.verl(tmp_path / "verl"), tokenizer=words))


def test_tables_with_missing_tasks(tmp_path: Path) -> None:
    (tmp_path / "cdf.csv").write_text("length,cdf,task\n10,0.2,math\n200,0.9,\n900,1.0,\n")
    assert len(import_trace(tmp_path / "cdf.csv", rows=10)) == 20
    text = "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,ChatGPT,472,18,x\n6,,1,%s,y\n"
    (tmp_path / "b.csv").write_text(text % HUGE)
    one_error(TraceError, "b.csv", "line 3: response_tokens", of=lambda: import_trace(tmp_path / "b.csv"))


# Measurements ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"results": [1, 2]},
        {"results": {}},
        {"config": {"nthreads": 1, "ngpus": "8", "devices": []}},
        {"config": {"nthreads": 1, "ngpus": 10**9, "devices": []}},
        {"config": {"nthreads": 1, "ngpus": 8, "devices": 3}},
    ],
)
def test_nccl_reports_of_other_kinds(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "r.json").write_text(json.dumps(nccl_json() | change))
    one_error(CalibrationError, "r.json", of=lambda: nccl_tests.read([tmp_path / "r.json"]))


@pytest.mark.parametrize("value", [HUGE, "nan", [1], -5, 1e30])
def test_nccl_numbers(tmp_path: Path, value: Any) -> None:
    report: Any = nccl_json()
    report["results"][1]["out_of_place"]["time"] = value
    (tmp_path / "r.json").write_text(json.dumps(report))
    one_error(CalibrationError, "r.json", of=lambda: nccl_tests.read([tmp_path / "r.json"]))


def test_nccl_reports_without_arguments(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(nccl_json() | {"args": {}}))
    assert len(nccl_tests.read([tmp_path / "r.json"]).table("collective")) == 4


def test_more_ranks_than_any_cluster_has(tmp_path: Path) -> None:
    report = nccl_json()
    report["config"] |= {"nthreads": HUGE, "devices": []}
    (tmp_path / "r.json").write_text(json.dumps(report))
    one_error(CalibrationError, "r.json", of=lambda: nccl_tests.read([tmp_path / "r.json"]))


def test_lists_in_a_column_of_a_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"device": pa.array([[1, 2], [3]])}), tmp_path / "t.parquet")
    one_error(
        CalibrationError, "column 'device' holds lists", of=lambda: read_table(tmp_path / "t.parquet", ["device"])
    )


def test_a_cdf_with_a_task_left_out(tmp_path: Path) -> None:
    for blank in ("", " ", "nan"):
        frame = pd.DataFrame(
            {"length": [10.0, 50.0], "cdf": [0.5, 1.0], "task": pd.array(["math", blank or None], "str")}
        )
        found = from_cdf(frame, tmp_path / "c.csv", 10, str, [])
        assert len(found) == 20


def test_texts_of_a_table_that_are_no_utf8(tmp_path: Path) -> None:
    ids = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xe1ab")]
    )
    pq.write_table(pa.table({"prompt_id": ids, "response_tokens": pa.array([1, 2])}), tmp_path / "t.parquet")
    one_error(TraceError, "not a readable Parquet file", of=lambda: read_trace(tmp_path / "t.parquet"))


def test_versions_that_are_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "gemm" / "vllm" / "0.1"
    folder.mkdir(parents=True)
    (tmp_path / "attention" / "vllm").mkdir(parents=True)
    for name in ("x" * 400, "../.."):
        (folder / "reuse.yaml").write_text(f'reuse: [{{table: gemm_perf, from_version: "{name}"}}]\n')
        one_error(CalibrationError, "no version of vllm", of=lambda: aiconfigurator.read(tmp_path, "vllm"))


def test_damaged_footers_of_tables(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pandas(collective_rows(custom=False)), tmp_path / "nccl_perf.parquet")
    data = (tmp_path / "nccl_perf.parquet").read_bytes()
    for at in range(len(data) - 3000, len(data), 11):
        (tmp_path / "t.parquet").write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        try:
            read_table(tmp_path / "t.parquet", ["latency"])
        except CalibrationError as error:
            assert "t.parquet" in str(error)  # noqa: PT017 - most are refused, some bytes mean nothing


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"step": 1e999, "data": {"timing_s/gen": 3}}'),
        ("a.jsonl", '{"step": 1, "data": {"timing_s/gen": 1%s}}' % ("0" * 400)),
        ("a.jsonl", '{"step": 1, "data": {"timing_s/gen": 1e999}}'),
        ("a.json", '[{"_step": 1, "timing_s/gen": 1%s}]' % ("0" * 400)),
        ("a.log", "step:%s - timing_s/gen:3.0\n" % ("9" * 4500)),
        ("a.csv", "training/global_step,timing_s/gen\n1,2\n1e30,3\n"),
    ],
)
def test_numbers_of_metric_logs(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text + "\n")
    one_error(CalibrationError, f"{name}:", of=lambda: read_log(tmp_path / name))


@pytest.mark.parametrize("value", ["'many'", "-8", "0", "1.5", "[8]", str(HUGE)])
def test_settings_in_a_log_of_other_kinds(tmp_path: Path, value: str) -> None:
    config = f"{{'actor_rollout_ref': {{'rollout': {{'n': 2}}}}, 'data': {{'train_batch_size': {value}}}}}"
    (tmp_path / "a.log").write_text(f"{config}\nstep:1 - timing_s/gen:3.0\n")
    log = read_log(tmp_path / "a.log")
    one_error(ConfigError, "a.log", "data.train_batch_size", of=lambda: batch_of(log, cap=100))


def test_numbers_of_every_spelling() -> None:
    odd = [None, True, "x", "1_0", "²", b"5", [1], HUGE, float("nan")]
    assert np.isnan(tables.floats(pd.Series(odd, dtype=object))).all()
    assert tables.floats(pd.Series([1, 2.5, "3", " 4 ", "1e3"], dtype=object)).tolist() == [1, 2.5, 3, 4, 1000]
    assert np.isnan(tables.floats(pd.Series([True, False]))).all()


def test_an_archive_of_torch_that_is_damaged(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02]q\x00(K\x01")
    (tmp_path / "0.pt").write_bytes(sink.getvalue())
    one_error(TraceError, "0.pt", of=lambda: import_trace(tmp_path / "0.pt"))
