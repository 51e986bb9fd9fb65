"""Hooks: the methods of a part that its author overrides and the engine calls.

Every kind of part derives from `Hooked` and marks its hooks. A class of a user's own is guarded when it is defined: an
exception in one of its hooks, or a returned value that makes no sense, becomes one `PolicyError` that names the class,
the hook, and the line of the user's file. rlsim's own classes are left as they are: their exceptions are rlsim's bugs.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

from rlsim.base.usercode import defined, is_ours, told
from rlsim.errors import PolicyError, RlsimError, shown

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Hook(NamedTuple):
    """What a hook may return: in words, whether a value (and the arguments of the call) fits them, and what would in a
    call with these arguments.
    """

    expected: str
    fits: Callable[..., bool]
    possible: Callable[..., object]


def hook(
    expected: str = "",
    fits: Callable[..., bool] = lambda *_: True,
    possible: Callable[..., object] = lambda *_: None,
) -> Callable[[_Function], _Function]:
    """Marks a method, or the function of a property, as a hook; without arguments its value does not matter."""

    def mark(function: _Function) -> _Function:
        function.hook = Hook(expected, fits, possible)  # type: ignore[attr-defined]
        return function

    return mark


class Hooked:
    """Base of all kinds of parts."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if is_ours(cls.__module__):
            return
        _refuse_misspelt(cls)
        for name, kind in hooks(cls).items():
            found = inspect.getattr_static(cls, name)
            function = _function(found)
            if name in vars(cls) | vars(cls).get("__annotations__", {}):
                _refuse_value(cls, name, kind, found)
            if inspect.isfunction(function) and not is_ours(function.__module__) and not hasattr(function, "hook"):
                guarded: Any = _guarded(function, name, kind)
                setattr(cls, name, property(guarded) if isinstance(found, property) else guarded)


def _refuse_value(cls: type, name: str, kind: Hook, found: Any) -> None:
    """Raises `PolicyError` for a parameter named as a hook, which nothing would ever ask for, and for a plain attribute
    in the place of a property that has no value of its kind.
    """
    annotation = str(vars(cls).get("__annotations__", {}).get(name, "ClassVar"))
    if hasattr(cls, "model_config") and "ClassVar" not in annotation:
        what = "is a hook, and can be no parameter: name the parameter otherwise, and return it from a property"
        raise PolicyError(f"{cls.__name__}.{name}: {what} {name}")
    if inspect.isfunction(_function(found)) or isinstance(found, classmethod | staticmethod):
        return
    base = next(vars(one)[name] for one in cls.__mro__[1:] if name in vars(one))
    if not isinstance(base, property) or not kind.fits(found):
        raise PolicyError(f"{cls.__name__}.{name}: is {shown(found, 200)}, expected {kind.expected or 'a method'}")


def hooks(kind: type) -> dict[str, Hook]:
    """The hooks of a kind of part, by name, as its bases in rlsim mark them."""
    marked = {}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            mark = getattr(_function(member), "hook", None)
            if isinstance(mark, Hook):
                marked[name] = mark
    return marked


def _refuse_misspelt(cls: type) -> None:
    """Raises `PolicyError` for a public method that is named nearly as a hook, or as `on_…`, and is none: nothing would
    ever call it.
    """
    known = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name, member in vars(cls).items():
        function = _function(member)
        if name.startswith("_") or name in known or not inspect.isfunction(function):
            continue
        near = difflib.get_close_matches(name, hooks(cls), n=1, cutoff=0.6 if name.startswith("on_") else 0.85)
        if near or name.startswith("on_"):
            what = f"is no hook; did you mean {near[0]!r}?" if near else f"is no hook: {', '.join(sorted(hooks(cls)))}."
            what += " A method of your own may have any name that begins with an underscore"
            raise PolicyError(f"{cls.__name__}.{name}: {defined(function, what)}")


def overridden(kind: type) -> list[str]:
    """The hooks that a class does not leave as they are."""
    return [name for name in hooks(kind) if sum(name in vars(base) for base in kind.__mro__) > 1]


def misused(part: object, name: str, what: str) -> PolicyError:
    """The error of a hook that asked for something that makes no sense, with the line at which the hook is defined."""
    function: Any = inspect.getattr_static(type(part), name)
    return PolicyError(f"{type(part).__name__}.{name}: {defined(inspect.unwrap(_function(function)), what)}")


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else member


def _guarded(function: Callable[..., Any], name: str, kind: Hook) -> Callable[..., Any]:
    @wraps(function)
    def called(self: object, *arguments: Any, **keywords: Any) -> Any:
        try:
            value = function(self, *arguments, **keywords)
            if isinstance(value, Iterator):  # a generator runs here, where its exceptions are told
                value = list(value)
        except PolicyError:
            raise
        except RlsimError as error:  # of what it asked: the costs of a layout that is none
            raise type(error)(f"{type(self).__name__}.{name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{type(self).__name__}.{name}: {told(error, function)}") from error
        if not kind.fits(value, *arguments, *keywords.values()):
            here = kind.possible(*arguments, *keywords.values())
            there_are = f", here {here}" if here else ""
            raise misused(self, name, f"returned {shown(value, 200)}, expected {kind.expected}{there_are}")
        return value

    called.hook = kind  # type: ignore[attr-defined]
    return called


# ---- values that hooks return ----------------------------------------------------------------------------------------


def is_whole(value: object, least: int = 1) -> bool:
    """Whether it is a whole number, and not below `least`; numpy's count too."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object, least: float = 0.0) -> bool:
    """Whether it is a number not below `least`, which NaN never is."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= least
