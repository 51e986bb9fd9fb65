"""What the shell offers after TAB: names of the catalogue, keys of an experiment and names that a key takes.

Where no name fits, nothing is offered, and the shell completes file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlsim.base import catalogue

Completer = Callable[[str], list[str]]


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def one_of(*names: str) -> Completer:
    """A fixed list of names."""
    return lambda incomplete: _fitting(names, incomplete)


def _of_catalogue(*kinds: str, suffix: str = ".yaml") -> Completer:
    return lambda incomplete: _fitting(sorted({n for kind in kinds for n in catalogue.names(kind, suffix)}), incomplete)


experiments = _of_catalogue("experiments")
sweeps = _of_catalogue("sweeps", "experiments")  # a sweep is made of either
models = _of_catalogue("models")
gpus = _of_catalogue("gpus")
traces = _of_catalogue("traces", suffix=".parquet")


def clusters(incomplete: str) -> list[str]:
    """Nodes of the catalogue, and so many of them as have been typed."""
    nodes, several, _ = incomplete.partition("x")
    names = list(catalogue.names("clusters"))
    return _fitting([*names, *(f"{nodes}x{name}" for name in names if several and nodes.isdecimal())], incomplete)


def calibrations(incomplete: str) -> list[str]:
    """Calibrations of the catalogue."""
    from rlsim.cost.calibration import calibration_names

    return _fitting(calibration_names(), incomplete)


def verl_versions(incomplete: str) -> list[str]:
    """Releases of veRL whose defaults are known."""
    from rlsim.frameworks.verl.settings import VERSIONS

    return _fitting(VERSIONS, incomplete)


def policies(incomplete: str) -> list[str]:
    """Shipped policies."""
    from rlsim.policies.registry import policy_names

    return _fitting(sorted(policy_names()), incomplete)


#: Names that a key of an experiment takes.
_VALUES = {"cluster": clusters, "model": models, "calibration": calibrations, "trace.path": traces}


def settings(incomplete: str) -> list[str]:
    """What `--set` takes: keys with their equals sign, then names (in shells that do not split words at `=`)."""
    from rlsim.base.reference import keys_of
    from rlsim.experiment.schema import Experiment

    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in _VALUES.get(key, one_of())(value)]
    single = (row.key for row in keys_of(Experiment) if not row.kind.endswith("…") and not {"[", "*"} & {*row.key})
    return _fitting((f"{name}=" for name in single), incomplete)
