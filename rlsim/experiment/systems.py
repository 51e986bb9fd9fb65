"""The `systems` of an experiment: names, parts, and the variants that lists of values make.

- pat                              a policy as it is
- verl: {tp: [1, 2, 4, 8, best]}   one system per value: verl-tp1, …, verl-best
- name: mine                       parts that work together under a name of their own
  use: [pat]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlsim.errors import ConfigError
from rlsim.policies.registry import load_policy
from rlsim.schema import validate
from rlsim.sim.control import RolloutControl


@dataclass(frozen=True, eq=False)
class SystemSpec:
    """One system to run. `make` gives a fresh policy: a policy may keep state during a run."""

    name: str
    policy: str
    parameters: Mapping[str, Any]
    variant: bool = False  # one of several values that a list gave

    @property
    def key(self) -> str:
        """Systems with the same policy and parameters behave the same."""
        return f"{self.policy} {sorted(self.parameters.items())}"

    def make(self) -> RolloutControl:
        """A new policy with these parameters; raises `ConfigError` if it does not take them."""
        kind = load_policy(self.policy)
        if issubclass(kind, BaseModel):
            return validate(self.parameters, kind, source=self.name)
        if self.parameters:
            raise ConfigError(f"system {self.name}: {kind.__name__} takes no parameters")
        return kind()


def parse_systems(entries: Sequence[Any], source: str = "") -> tuple[SystemSpec, ...]:
    """All systems that these YAML entries stand for. Raises `ConfigError` for unreadable ones or a name used twice."""
    specs = [spec for entry in entries for spec in _parse(entry, source)]
    for spec in specs:
        spec.make()  # wrong parameters are found before anything runs
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{source}: systems: two systems are named {name!r}; give one a `name`")
    return tuple(specs)


def _parse(entry: Any, source: str) -> Iterator[SystemSpec]:
    if isinstance(entry, Mapping) and "use" in entry:
        unknown = set(entry) - {"name", "use"}
        if unknown or "name" not in entry:
            raise ConfigError(
                f"{source}: systems: a system with `use` has a `name` and nothing else, got {sorted(entry)}"
            )
        parts = (
            entry["use"] if isinstance(entry["use"], Sequence) and not isinstance(entry["use"], str) else [entry["use"]]
        )
        found = [list(_parse(part, source)) for part in parts]
        if len(found) != 1 or len(found[0]) != 1:
            raise ConfigError(
                f"{source}: system {entry['name']!r}: exactly one rollout policy is needed, without lists"
            )
        yield SystemSpec(str(entry["name"]), found[0][0].policy, found[0][0].parameters)
        return
    if isinstance(entry, str):
        policy = str(entry)
        parameters: Mapping[str, Any] = {}
    elif isinstance(entry, Mapping) and len(entry) == 1:
        policy, parameters = next(iter(entry.items()))
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"{source}: system {policy!r}: expected parameters such as {{tp: 2}}, got {parameters!r}")
    else:
        raise ConfigError(f"{source}: systems: expected a policy's name, or one with parameters, got {entry!r}")
    kind = load_policy(policy)
    label = policy.rpartition(":")[2].lower() if ":" in policy else policy
    axes = [
        key for key, value in parameters.items() if isinstance(value, Sequence) and not _takes_list(kind, key, value)
    ]
    for values in itertools.product(*(parameters[key] for key in axes)):
        chosen = dict(zip(axes, values, strict=True))
        suffix = "".join(f"-{_label(key, value)}" for key, value in chosen.items())
        yield SystemSpec(label + suffix, policy, {**parameters, **chosen}, variant=bool(axes))


def _takes_list(kind: type, key: str, value: Any) -> bool:
    """Whether a parameter is itself a list, so that a list is one value of it."""
    if isinstance(value, str) or not issubclass(kind, BaseModel) or key not in kind.model_fields:
        return True
    return "tuple" in str(kind.model_fields[key].annotation) or "list" in str(kind.model_fields[key].annotation)


def _label(key: str, value: Any) -> str:
    """How a variant's value shows in its name: `best` as it is, a number after what it counts (`tp2`)."""
    return str(value) if isinstance(value, str) else f"{key.rpartition('_')[2]}{value}"
