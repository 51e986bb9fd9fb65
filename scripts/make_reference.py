"""Write the generated parts of the documentation pages from the schemas and column lists that the code uses.

    python scripts/make_reference.py            rewrite docs/*.md in place
    python scripts/make_reference.py --check    change nothing, exit 1 if a page is stale

A generated part lies between `<!-- generated: NAME -->` and `<!-- end generated -->`. The tests fail if one is stale.
Where a page has `<!-- on the site: NAME -->`, the part is made when the site is built and kept nowhere.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlsim.base import catalogue, units
from rlsim.base.hooks import hooks as hooks_of
from rlsim.errors import one_line
from rlsim.experiment.columns import TABLES, Column
from rlsim.experiment.schema import Experiment
from rlsim.models.architectures import Config
from rlsim.models.hardware import Cluster
from rlsim.models.model import load_model
from rlsim.policies.parts import KINDS, ChunkStreaming
from rlsim.policies.registry import BUILTIN, load_policy
from rlsim.results.sweeps.schema import SweepSpec
from rlsim.sim import control
from rlsim.sim.continuous import Continuous
from rlsim.trace.fit import LengthFit
from rlsim.trace.generate import Recipe
from rlsim.trace.mixture import LengthModel
from rlsim.trace.schema import COLUMNS

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reference_code import api, call, cli, table  # beside this file, wherever it is run from

DOCS = Path(__file__).resolve().parent.parent / "docs"
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
ON_SITE = re.compile(r"<!-- on the site: ([\w-]+) -->")

#: How a value with a unit is written in YAML, by the function that reads it: type, unit inside rlsim.
UNITS: dict[Callable[..., Any], tuple[str, str]] = {
    units.seconds: ("time", "s"),
    units.byte_count: ("size", "bytes"),
    units.bandwidth: ("bandwidth", "bytes/s"),
    units.flop_rate: ("compute rate", "FLOP/s"),
    units.token_count: ("length", "tokens"),
}
PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "nothing", Any: "any"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
ROWS = {
    "steps": "one row per case, system, seed and step",
    "responses": "one row per response",
    "stays": "one row per stay of a response at a replica, from its arrival in the queue until it left",
    "calls": "one row per call of a step",
    "switches": "one row per change of a node's degree",
    "spans": "one row per stretch of work of neighbouring GPUs",
}


# ---- pydantic schemas ------------------------------------------------------------------------------------------------


def schema_tables(model: type[BaseModel], title: str, leave_out: Sequence[type[BaseModel]] = ()) -> str:
    """One table per nested model (but for those left out), its keys dotted from the top."""
    return "\n\n".join(_schema_tables(model, "", title, leave_out))


def _schema_tables(
    model: type[BaseModel], prefix: str, title: str, leave_out: Sequence[type[BaseModel]]
) -> Iterator[str]:
    nested: dict[type[BaseModel], list[str]] = {}
    rows = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner, marker = _nested(field.annotation)
        if inner is not None and inner not in leave_out:
            nested.setdefault(inner, []).append(f"{key}{marker}")
        kind, unit = _type(field.annotation, field.metadata)
        if inner in leave_out:
            kind = f"`{inner.__name__}`"
        elif inner is not None:
            kind = f"{'list of' if marker == '[]' else 'keys'} `{key}{marker}.…`"
        meaning = field.description or (_first_line(inner) if inner is not None else "")
        rows.append((f"`{key}`", kind, unit, _default(field, inner is not None), meaning))
    yield f"### {title}\n\n{_first_line(model)}\n\n" + table(("key", "type", "unit", "default", "meaning"), rows)
    for inner, paths in nested.items():  # the same record under several keys gets one table
        heading = ", ".join(f"`{path}`" for path in paths)
        yield from _schema_tables(inner, f"{paths[0]}." if len(paths) == 1 else "*.", heading, leave_out)


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model that a field holds, if it holds one, and `[]` if it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    for inner in get_args(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner, {tuple: "[]", dict: ".*"}.get(get_origin(annotation), "")
    return None, ""


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[str, str]:
    """How a field's type reads, and its unit."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*more, *metadata]
    read_by = [getattr(item, "func", None) for item in metadata]
    known = [UNITS[function] for function in read_by if function in UNITS]
    text, unit = known[-1] if known else _plain(annotation)
    bounds = [(item, bound, sign) for item in metadata for bound, sign in BOUNDS.items()]
    limits = [f"{sign} {getattr(item, bound):g}" for item, bound, sign in bounds if hasattr(item, bound)]
    return " ".join([text, ", ".join(limits)]).strip(), unit


