"""Comparing results: runs and sweeps as one table of runs, and differences with intervals."""
