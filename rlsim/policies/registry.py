"""Policies by name: those of rlsim, those that installed packages offer, `module:Class` and `module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import entry_points
from types import new_class
from typing import Any

from rlsim.base.catalogue import DATA
from rlsim.base.schema import Schema
from rlsim.base.usercode import load_object
from rlsim.errors import ConfigError, unknown_name
from rlsim.policies.parts import KIND_NAMES, KINDS, Part
from rlsim.sim.control import RolloutControl, RolloutView

#: rlsim's own, loaded when asked for.
BUILTIN = dict(line.split(",") for line in (DATA / "policies.csv").read_text(encoding="utf-8").splitlines())
ENTRY_POINT_GROUP = "rlsim.policies"


def policy_names() -> dict[str, str]:
    """Every known policy and where it is defined (`module:Class`)."""
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**installed, **BUILTIN}


def home_of(name: str) -> str:
    """Where a policy is defined (`module:Class`); raises `CatalogueError` for an unknown name."""
    if name in BUILTIN:
        return BUILTIN[name]  # without a look through the installed packages, which takes milliseconds
    if ":" in name:
        return name
    known = policy_names()
    if name not in known:
        raise unknown_name("policy", name, known)
    return known[name]


def load_policy(name: str) -> type[Part]:
    """The policy class of that name, or at `module:Class`: a part of a system. A function becomes one (`control_of`).

    Raises `CatalogueError` for an unknown name, `ConfigError` if what is there is no policy.
    """
    home = home_of(name)
    found = load_object(home, f"policy {name!r}" if name == home else f"policy {name!r} ({home})")
    if inspect.isfunction(found):
        return control_of(found)
    if not (isinstance(found, type) and issubclass(found, KINDS)):
        raise ConfigError(f"policy {name!r} is no part of a system: no class of the kinds {KIND_NAMES}")
    if found in KINDS:
        raise ConfigError(f"policy {name!r} is a kind of part, not a part: derive a class from it")
    return found


def is_control(function: object) -> bool:
    """Whether it is a function of a `RolloutView`: its first argument is `view`."""
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "view"


@cache
def control_of(function: Callable[..., Any]) -> type[Part]:
    """The rollout control whose `on_finish` is this function of a view; its other arguments are parameters.

    Raises `ConfigError` for a function whose first argument is not `view`, or one that takes any number of them.
    """
    arguments = list(inspect.signature(function, eval_str=True).parameters.values())
    if not is_control(function) or any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in arguments):
        raise ConfigError(f"{function.__name__}: a function decides as `def {function.__name__}(view, parameter=1): …`")
    fields = {one.name: Any if one.annotation is one.empty else one.annotation for one in arguments[1:]}

    @wraps(function)
    def on_finish(self: object, view: RolloutView) -> Any:
        return function(view, **{name: getattr(self, name) for name in fields})

    body = {"__module__": function.__module__, "__doc__": function.__doc__, "__annotations__": fields}
    body |= {one.name: one.default for one in arguments[1:] if one.default is not one.empty} | {"on_finish": on_finish}
    return new_class(function.__name__, (Schema, RolloutControl), {}, lambda namespace: namespace.update(body))