def _plain(annotation: Any) -> tuple[str, str]:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside), ""
    if origin in (Union, types.UnionType):
        kinds = [_type(part) for part in inside if part is not type(None)]
        return ", or ".join(text for text, _ in kinds), next((unit for _, unit in kinds if unit), "")
    if origin is tuple:
        return (f"list of {_many(_type(inside[0])[0])}", "") if inside[-1] is Ellipsis else ("list", "")
    if origin in (dict, Mapping):
        return "mapping", ""
    return PLAIN.get(annotation, str(annotation)), ""


def _many(kind: str) -> str:
    return {"whole number": "whole numbers", "number": "numbers", "text": "texts", "any": "entries"}.get(kind, kind)


def _default(field: FieldInfo, nested: bool) -> str:
    value = field.default
    if value is PydanticUndefined and field.default_factory is None:
        return "**required**"
    if value is None:
        return "none"
    if nested or isinstance(value, BaseModel) or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def policies() -> str:
    """The parameters of rlsim's own policies."""
    parts = []
    for name in sorted(BUILTIN):
        kind = load_policy(name)
        text = f"### `{name}`\n\n{_first_line(kind)} Class `{BUILTIN[name]}`."
        if issubclass(kind, BaseModel):
            text += "\n\n" + table(("parameter", "type", "unit", "default", "meaning"), _parameters(kind))
        parts.append(text)
    return "\n\n".join(parts)


def _parameters(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """A row for each parameter, those of nested ones with their keys dotted."""
    for name, field in kind.model_fields.items():
        key, (inner, _) = prefix + name, _nested(field.annotation)
        value_type, unit = (f"keys `{key}.…`", "") if inner else _type(field.annotation, field.metadata)
        yield f"`{key}`", value_type, unit, _default(field, inner is not None), field.description or ""
        if inner:
            yield from _parameters(inner, f"{key}.")


# ---- columns, view and actions ---------------------------------------------------------------------------------------


def result_tables() -> str:
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
        fields = ", ".join(f"`{name}`" for name in _field_names(record))
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
    for action in get_args(control.Action):
        fields = [
            field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}"
            for field in dataclasses.fields(action)
        ]
        rows.append((f"`{action.__name__}({', '.join(fields)})`", _first_line(action)))
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
            f"**`{kind.__name__}`**: {_first_line(kind)}",
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


def _field_names(record: Any) -> list[str]:
    known = getattr(record, "_fields", None) or [field.name for field in dataclasses.fields(record)]
    return [*known, *(name for name, member in vars(record).items() if isinstance(member, property))]


def _first_line(thing: Any) -> str:
    """The first paragraph of what a thing says of itself: a sentence may go on in the next line."""
    return one_line((inspect.getdoc(thing) or "").partition("\n\n")[0])


PARTS: dict[str, Callable[[], str]] = {
    "experiment": lambda: schema_tables(Experiment, "The file"),
    "sweep": lambda: schema_tables(SweepSpec, "The sweep file"),
    "cluster": lambda: schema_tables(Cluster, "A cluster spelled out"),
    "model": lambda: schema_tables(Config, "A model file"),
    "models": models,
    "recipe": lambda: schema_tables(Recipe, "The recipe", leave_out=(LengthFit, LengthModel)),
    "policies": policies,
    "results": result_tables,
    "trace-columns": trace_columns,
    "view": view,
    "context": context,
    "actions": actions,
    "hooks": hooks,
    "cli": cli,
    "api": api,
}


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
