"""YAML comes in; checked objects, one run of each system, case and seed, and the tables of a result go out.

`load` (into `schema`), `run`, `case`, `build`, `simulator`, `frames`, `result`: in this order an experiment meets them.
"""
