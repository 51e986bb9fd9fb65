"""Print how far calibrations are off on settings that no fit has seen: `rlsim.cost.draw.MEASURED`.

    python scripts/fit_transfer.py [--data DIR]

- `rollout` and `tilt`: time per output token of every measured serving run, with the fit that has not seen its TP;
- `calls`: log-probs and updates of measured runs, each group left out of the fit of the training stack. One row is not
  counted: veRL's row 4, whose log has 20 to 36 s in every call that no tokens change;
- `sync`: weight syncs that no constant is fitted to.

Each is the root of the mean square over settings (syncs: over rows).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from calibration.stacks import fit_stacks
from calibration.tables import DATA
from calibration.training_report import gemm_shares

from rlsim.cost.draw import TransferErrors
from rlsim.validate.coverage import errors_by_setting, line, spread
from rlsim.validate.parts import Options
from rlsim.validate.serving import read_runs
from rlsim.validate.transfer import kind_rows, shipped_fits
from rlsim.validate.weight_sync import section


def transfer_errors(data: Path) -> TransferErrors:
    """From the measured tables in a folder."""
    rows = kind_rows(read_runs(data), shipped_fits(), "left-out")
    rollout = spread(line(errors) for errors in errors_by_setting(rows, "tpot_s").values())
    return TransferErrors(rollout.level, rollout.tilt, calls_error(data), sync_error(data))


def calls_error(data: Path) -> float:
    """Of log-probs and updates, by group."""
    squares = []
    for case in fit_stacks(data, gemm_shares(data)).cases:
        if case.title.startswith(("without ", "driver, without ")):
            pairs = [(timing.predicted_s, timing.measured_s) for _, *both in case.rows for timing in both]
            squares.append(np.mean([np.log(predicted / measured) ** 2 for predicted, measured in pairs]))
    return float(np.sqrt(np.mean(squares)))


def sync_error(data: Path) -> float:
    """Of syncs that are predicted."""
    rows = section(Options(data=data)).rows  # type: ignore[union-attr]
    return float(np.sqrt(np.mean([np.log1p(row.error) ** 2 for row in rows if row.kind == "output"])))


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    for name, value in vars(transfer_errors(parser.parse_args().data)).items():
        print(f"{name}={value:.3f}")


if __name__ == "__main__":
    main()
