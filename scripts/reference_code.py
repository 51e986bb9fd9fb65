"""The generated parts of docs/cli.md and docs/api.md: every command, and every public name from its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer.main

import rlsim
from rlsim.cli import app

#: What docs/api.md lists: a heading, where the names live, and the names.
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "Run and read": ("rlsim", ("run", "read_result", "Result", "RlsimError")),
    "Sweep and compare": ("rlsim", ("sweep", "read_sweep", "SweepResult", "compare", "Comparison")),
    "Look at results": ("rlsim", ("write_report", "write_timeline")),
    "Tune": ("rlsim.results.tune.answer", ("tune", "Wish", "Tuned")),
    "Parts of a system": (
        "rlsim",
        ("RolloutControl", "Batching", "Continuous", "RewardControl", "Rewiring", "Composition", "Schema"),
    ),
    "What a rollout that never stops knows": ("rlsim", ("OpenView", "Ready", "Update")),
    "What a rollout control knows": ("rlsim", ("ControlContext", "RolloutView", "Prompt")),
    "Actions": (
        "rlsim",
        ("Abort", "Borrow", "Extend", "Launch", "Migrate", "Reconfigure", "Release", "Stop", "SwitchWay"),
    ),
    "Testing a policy": ("rlsim", ("check_policy", "Checked", "ContractError")),
}


def api() -> str:
    """Every public name of the package, with its signature and docstring."""
    missing = set(rlsim.__all__) - {"__version__"} - {name for _, names in API.values() for name in names}
    if missing:
        raise SystemExit(f"scripts/reference_code.py: say under which heading docs/api.md has {', '.join(missing)}")
    parts = []
    for heading, (module, names) in API.items():
        parts.append(f"## {heading}")
        parts += [_described(getattr(import_module(module), name), f"{module}.{name}") for name in names]
    return "\n\n".join(parts)


def _described(thing: Any, name: str) -> str:
    text = [f"### `{name}`", _signature(thing, name), _prose(inspect.getdoc(thing) or "")]
    members = []
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(inner) or not inner.__doc__:
            continue
        shown = member if isinstance(value, property) else call(inner, member, not isinstance(value, staticmethod))
        members.append(f"- `{shown}`: {' '.join((inspect.getdoc(inner) or '').split())}")
    return "\n\n".join(part for part in (*text, "\n".join(members)) if part)


def _signature(thing: Any, name: str) -> str:
    fields = getattr(thing, "model_fields", None)
    if inspect.isclass(thing) and (fields is not None or issubclass(thing, BaseException)):
        return ""
    shown = call(thing, name, bound=False)
    return "" if shown == f"{name}()" else f"`{shown}`"


def call(function: Any, name: str, bound: bool) -> str:
    """A call as one writes it: parameters with their defaults, no annotations; `bound`: without `self`."""
    shown: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[bound:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{prefix}{parameter.name}{default}")
    return f"{name}({', '.join(shown)})"


def _prose(text: str) -> str:
    """A docstring as Markdown: indented code stays, nothing of it is taken for a heading."""
    return re.sub(r"^#", r"\\#", text, flags=re.MULTILINE)


def cli() -> str:
    """Every command: what it does, an example, its arguments and options."""
    return "\n\n".join(_commands(typer.main.get_command(app), "rlsim"))


def _commands(command: Any, path: str) -> Iterator[str]:
    level = "##" if path.count(" ") < 2 else "###"
    about = inspect.cleandoc(command.help or "")
    examples = re.findall(r"^ *Example: *(.*)$", f"{about}\n{command.epilog or ''}", re.MULTILINE)
    about = re.sub(r"^ *Example:.*$", "", about, flags=re.MULTILINE).strip()
    text = [f"{level} `{path}`", about]
    text += [f"Example: `{example.strip()}`" for example in examples]
    types = get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    rows = [_parameter(one, types.get(one.name)) for one in command.params if one.name != "help"]
    if rows:
        text.append(table(("name", "value", "meaning"), rows))
    yield "\n\n".join(text)
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _commands(inner, f"{path} {name}")


def _parameter(parameter: Any, annotation: Any) -> tuple[str, str, str]:
    option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if option else [parameter.metavar or parameter.name.upper()]
    value = "" if option and parameter.is_flag else (option and parameter.metavar) or _kind(annotation)
    meaning = parameter.help or ""
    if parameter.required:
        meaning += " Required."
    elif parameter.default not in (None, "", False, (), []) and parameter.show_default:
        meaning += f" Default: `{parameter.default}`."
    return ", ".join(f"`{name}`" for name in names), value, meaning


def _kind(annotation: Any) -> str:
    """How a type reads."""
    inside = [part for part in get_args(annotation) if part is not type(None)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if get_origin(annotation) in (list, tuple):
        return f"{_kind(inside[0])}, repeatable"
    if inside:
        return _kind(inside[0])
    return {int: "whole number", float: "number", Path: "path", str: "text"}.get(annotation, "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ((cell.replace("|", "\\|").replace("<", "&lt;") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
