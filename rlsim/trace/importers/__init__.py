"""Reads other programs' traces into rlsim's schema: RL frameworks' rollout dumps, serving traces, distributions.

One file per project. A rollout dump is a `Dump` (keys it is recognised by, and how a row becomes responses), read
row by row; a table of requests is a `Table` (columns by name). `layouts.DUMPS` and `tables.TABLES` list them all.
"""

from rlsim.trace.importers.importing import files_of, import_trace
from rlsim.trace.importers.layouts import DUMPS, FORMATS, KINDS
from rlsim.trace.importers.tables import TABLES

__all__ = ["DUMPS", "FORMATS", "KINDS", "TABLES", "files_of", "import_trace"]
