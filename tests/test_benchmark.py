"""The benchmarks run and say what they should; how fast is no test's business."""

import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a benchmark in this process and reads its last line."""

    def ran(script: str, *options: str) -> Any:
        monkeypatch.setattr(sys, "argv", [script, *options])
        monkeypatch.syspath_prepend(BENCHMARKS)
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return ran


def test_quick_benchmark_ends_with_its_results_as_json(results: Callable[..., Any]) -> None:
    result = results("rollout.py", "--quick", "--repeats", "1")
    assert all(value > 0 and math.isfinite(value) for value in result.values())
    # Jumping: a timeout for each response at most, and a few for the prefills of a replica, whatever the tokens.
    assert result["responses"] == 2 * 1_024
    assert result["tokens"] > 1_000 * result["responses"]
    assert 0.5 * result["responses"] < result["timeouts"] < 1.5 * result["responses"]


def test_growth_at_every_kind_of_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A large model too, whose memory must hold what the engine keeps; every point in this process."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    scale = runpy.run_path(str(BENCHMARKS / "scale.py"))
    smallest = {point[1]: point for point in reversed([*scale["points"]("quick")])}
    for point in smallest.values():
        scale["run"](*point)
    found = {row["system"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [*found] == [*smallest]
    assert all(row["cpu_s"] > 0 < row["peak_mb"] for row in found.values())
    assert found["rollpacker"]["responses"] == 4 * 160 * 10 + 128 * 8  # four short rounds and a long one


def test_a_search_for_plans(results: Callable[..., Any]) -> None:
    assert {row["method"] for row in results("plan_search.py", "--quick", "--seconds", "0.2")} == {"descent", "mcmc"}


def test_beside_aisimulate_says_how_to_get_it(tmp_path: Path, results: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit, match=f"{tmp_path}/none/bin/pip install --pre"):
        results("peers.py", "--venv", str(tmp_path / "none"))


def test_beside_aisimulate_simulates_the_file_that_both_read(tmp_path: Path, results: Callable[..., Any]) -> None:
    path = tmp_path / "rollout.jsonl"
    line = {"request_id": "r0", "timestamp": 0.0, "input_length": 512, "hash_ids": [0]}
    path.write_text(
        "".join(json.dumps(line | {"output_length": n}) + "\n" for n in (900, 10, 20, 40, 80, 5, 6, 7)),
        encoding="utf-8",
    )
    simulate = ("peers.py", "--simulate", str(path), "--replicas")
    alone, together = (results(*simulate, replicas)["makespan_s"] for replicas in ("8", "1"))
    hosted = results(*simulate, "1", "--as", "rlsim, host time")["makespan_s"]
    assert 900 * 0.004 < alone < together < hosted < 900 * 0.01  # 16 GB of weights at 4.8 TB/s take 3.4 ms a token
