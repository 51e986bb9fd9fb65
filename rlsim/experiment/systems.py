"""The `systems` of an experiment: names, parts, and the variants that lists of values make.

- pat                              a part as it is
- verl: {tp: [1, 2, 4, 8, best]}   one system per value: verl-tp1, …, verl-best
- name: mine                       parts that work together under a name of their own
  use: [pat, {tail_batching: {eta: 1.25}}, stream]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from rlsim.errors import ConfigError, RlsimError
from rlsim.experiment.system import System, is_layout
from rlsim.policies.parts import Composition, Part, flattened
from rlsim.policies.registry import load_policy
from rlsim.schema import place_of, placed, validate
from rlsim.sim.control import ControlContext, RolloutControl


@dataclass(frozen=True, eq=False)
class PartSpec:
    """A part by name and parameters. `make` gives a fresh one: parts may keep state during a run."""

    policy: str
    parameters: Mapping[str, Any]

    def make(self, shown: str) -> Part:
        """A new part; raises `ConfigError` if it does not take these parameters."""
        kind = load_policy(self.policy)
        if issubclass(kind, BaseModel):
            return validate(dict(self.parameters), kind, source=shown)
        if self.parameters:
            raise ConfigError(f"{shown}: {kind.__name__} takes no parameters")
        return kind()

    @property
    def key(self) -> str:
        """Parts with the same key behave the same."""
        return f"{self.policy} {sorted(self.parameters.items())}"


#: What decides the layout where no part of a system does: the tuned static one.
DEFAULT_LAYOUT = PartSpec("verl", {})


@dataclass(frozen=True, eq=False)
class SystemSpec:
    """One system to run, as the parts it is made of."""

    name: str
    parts: tuple[PartSpec, ...]
    variant: bool = False  # one of several values that a list gave
    shown: str = ""  # for messages: file, line and name

    @property
    def key(self) -> str:
        """Systems with the same key behave the same."""
        return " + ".join(part.key for part in self.parts)

    def make(self) -> System:
        """A new system; raises `ConfigError` if a part does not take its parameters or the parts do not go together."""
        return System.of([part.make(self.shown) for part in self.parts], self.shown)

    def alternatives(self, context: ControlContext) -> Iterator[tuple[SystemSpec, str]]:
        """The systems that a tuned one stands for, each with what it chose; itself if nothing is to be tuned."""
        choices: list[list[tuple[PartSpec, str]]] = []
        for part in self.parts:
            made = part.make(self.shown)
            tried = made.alternatives(context) if isinstance(made, RolloutControl | Composition) else ()
            found = [
                (
                    replace(part, parameters={**part.parameters, **choice}),
                    ", ".join(f"{k} {v}" for k, v in choice.items()),
                )
                for choice in tried
            ]
            choices.append(found or [(part, "")])
        for combination in itertools.product(*choices):
            chosen = ", ".join(what for _, what in combination if what)
            yield replace(self, parts=tuple(part for part, _ in combination)), chosen


def parse_systems(entries: Sequence[Any], source: str = "") -> tuple[SystemSpec, ...]:
    """All systems that these YAML entries stand for, `source` being their file.

    Raises `ConfigError` for unreadable ones or a name used twice, `CatalogueError` for an unknown policy.
    """
    specs = [spec for entry in entries for spec in _parse(entry, source)]
    for spec in specs:
        spec.make()  # what is wrong is found before anything runs
    names = [spec.name for spec in specs]
    for spec in reversed(specs):
        if names.count(spec.name) > 1:
            raise ConfigError(f"{spec.shown}: two systems have this name; give one a `name`, and `use: [...]`")
    return tuple(specs)


def _parse(entry: Any, source: str) -> Iterator[SystemSpec]:
    where = ":".join(part for part in (source, place_of(entry)) if part)
    if isinstance(entry, Mapping) and "use" in entry:
        unknown = set(entry) - {"name", "use"}
        if unknown or not entry.get("name"):
            raise ConfigError(f"{where}: a system with `use` has a `name` and nothing else, got {sorted(entry)}")
        used = entry["use"]
        listed = used if isinstance(used, Sequence) and not isinstance(used, str) else [used]
        if not listed:
            raise ConfigError(f"{where}: system {entry['name']!r}: `use` names no part")
        found = [list(_parse_part(part, source)) for part in placed(listed)]
        base = str(entry["name"])
    else:
        found, base = [list(_parse_part(entry, source))], ""
    for variants in itertools.product(*found):
        name = (base or variants[0][0]) + "".join(suffix for _, suffix, _ in variants)
        shown = f"{where}: system {name!r}"
        parts = tuple(part for _, _, part in variants)
        variant = any(suffix for _, suffix, _ in variants)
        yield SystemSpec(name, _with_layout(parts, shown), variant, shown)


def _with_layout(parts: tuple[PartSpec, ...], shown: str) -> tuple[PartSpec, ...]:
    every = flattened(part.make(shown) for part in parts)
    return parts if any(is_layout(part) for part in every) else (*parts, DEFAULT_LAYOUT)


def _parse_part(entry: Any, source: str) -> Iterator[tuple[str, str, PartSpec]]:
    """Each part that an entry stands for: its label, the suffix that names the variant, and itself."""
    where = ":".join(part for part in (source, place_of(entry)) if part)
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
        suffix = "".join(f"-{_label(key, value)}" for key, value in chosen.items())
        yield label, suffix, PartSpec(policy, {**parameters, **chosen})


def _takes_list(kind: type, key: str, value: Any) -> bool:
    """Whether a parameter is itself a list, so that a list is one value of it."""
    if isinstance(value, str) or not issubclass(kind, BaseModel) or key not in kind.model_fields:
        return True
    return "tuple" in str(kind.model_fields[key].annotation) or "list" in str(kind.model_fields[key].annotation)


def _label(key: str, value: Any) -> str:
    """How a variant's value shows in its name: `best` as it is, a number after what it counts (`tp2`)."""
    return str(value) if isinstance(value, str) else f"{key.rpartition('_')[2]}{value}"
