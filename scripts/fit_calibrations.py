"""Fit `calibration/*.yaml` and write `docs/calibration.md` from measured kernel tables.

    python scripts/fit_calibrations.py [--data DIR] [--only GPU-ENGINE] [--out DIR]

DIR holds `kernels/aiconfigurator`, `kernels/vidur`, `engine` and `rl_timings` (default: `../shared/data`). The tables
themselves are never copied; what is written are fitted constants, their residuals on held-out shapes and where they
come from. Running it again on the same data gives the same bytes. With `--only` one file is fitted and written, and
the page is left as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.catalogue import Catalogue
from calibration.report import report
from calibration.tables import DATA

from rlsim.calibrate.fit.common import percent
from rlsim.calibrate.write import write_yaml

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    parser.add_argument("--only", choices=Catalogue.names(), metavar="GPU-ENGINE", help="fit and write this one only")
    parser.add_argument("--out", type=Path, default=ROOT, help="where calibration/ and docs/ are written")
    options = parser.parse_args()
    catalogue = Catalogue(options.data)
    folder = options.out / "calibration"
    folder.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else catalogue.names():
        calibration = catalogue.calibration(name)
        write_yaml(calibration, folder)
        errors = [f"{key} {percent(item.median)}/{percent(item.p90)}" for key, item in calibration.residuals.items()]
        print(f"{name}: {', '.join(errors)}")
    if not options.only:
        page = options.out / "docs" / "calibration.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report(catalogue), encoding="utf-8")


if __name__ == "__main__":
    main()
