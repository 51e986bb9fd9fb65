"""Fits of the kernel, collective, host and training costs to measured tables; see `scripts/fit_calibrations.py`."""
