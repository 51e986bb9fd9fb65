"""Mutation tests: faults put into the engine, the costs and the policies, and which of them the tests notice.

`python -m tests.mutation --help`, docs/mutation.md.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent)
if _TESTS not in sys.path:  # as pytest's `pythonpath` has it
    sys.path.append(_TESTS)
