"""What kernels reach of the data sheet, as tables and as a chart."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlsim.calibrate.show import efficiencies
from rlsim.cli import app
from rlsim.cost.calibration import load_calibration


def test_shares_are_seconds_of_the_data_sheet_over_those_of_the_kernel() -> None:
    known = load_calibration("h100-vllm")
    launch = known.operators.gemm.model_copy(
        update={"launch_s": 1e-3, "efficiency": {"compute": 1e6, "memory": 1e6}, "tiles": (), "table": None}
    )
    made = known.model_copy(update={"operators": known.operators.model_copy(update={"gemm": launch})})
    found = efficiencies(made)
    products, others = found[found.kernel == "gemm"], found[found.kernel != "gemm"]
    weights_s = 2.0 * (4096**2 + 2 * 4096) / known.reference.memory_bytes_per_s
    (share,) = products[(products.line == "n = k = 4,096") & (products["at"] == 1)].share
    assert share == pytest.approx(weights_s / 1e-3, rel=1e-3)
    assert others.share.between(0, 1).all()
    assert {"decode_attention", "prefill_attention", "experts_mxfp4", "gemm_fp8"} <= {*others.kernel}


def test_tables_and_a_chart(tmp_path: Path) -> None:
    chart = tmp_path / "shares.svg"
    shown = CliRunner().invoke(app, ["calibrate", "show", "a40-sglang", "--out", str(chart)])
    assert shown.exit_code == 0
    assert "n = k = 4,096" in shown.output
    assert "256 sequences" in chart.read_text()
    wrong = CliRunner().invoke(app, ["calibrate", "show", "a40-sglang", "--out", str(tmp_path / "shares.txt")])
    assert wrong.exit_code != 0
