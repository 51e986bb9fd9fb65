"""Every error that rlsim raises for a person to read.

All derive from `RlsimError`; the command line prints the message alone and leaves with exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlsimError(Exception):
    """Base of all errors caused by input; its text is one complete message for a person."""


class ConfigError(RlsimError):
    """A YAML file or an override does not say what the schema expects."""


class CatalogueError(RlsimError):
    """A GPU, cluster, model, calibration, trace or policy of that name does not exist."""


class TraceError(RlsimError):
    """A trace file is missing, damaged or holds values that no response can have."""


class CalibrationError(RlsimError):
    """A calibration is missing, damaged, or does not fit the GPU it is used for."""


class CapacityError(RlsimError):
    """Something does not fit into GPU memory."""


class PolicyError(RlsimError):
    """A policy asked for something that makes no sense at that moment."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> CatalogueError:
    """The error for a name that no catalogue holds, with the nearest valid names."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(names)}"
    return CatalogueError(f"unknown {kind} {name!r}; {hint}")
