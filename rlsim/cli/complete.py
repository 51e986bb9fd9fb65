"""What the shell offers after TAB: names of the catalogue, keys of an experiment and names that a key takes.

Where no name fits, nothing is offered, and the shell completes file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rlsim.base import catalogue
from rlsim.base.usercode import load_object

Completer = Callable[[str], list[str]]


def one_of(*names: str) -> Completer:
    """A fixed list of names."""
    return _of(lambda: names)


def _of(names: Callable[[], Iterable[str]]) -> Completer:
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _of_catalogue(*kinds: str, suffix: str = ".yaml") -> Completer:
    return _of(lambda: sorted({name for kind in kinds for name in catalogue.names(kind, suffix)}))


def _loaded(path: str) -> Any:
    return load_object(f"rlsim.{path}", path)


experiments = _of_catalogue("experiments")
sweeps = _of_catalogue("sweeps", "experiments")  # a sweep is made of either
models = _of_catalogue("models")
gpus = _of_catalogue("gpus")
traces = _of_catalogue("traces", suffix=".parquet")
calibrations = _of(lambda: _loaded("cost.calibration:calibration_names")())
verl_versions = _of(lambda: _loaded("frameworks.verl.settings:VERSIONS"))
policies = _of(lambda: sorted(_loaded("policies.registry:policy_names")()))


def clusters(incomplete: str) -> list[str]:
    """Nodes of the catalogue, and so many of them as have been typed."""
    nodes, several, _ = incomplete.partition("x")
    names = list(catalogue.names("clusters"))
    return one_of(*names, *(f"{nodes}x{name}" for name in names if several and nodes.isdecimal()))(incomplete)


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
    return one_of(*(f"{name}=" for name in single))(incomplete)
