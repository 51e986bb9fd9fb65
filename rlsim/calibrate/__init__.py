"""Measurements in, a calibration out: microbenchmarks, importers of public tables, fits, and a user's own run."""
