"""Write the generated parts of the documentation pages from the schemas and column lists that the code uses.

    python scripts/make_reference.py            rewrite docs/*.md in place
    python scripts/make_reference.py --check    change nothing, exit 1 if a page is stale

A generated part lies between `<!-- generated: NAME -->` and `<!-- end generated -->`. The tests fail if one is stale.
Where a page has `<!-- on the site: NAME -->`, the part is made when the site is built and kept nowhere.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer.cli
import typer.main
from pydantic import BaseModel

import rlsim
from rlsim.base import catalogue
from rlsim.base.hooks import hooks as hooks_of
from rlsim.base.reading import read_yaml
from rlsim.base.reference import Key, first_paragraph, keys_of
from rlsim.cli import app
from rlsim.cost.calibration import Residual, load_calibration
from rlsim.experiment.columns import TABLES, Column
from rlsim.experiment.schema import Experiment
from rlsim.models.architectures import Config
from rlsim.models.hardware import Cluster
from rlsim.models.model import load_model
from rlsim.policies.parts import KINDS, ChunkStreaming
from rlsim.policies.registry import BUILTIN, load_policy
from rlsim.results.sweeps.schema import SweepSpec
from rlsim.sim import control
from rlsim.sim.actions import ACTIONS
from rlsim.sim.continuous import Continuous
from rlsim.trace.fit import LengthFit
from rlsim.trace.generate import Recipe
from rlsim.trace.mixture import LengthModel
from rlsim.trace.schema import COLUMNS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
ON_SITE = re.compile(r"<!-- on the site: ([\w-]+) -->")

#: What a table of results has a row for; what docs/api.md lists.
ROWS, API = (read_yaml(Path(__file__).with_suffix(".yaml"))[part] for part in ("rows", "api"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ((cell.replace("|", "\\|").replace("<", "&lt;") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


# ---- pydantic schemas ------------------------------------------------------------------------------------------------


def keys(model: type[BaseModel], title: str, leave_out: Sequence[type[BaseModel]] = ()) -> str:
    """A table of the keys of a record; each record in it has a table of its own."""
    groups: dict[str, list[Key]] = {"": []}
    for row in keys_of(model, "", leave_out):
        groups.setdefault(row.key.rpartition(".")[0], []).append(row)
    parts = [f"### {title}\n\n{first_paragraph(model)}"]
    for group, rows in groups.items():
        parts += [*([f"### `{group}`"] if group else []), _keys_table("key", rows)]
    return "\n\n".join(parts)


def _keys_table(what: str, rows: Iterable[Key]) -> str:
    cells = [
        (f"`{row.key}`", row.kind, row.unit, f"`{row.default}`" if row.default else "", row.meaning) for row in rows
    ]
    return table((what, "type", "unit", "default", "meaning"), cells)


def policies() -> str:
    """The parameters of rlsim's own policies."""
    parts = []
    for name in sorted(BUILTIN):
        kind = load_policy(name)
        parts.append(f"### `{name}`\n\n{first_paragraph(kind)} Class `{BUILTIN[name]}`.")
        if issubclass(kind, BaseModel) and kind.model_fields:
            parts.append(_keys_table("parameter", keys_of(kind)))
    return "\n\n".join(parts)


# ---- columns, view and actions ---------------------------------------------------------------------------------------


def results() -> str:
    """Every column of every result table; those that all tables have come first, once."""
    head = ("column", "type", "unit", "meaning")
    shared = [c for c in next(iter(TABLES.values())) if all(c in columns for columns in TABLES.values())]

    def table_of(columns: Iterable[Column]) -> str:
        return table(head, [(f"`{c.name}`", c.dtype, c.unit, c.meaning) for c in columns])

    parts = ["### Every table\n\nAll tables begin with these columns, which name the run.\n\n" + table_of(shared)]
    for name, columns in TABLES.items():
        rows = ROWS.get(name)
        about = f"{rows[0].upper()}{rows[1:]}.\n\n" if rows else ""
        parts.append(f"### `{name}.parquet`\n\n{about}" + table_of(c for c in columns if c not in shared))
    return "\n\n".join(parts)


def trace_columns() -> str:
    """Every column of a trace."""
    rows = [(f"`{c.name}`", c.kind, c.unit, "yes" if c.required else "", c.meaning) for c in COLUMNS]
    return table(("column", "kind", "unit", "required", "meaning"), rows)


def view() -> str:
    """What a policy sees."""
    rows = []
    for name, member in vars(control.RolloutView).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        shown = name if isinstance(member, property) else call(function, name, bound=True)
        returned = function.__annotations__.get("return", "")
        rows.append((f"`view.{shown}`", f"`{returned}`", (inspect.getdoc(function) or "").replace("\n", " ")))
    parts = [table(("view", "type", "meaning"), rows)]
    for record, plain in ((control.ReplicaView, "a replica"), (control.RequestView, "a request")):
        known = getattr(record, "_fields", None) or [field.name for field in dataclasses.fields(record)]
        more = (name for name, member in vars(record).items() if isinstance(member, property))
        fields = ", ".join(f"`{name}`" for name in (*known, *more))
        parts.append(f"Fields of {plain} (`{record.__name__}`): {fields}.")
    return "\n\n".join(parts)


def context() -> str:
    """What a policy learns before a run."""
    source = inspect.getsource(control.ControlContext)
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))
    rows = [
        (f"`context.{field.name}`", f"`{field.type}`", comments.get(field.name, COSTS if field.name == "costs" else ""))
        for field in dataclasses.fields(control.ControlContext)
    ]
    return table(("context", "type", "meaning"), rows)


