"""Fit the numbers of training stacks to measured runs of veRL and NeMo-RL, and print predicted against measured.

    python scripts/fit_training.py [--data DIR]

The outcome is written down in `rlsim.cost.train_efficiency` (`TRAFFIC`) and `scripts/calibration/training.py`; the
tables are those of docs/calibration.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.stacks import fit_stacks
from calibration.tables import DATA
from calibration.training_report import gemm_shares, real_table, stacks_table

from rlsim.cost.train_efficiency import efficiency_of
from rlsim.hardware import load_gpu


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    data = parser.parse_args().data
    shares, gpu = gemm_shares(data), load_gpu("h100-sxm")
    found = fit_stacks(data, shares)
    print(f"{found.traffic * 1e3:.2f} bytes for a thousand FLOPs, {found.driver_s * 1e6:.3f} us a padded token\n")
    print(f"predicted / measured\n\n{stacks_table(found)}\n")
    efficiency = efficiency_of(shares[gpu.name], gpu.bf16_flop_per_s / gpu.memory_bytes_per_s, found.traffic)
    print(f"REAL, H100, Megatron-like calls, efficiency {efficiency:.2f}\n\n{real_table(efficiency)}")


if __name__ == "__main__":
    main()
