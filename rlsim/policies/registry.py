"""Policies by name: those of rlsim, those that installed packages offer, and `module:Class`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from rlsim.errors import ConfigError, unknown_name
from rlsim.sim.control import RolloutControl

#: rlsim's own, loaded when asked for.
BUILTIN = {
    "pat": "rlsim.policies.pat:PAT",
    "verl": "rlsim.policies.verl:VeRL",
}
ENTRY_POINT_GROUP = "rlsim.policies"


def policy_names() -> dict[str, str]:
    """Every known policy and where it is defined (`module:Class`)."""
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**installed, **BUILTIN}


def load_policy(name: str) -> type[RolloutControl]:
    """The policy class of that name, or at `module:Class`.

    Raises `CatalogueError` for an unknown name, `ConfigError` if what is there is no policy.
    """
    known = policy_names()
    if name not in known and ":" not in name:
        raise unknown_name("policy", name, known)
    module_name, _, class_name = known.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} cannot be loaded: {error}") from None
    if not (isinstance(found, type) and issubclass(found, RolloutControl)):
        raise ConfigError(f"policy {name!r} is not a rlsim.RolloutControl")
    return found
