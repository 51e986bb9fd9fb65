"""Fit the one free training efficiency per framework to measured veRL steps, and print predicted against measured.

    python scripts/fit_training.py [--data DIR]

The outcome is written down in `scripts/calibration/training.py`, from where `fit_calibrations.py` takes it; the tables
are those of docs/calibration.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.tables import DATA, training_runs
from calibration.training_report import own_gemm_share, real_table, verl_table
from calibration.verl import fit_training


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    data = parser.parse_args().data
    found = fit_training(training_runs(data))
    fsdp, megatron = (share / own_gemm_share(data, "a100-sxm-80gb") for share in (found.fsdp, found.megatron))
    print(f"share of the GPU's own large-GEMM rate: fsdp {fsdp:.2f}, megatron {megatron:.2f}")
    print(f"veRL rows, predicted / measured\n\n{verl_table(found)}\n")
    efficiency = round(megatron, 2) * own_gemm_share(data, "h100-sxm")
    print(f"REAL, H100, Megatron-like calls, efficiency {efficiency:.2f}: the share of row 4 carried over\n")
    print(real_table(efficiency))


if __name__ == "__main__":
    main()
