"""YAML comes in; checked objects, one run of each system, case and seed, and the tables of a result go out.

`schema`, `load`, `build`, `simulator`, `run`, `frames`, `result`, in the order in which an experiment meets them.
"""
