"""Fit `calibration/*.yaml` from measured kernel tables, or fit other constants.

    python scripts/fit_calibrations.py [--data DIR] [--only GPU-ENGINE] [--out DIR]
    python scripts/fit_calibrations.py PART [--data DIR] [--only ENGINE]

DIR holds `kernels/aiconfigurator`, `kernels/vidur`, `engine` and `rl_timings` (default: `../shared/data`). The tables
themselves are never copied; what is written are fitted constants, their residuals on held-out shapes and where they
come from. Running it again on the same data gives the same bytes. With `--only` one file is fitted and written.
What fitted the A40's two files, collectives across nodes, engines' memory, launches of experts and the stage shares of
RollPacker went after the commits that they name.

Other parts print the constants that rlsim's code or files hold:
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from calibration.catalogue import DATA, Catalogue

from calibration import host, training
from rlsim.calibrate.fit.common import percent
from rlsim.calibrate.write import write_yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "serving": host.main,
    "training": training.main,
    "transfer": training.transfer,
}


def calibrations(options: argparse.Namespace) -> None:
    """Fit and write the files."""
    catalogue, folder = Catalogue(options.data), options.out / "calibration"
    if options.only not in (None, *catalogue.names()):
        raise SystemExit(f"--only {options.only}: expected one of {', '.join(catalogue.names())}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else catalogue.names():
        calibration = catalogue.calibration(name)
        write_yaml(calibration, folder)
        errors = [f"{key} {percent(item.median)}/{percent(item.p90)}" for key, item in calibration.residuals.items()]
        print(f"{name}: {', '.join(errors)}")


def main() -> None:
    """Run one part."""
    parts = {"calibrations": calibrations, **PARTS}
    said = "\n".join(f"  {name:14}{inspect.getdoc(parts[name])}".replace("\n", "\n" + " " * 16) for name in PARTS)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{said}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="calibrations", choices=parts)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    parser.add_argument("--only", metavar="NAME", help="fit and write this calibration, or this engine's, only")
    parser.add_argument("--out", type=Path, default=ROOT, help="where calibration/ is written")
    options = parser.parse_args()
    parts[options.part](options)


if __name__ == "__main__":
    main()
