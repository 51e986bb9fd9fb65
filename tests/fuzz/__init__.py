"""Damaged input of every kind through the commands that read it: `python -m tests.fuzz --help`, docs/fuzzing.md.

A case is a seed (files as a user would have them), a few mutations of one of the files, and a target that feeds them to
the code that a command runs. It passes if the target succeeds with sane results or raises `RlsimError`, within the time
limit, and if no file that was there before is changed or gone.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent)
if _TESTS not in sys.path:  # as pytest's `pythonpath` has it: seeds come from the tests' own samples
    sys.path.append(_TESTS)
