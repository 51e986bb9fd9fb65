"""Metric logs of veRL: refused as traces, and lengths derived from their means when asked."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import invoke
from dump_samples import jsonl, verl_row

from rlsim.errors import CalibrationError, TraceError
from rlsim.frameworks.verl.lengths import batch_size, derive_trace
from rlsim.trace import read_trace
from rlsim.trace.importers import import_trace

STEPS = {1: (300.0, 1024.0, 0.02, 100.0), 2: (400.0, 1024.0, 0.05, 110.0), 3: (250.0, 900.0, 0.0, 90.0)}


def console(path: Path) -> Path:
    lines = [
        f"(TaskRunner pid=7) step:{step} - critic/score/mean:0.3 - response_length/mean:{mean} - "
        f"response_length/max:{longest} - response_length/min:12.0 - response_length/clip_ratio:{cut} - "
        f"prompt_length/mean:{prompt} - timing_s/gen:61.3\n"
        for step, (mean, longest, cut, prompt) in STEPS.items()
    ]
    path.write_text("(TaskRunner pid=7) Training Progress:   0%\n" + "".join(lines))
    return path


def file_logger(path: Path) -> Path:
    names = ("mean", "max", "clip_ratio")
    rows = []
    for step, values in STEPS.items():
        lengths = {f"response_length/{name}": value for name, value in zip(names, values[:3], strict=True)}
        rows.append({"step": step, "data": {"timing_s/gen": 61.3, **lengths}})
    return jsonl(path, rows)


def export(path: Path) -> Path:
    head = ["Step", *(f"my-run - response_length/{name}" for name in ("mean", "max", "clip_ratio"))]
    rows = [",".join(f'"{name}"' for name in head)]
    rows += [",".join(f'"{value}"' for value in (step, *values[:3])) for step, values in STEPS.items()]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_lengths_meet_every_step(tmp_path: Path) -> None:
    trace = derive_trace(console(tmp_path / "run.log"), prompts=32, responses=8, cap_tokens=1024)
    for epoch, (mean, longest, cut, prompt) in enumerate(STEPS.values()):
        rows = trace.frame[trace.frame["epoch"] == epoch]
        assert len(rows) == 256
        assert rows["response_tokens"].mean() == pytest.approx(mean, rel=0.01)
        assert rows["response_tokens"].max() == longest
        assert rows["capped"].mean() == pytest.approx(cut, abs=0.5 / 256)
        assert set(rows["prompt_tokens"]) == {round(prompt)}
        assert rows.groupby("prompt_id").size().unique().tolist() == [8]
    assert trace.meta.cap_tokens == 1024
    assert "DERIVED, not measured" in trace.meta.notes[0]
    assert trace.meta.source == "derived from means in the metric log run.log"


@pytest.mark.parametrize(("write", "name"), [(console, "run.log"), (file_logger, "m.jsonl"), (export, "wandb.csv")])
def test_without_derive_a_metric_log_is_refused(tmp_path: Path, write: object, name: str) -> None:
    path = write(tmp_path / name)  # type: ignore[operator]
    for layout in (None, "verl-metrics"):
        with pytest.raises(TraceError, match=r"holds each step's mean.*no lengths.*rollout_data_dir.*--derive"):
            import_trace(path, format=layout)
    out = tmp_path / "out.parquet"
    arguments = ["import", str(path), str(out), "--derive", "--batch", "16x4", "--cap", "1K", "--name", "mine"]
    result = invoke("trace", *arguments)
    assert result.exception is None
    assert "192 responses of 48 prompts" in result.output
    assert "DERIVED" in result.output
    trace = read_trace(out)
    assert (trace.meta.name, trace.meta.cap_tokens) == ("mine", 1024)
    assert ("prompt_tokens" in trace.frame) == (name == "run.log")
    assert np.unique(trace.frame["epoch"]).tolist() == [0, 1, 2]


def test_a_log_without_lengths_and_a_dump(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", [{"step": 1, "data": {"response_lenght/mean": 3.0}}])
    with pytest.raises(CalibrationError, match="no step logs response_length/mean; the nearest found: response_lenght"):
        derive_trace(path, prompts=2, responses=2, cap_tokens=16)
    dump = jsonl(tmp_path / "1.jsonl", [verl_row(1, "what is response_length/mean?", 3, 0.0)])
    with pytest.raises(TraceError, match="texts and no token counts"):
        import_trace(dump)
    assert json.loads(dump.read_text())["step"] == 1
    assert batch_size("128×8") == batch_size("128x8") == (128, 8)
