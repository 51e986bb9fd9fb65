"""Experiments: YAML to validated objects, to runs, to results."""
