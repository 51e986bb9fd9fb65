"""Measurements come in; a calibration goes out.

Microbenchmarks, importers of public tables, fits, and a user's own run (`from_run`) or engine (`from_engine`).
"""
