"""The generated parts of docs/cli.md and docs/api.md: every command, and every public name from its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import typer.cli
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
    """Every command, as typer writes it down: what it does, examples, its arguments and options."""
    command = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="rlsim")
    return text.replace("# `rlsim`\n", "## `rlsim`\n", 1).replace("\nExample: ", "\n\nExample: ").strip()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ((cell.replace("|", "\\|").replace("<", "&lt;") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