COSTS = "the machine: `step(tp)`, `capacity_pages(tp)`, `switch(…)` and `transfer_s(…)`, in seconds and pages"


def actions() -> str:
    """What a policy may return."""
    rows = []
    for action in ACTIONS:
        fields = [
            field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}"
            for field in dataclasses.fields(action)
        ]
        rows.append((f"`{action.__name__}({', '.join(fields)})`", first_paragraph(action)))
    return table(("action", "meaning"), rows)


def hooks() -> str:
    """Every method that the author of a part may override, by the kind of part."""
    parts = []
    for kind in dict.fromkeys((*KINDS, ChunkStreaming, Continuous)):
        rows = []
        for name, hook in ((name, hook) for name, hook in hooks_of(kind).items() if name in vars(kind)):
            member = inspect.getattr_static(kind, name)
            shown = name if isinstance(member, property) else call(member, name, bound=True)
            meaning = " ".join((inspect.getdoc(member) or "").split())
            rows.append((f"`{shown}`", meaning, hook.expected))
        parts += [
            f"**`{kind.__name__}`**: {first_paragraph(kind)}",
            table(("method", "when, and what it gets", "returns"), rows),
        ]
    return "\n\n".join(parts)


def models() -> str:
    """The models of the catalogue: what they hold and cache, and whether they can be simulated."""
    rows = []
    for model in map(load_model, catalogue.names("models")):
        windows = {layer.attention.window_tokens for layer in model.groups} - {None}
        seen = "".join(f"; {tokens:,} tokens in windows" for tokens in sorted(filter(None, windows)))
        state = f"; {model.state_bytes / 2**20:.1f} MiB a sequence" if model.state_bytes else ""
        counts = (f"{model.parameters:,}", f"{model.active_parameters / 1e9:.1f}")
        cached = f"{model.kv_bytes_per_token / 1024:.1f}{seen}{state}"
        rows.append((f"`{model.name}`", *counts, cached, model.simulated))
    return table(("name", "parameters", "active, G", "KV cache, KiB per token", "simulated"), rows)


def residuals() -> str:
    """Errors of the shipped calibrations by operator and engine, from the best to the worst one; derived ones apart."""
    found = collections.defaultdict[tuple[str, str], list[Residual]](list)
    for calibration in (load_calibration(path.stem) for path in sorted((DOCS.parent / "calibration").glob("*.yaml"))):
        for operator, item in calibration.residuals.items():
            found[operator.replace("_", " "), calibration.engine].append(item)
    rows = []
    for key, items in sorted(found.items()):
        spans = []
        for name in ("median", "p90", "bias"):
            shown = [f"{100 * value:.1f}%" for value in sorted(getattr(item, name) for item in items)]
            spans.append(" to ".join(dict.fromkeys((shown[0], shown[-1]))))
        rows.append((*key, str(len(items)), *spans, f"{sum(item.count for item in items):,}"))
    return table(("operator", "engine", "calibrations", "median", "p90", "bias", "rows"), rows)


# ---- commands and public names ---------------------------------------------------------------------------------------


def api() -> str:
    """Every public name of the package, with its signature and docstring."""
    missing = (
        set(rlsim.__all__)
        - {"__version__"}
        - {name for homes in API.values() for names in homes.values() for name in names}
    )
    if missing:
        raise SystemExit(f"scripts/make_reference.py: say under which heading docs/api.md has {', '.join(missing)}")
    parts = []
    for heading, homes in API.items():
        parts.append(f"## {heading}")
        for module, names in homes.items():
            parts += [_described(getattr(import_module(module), name), f"{module}.{name}") for name in names]
    return "\n\n".join(parts)


def _described(thing: Any, name: str) -> str:
    plain = inspect.isclass(thing) and (hasattr(thing, "model_fields") or issubclass(thing, BaseException))
    shown = f"{name}()" if plain else call(thing, name, bound=False)
    # indented code stays, nothing of a docstring is taken for a heading
    prose = re.sub(r"^#", r"\#", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    text = [f"### `{name}`", "" if shown == f"{name}()" else f"`{shown}`", prose]
    members = []
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(inner) or not inner.__doc__:
            continue
        shown = member if isinstance(value, property) else call(inner, member, not isinstance(value, staticmethod))
        members.append(f"- `{shown}`: {' '.join((inspect.getdoc(inner) or '').split())}")
    return "\n\n".join(part for part in (*text, "\n".join(members)) if part)


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


def cli() -> str:
    """Every command, as typer writes it down: what it does, examples, its arguments and options."""
    command = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="rlsim")
    return text.replace("# `rlsim`\n", "## `rlsim`\n", 1).replace("\nExample: ", "\n\nExample: ").strip()


PARTS: dict[str, Callable[[], str]] = {
    "experiment": lambda: keys(Experiment, "The file"),
    "sweep": lambda: keys(SweepSpec, "The sweep file"),
    "cluster": lambda: keys(Cluster, "A cluster spelled out"),
    "model": lambda: keys(Config, "A model file"),
    "recipe": lambda: keys(Recipe, "The recipe", leave_out=(LengthFit, LengthModel)),
}
_MADE = (models, residuals, policies, results, trace_columns, view, context, actions, hooks, cli, api)
PARTS |= {made.__name__.replace("_", "-"): made for made in _MADE}


def refreshed(text: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def for_site(text: str) -> str:
    """A page with the parts that only the site shows."""
    return ON_SITE.sub(lambda found: PARTS[found[1]](), text)


def main(arguments: Sequence[str]) -> int:
    """Rewrite the pages, or check them."""
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    print("stale:" if "--check" in arguments else "rewritten:", ", ".join(stale) or "none")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
