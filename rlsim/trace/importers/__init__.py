"""Reads other programs' traces into rlsim's schema: RL frameworks' rollout dumps, serving traces, distributions.

Layouts are rows of data/layouts.yaml: a rollout dump is a `Dump` (the keys that tell it, which of them hold what), read
row by row; a table of requests is a `Table` (columns by name).
"""

from rlsim.trace.importers.importing import files_of, import_trace
from rlsim.trace.importers.layouts import DUMPS, FORMATS

__all__ = ["DUMPS", "FORMATS", "files_of", "import_trace"]
