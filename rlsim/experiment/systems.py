"""The `systems` of an experiment: names, parts, and the variants that lists of values make.

- pat                              a policy as it is
- verl: {tp: [1, 2, 4, 8, best]}   one system per value: verl-tp1, …, verl-best
- name: mine                       parts that work together under a name of their own
  use: [pat]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from rlsim.errors import ConfigError, RlsimError
from rlsim.policies.registry import load_policy
from rlsim.schema import place_of, placed, validate
from rlsim.sim.control import RolloutControl


@dataclass(frozen=True, eq=False)
class SystemSpec:
    """One system to run. `make` gives a fresh policy: a policy may keep state during a run."""

    name: str
    policy: str
    parameters: Mapping[str, Any]
    variant: bool = False  # one of several values that a list gave
    shown: str = ""  # for messages: file, line and name

    @property
    def key(self) -> str:
        """Systems with the same policy and parameters behave the same."""
        return f"{self.policy} {sorted(self.parameters.items())}"

    def make(self) -> RolloutControl:
        """A new policy with these parameters; raises `ConfigError` if it does not take them."""
        kind = load_policy(self.policy)
        if issubclass(kind, BaseModel):
            return validate(dict(self.parameters), kind, source=self.shown)
        if self.parameters:
            raise ConfigError(f"{self.shown}: {kind.__name__} takes no parameters")
        return kind()


def parse_systems(entries: Sequence[Any], source: str = "") -> tuple[SystemSpec, ...]:
    """All systems that these YAML entries stand for, `source` being their file.

    Raises `ConfigError` for unreadable ones or a name used twice, `CatalogueError` for an unknown policy.
    """
    specs = [spec for entry in entries for spec in _parse(entry, source)]
    for spec in specs:
        spec.make()  # wrong parameters are found before anything runs
    names = [spec.name for spec in specs]
    for spec in reversed(specs):
        if names.count(spec.name) > 1:
            raise ConfigError(f"{spec.shown}: two systems have this name; give one a `name`, and `use: [...]`")
    return tuple(specs)


def _parse(entry: Any, source: str) -> Iterator[SystemSpec]:
    where = ":".join(part for part in (source, place_of(entry)) if part)
    if isinstance(entry, Mapping) and "use" in entry:
        unknown = set(entry) - {"name", "use"}
        if unknown or "name" not in entry:
            raise ConfigError(f"{where}: a system with `use` has a `name` and nothing else, got {sorted(entry)}")
        used = entry["use"]
        parts = used if isinstance(used, Sequence) and not isinstance(used, str) else [used]
        found = [list(_parse(part, source)) for part in placed(parts)]
        if len(found) != 1 or len(found[0]) != 1:
            raise ConfigError(f"{where}: system {entry['name']!r}: exactly one rollout policy is needed, without lists")
        name = str(entry["name"])
        yield replace(found[0][0], name=name, variant=False, shown=f"{where}: system {name!r}")
        return
    if isinstance(entry, str):
        policy = str(entry)
        parameters: Mapping[str, Any] = {}
    elif isinstance(entry, Mapping) and len(entry) == 1:
        policy, parameters = next(iter(entry.items()))
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"{where}: system {policy!r}: expected parameters such as {{tp: 2}}, got {parameters!r}")
    else:
        raise ConfigError(f"{where}: systems: expected a policy's name, or one with parameters, got {entry!r}")
    try:
        kind = load_policy(str(policy))
    except RlsimError as error:
        raise type(error)(f"{where}: {error}") from None
    label = policy.rpartition(":")[2].lower() if ":" in policy else policy
    axes = [
        key for key, value in parameters.items() if isinstance(value, Sequence) and not _takes_list(kind, key, value)
    ]
    for key in axes:
        if not parameters[key]:
            raise ConfigError(f"{where}: system {policy!r}: {key}: the list is empty")
    for values in itertools.product(*(parameters[key] for key in axes)):
        chosen = dict(zip(axes, values, strict=True))
        name = label + "".join(f"-{_label(key, value)}" for key, value in chosen.items())
        shown = f"{where}: system {name!r}"
        yield SystemSpec(name, policy, {**parameters, **chosen}, variant=bool(axes), shown=shown)


def _takes_list(kind: type, key: str, value: Any) -> bool:
    """Whether a parameter is itself a list, so that a list is one value of it."""
    if isinstance(value, str) or not issubclass(kind, BaseModel) or key not in kind.model_fields:
        return True
    return "tuple" in str(kind.model_fields[key].annotation) or "list" in str(kind.model_fields[key].annotation)


def _label(key: str, value: Any) -> str:
    """How a variant's value shows in its name: `best` as it is, a number after what it counts (`tp2`)."""
    return str(value) if isinstance(value, str) else f"{key.rpartition('_')[2]}{value}"
