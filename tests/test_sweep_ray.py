"""A sweep on a Ray that the test starts: the same bytes as by local processes, and a worker that is killed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_sweep import DEADLY, a_sweep, contents, ran

import rlsim

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'rlsim[ray]'")


@pytest.mark.ci
def test_ray_writes_the_same_bytes_though_a_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "deadly_policy.py").write_text(DEADLY.format(folder=str(tmp_path)), encoding="utf-8")
    lengths = rlsim.catalogue.names("traces", ".parquet")["rollpacker-math"].read_bytes()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.parquet").write_bytes(lengths)  # beside the sweep: to be sent along
    systems = [["verl"], [{"deadly_policy:Deadly": {"tp": 4, "lives": 1}}]]
    axes = {"grid": {"systems": systems, "trace.cap": [128, 256]}}
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps(a_sweep(axes, trace={"path": "data/mine.parquet", "cap": 512})), encoding="utf-8")
    command = [sys.executable, "-m", "rlsim", "sweep", str(path), "--quiet", "--workers", "2", "--out"]
    subprocess.run([*command, str(tmp_path / "ray"), "--executor", "ray"], check=True, stdout=subprocess.DEVNULL)
    assert len(list(tmp_path.glob("died-4-*"))) == 1  # so it was killed, once
    subprocess.run([*command, str(tmp_path / "local")], check=True, stdout=subprocess.DEVNULL)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(ran(tmp_path / "ray")) == 4


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps(a_sweep()), encoding="utf-8")
    command = [sys.executable, "-m", "rlsim", "sweep", str(path), "--executor", "ray", "--address", "127.0.0.1:9"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot connect to Ray at 127.0.0.1:9" in done.stderr
