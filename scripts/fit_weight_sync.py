"""Fit the constants of weight syncs to measured ones, and print them with the errors on settings left out.

    python scripts/fit_weight_sync.py

The outcome is `rlsim.cost.weight_sync.FITTED`. Which rows are fitted, which are predicted and which are left out is
written down in `evidence/weight_syncs.yaml`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rlsim.validate.parts import Options
from rlsim.validate.weight_sync import fitted, left_out, read_syncs, seconds, settings


def main() -> None:
    """Fit and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    used = settings().used
    measured = {row: time for row, (_, time) in read_syncs(Options().evidence).items()}
    found = fitted(measured, [row for row, setting in used.items() if setting.kind == "input"])
    for name, value in asdict(found).items():
        print(f"{name} = {value:.4g}")
    print("\nid case kind measured error")
    for row, setting in used.items():
        error = seconds(setting, found) / measured[row] - 1
        print(f"{row:2d} {setting.case:27s} {setting.kind:6s} {measured[row]:6.3f} {error:+.1%}")
    print("\nfitted to all rows of other settings; open: they leave a constant open that the row depends on")
    for row, predicted in left_out(measured):
        error_text = "open" if predicted is None else f"{predicted / measured[row] - 1:+.1%}"
        print(f"{row:2d} {used[row].case:27s} {error_text}")


if __name__ == "__main__":
    main()
