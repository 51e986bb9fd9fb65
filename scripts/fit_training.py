"""Fit the one free training efficiency per framework to measured veRL steps, and print predicted against measured.

    python scripts/fit_training.py [--data DIR]

The outcome is written down in `scripts/calibration/training.py`, from where `fit_calibrations.py` takes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.gpus import GPUS
from calibration.real import check_real
from calibration.tables import DATA, training_runs
from calibration.training_report import own_gemm_share
from calibration.verl import Timing, fit_training


def _text(timing: Timing) -> str:
    return f"{timing.predicted_s:6.1f} / {timing.measured_s:6.1f} s ({timing.error:+4.0%})"


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    data = parser.parse_args().data
    found = fit_training(training_runs(data))
    print("veRL rows, predicted / measured")
    for case in found.cases:
        print(f" {case.title}: efficiency {case.efficiency:.3f}")
        for row in case.predictions:
            times = f"old_log_prob {_text(row.old_log_prob)}   update_actor {_text(row.update_actor)}"
            print(f"  {row.label:28s} {times}   {row.role}")
    own = {gpu: own_gemm_share(data, gpu) for gpu in GPUS}
    fsdp, megatron = (share / own["a100-sxm-80gb"] for share in (found.fsdp, found.megatron))
    print(f"share of the GPU's own large-GEMM rate: fsdp {fsdp:.2f}, megatron {megatron:.2f}")
    for name, share in own.items():
        print(f"  {name:14s} GEMM {share:.2f}  fsdp {share * fsdp:.2f}  megatron {share * megatron:.2f}")
    efficiency = round(megatron, 2) * own["h100-sxm"]
    print(f"REAL, H100, Megatron-like calls, efficiency {efficiency:.2f}: the share of row 4 carried over")
    for call, timings in check_real(efficiency):
        ways = "   without / with recompute" * call.train
        print(f"  {call.name:32s} {'   '.join(_text(timing) for timing in timings)}{ways}")


if __name__ == "__main__":
    main()
