"""What may be written: every key of a record read from YAML, with its type, unit, default and meaning.

The site's reference and `rlsim list` show these rows.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlsim import units
from rlsim.base.reading import shipped
from rlsim.errors import one_line

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


class Key(NamedTuple):
    """A key: its path from the top, how a value is written, the unit of a plain number, what is taken without it."""

    key: str
    kind: str
    unit: str
    default: str
    meaning: str


def keys_of(model: type[BaseModel], prefix: str = "", leave_out: Sequence[type[BaseModel]] = ()) -> Iterator[Key]:
    """Every key of a record, then those of the records in it (but for `leave_out`), dotted; `[]` and `.*` stand for the
    entries of lists and mappings."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        inner, marker = _nested(field.annotation)
        kind, unit = _type(field.annotation, field.metadata)
        if inner is not None:
            several = {"[]": "list of keys", ".*": "mapping to keys"}.get(marker, "keys")
            kind = inner.__name__ if inner in leave_out else f"{several} …"
        meaning = meaning_of(model, name) or (first_paragraph(inner) if inner is not None else "")
        yield Key(key, kind, unit, _default(field, inner is not None), meaning)
        if inner is not None and inner not in leave_out:
            yield from keys_of(inner, f"{key}{marker}.", leave_out)


def meaning_of(model: type[BaseModel], name: str) -> str:
    """What a field of a record means: as it says itself, else a row of `rlsim/data/meanings.csv` on it or a class that
    it is derived from; empty if neither."""
    known = {record: meaning for record, key, meaning in shipped("meanings.csv") if key == name}
    own = (known.get(kind.__name__) for kind in model.__mro__)
    return model.model_fields[name].description or next(filter(None, own), "")


def first_paragraph(thing: Any) -> str:
    """What a thing says of itself first; a sentence may go on in the next line."""
    return one_line((inspect.getdoc(thing) or "").partition("\n\n")[0])


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
        return " or ".join(map(str, inside)), ""
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
        return "required"
    if value is None:
        return "none"
    if nested or isinstance(value, BaseModel) or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
