"""Sweeps: one experiment under many settings, by many processes, into one directory of Parquet tables."""
