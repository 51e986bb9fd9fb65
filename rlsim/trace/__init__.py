"""Dumps, files or a recipe come in; response lengths of prompts and steps go out.

The schema of a trace, reading, importing, sampling, describing, fitting and generating.
"""

from rlsim.trace.files import read_trace, write_trace
from rlsim.trace.sampling import DrawnResponses, StepSampler, limits
from rlsim.trace.schema import COLUMNS, Column, Trace, TraceMeta, make_trace, mix

__all__ = [
    "COLUMNS",
    "Column",
    "DrawnResponses",
    "StepSampler",
    "Trace",
    "TraceMeta",
    "limits",
    "make_trace",
    "mix",
    "read_trace",
    "write_trace",
]
