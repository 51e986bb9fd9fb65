"""Fit host time and front ends to measured serving runs: `rlsim/validate/transfer_fits.yaml`.

    python scripts/fit_serving.py [--data DIR] [--only ENGINE]

One fit to all runs of an engine, which `fit_calibrations.py` puts into the calibrations, one without each TP, and one
without each TP and term, which `rlsim validate transfer` judges. Kernels are fitted anew from the tables. It takes
minutes on two cores; with `--only` the fits of the other engines are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from calibration.catalogue import SERVED_ON, Catalogue
from calibration.gpus import OLDER
from calibration.host import Serving
from calibration.provenance import DATE
from calibration.tables import DATA

from rlsim.calibrate.write import write_record
from rlsim.validate.parts import Options
from rlsim.validate.serving import CALIBRATIONS, SERVED, TABLE, read_runs
from rlsim.validate.transfer import FITS, SettingFit, TransferFits, shipped_fits


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the measured tables")
    parser.add_argument("--only", choices=sorted(SERVED), metavar="ENGINE", help="fit this engine only")
    options = parser.parse_args()
    catalogue, runs = Catalogue(options.data), read_runs(Options().evidence)
    kept = {engine: [fit for fit in _known() if fit.engine == engine] for engine in SERVED}
    for engine in [options.only] if options.only else ("vllm", "sglang", "trtllm"):  # the longest last
        serving = Serving.start(engine, runs, catalogue.kernels(*OLDER.get(CALIBRATIONS[engine], (SERVED_ON, engine))))
        kept[engine] = []
        for fit in serving.fits():
            print(engine, fit.left_out or "all", fit.without, fit.intervals, flush=True)
            kept[engine].append(fit)
        _write([fit for fits in kept.values() for fit in fits])


def _known() -> tuple[SettingFit, ...]:
    return shipped_fits().fits if FITS.exists() else ()


def _write(fits: Sequence[SettingFit]) -> None:
    source = f"evidence/{TABLE} (whole engines on H100, measured by users of NVIDIA aiconfigurator)"
    script = "scripts/fit_serving.py"
    record = TransferFits(date=DATE, script=script, source=source, fits=tuple(fits))
    write_record(record.model_dump(exclude_defaults=True), FITS, f"Fitted by {script}; change that, not this. Seconds.")


if __name__ == "__main__":
    main()
