"""The base of everything read from YAML, and YAML errors that name file, line and nearest valid key.

`load` joins ruamel.yaml (YAML 1.2, keeps line numbers, refuses duplicate keys) with pydantic, and reports
all mistakes of a file at once as `file:line:column: key: what was expected`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rlsim.base.reading import read_yaml, shipped
from rlsim.base.refusals import refusal
from rlsim.errors import ConfigError, shown

#: What pydantic says that it expected, and how people say it.
_WORDS = (
    (r"a valid integer.*", "a whole number"),
    (r"a valid number.*", "a number"),
    (r"a valid boolean.*", "true or false"),
    (r"a valid string.*", "text"),
    (r"a valid (tuple|list).*", "a list"),
    (r"a valid dict.*", "a mapping of keys to values"),
    (r"greater than or equal to (.*)", r"at least \1"),
    (r"less than or equal to (.*)", r"at most \1"),
    (r"greater than (.*)", r"more than \1"),
    (r"(.*)", r"\1"),
)


class Schema(BaseModel):
    """A frozen record that refuses unknown keys, and values that a row of `rlsim/data/refusals.yaml` refuses."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _allowed(cls, value: Any, info: ValidationInfo) -> Any:
        if said := refusal(f"{cls.__module__}.{cls.__name__}.{info.field_name}", {"value": value}):
            raise ValueError(said)
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if said := refusal(f"{type(self).__module__}.{type(self).__name__}", {"self": self, **self.__dict__}):
            raise ValueError(said)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields set to other values; what cached properties made of the old ones is left behind."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied


def name_of(value: str) -> str:
    """A name that fits into a line and a file name; raises `ValueError` for another."""
    if not value.strip() or not value.isprintable() or len(value.encode()) > MOST_NAME_BYTES:
        raise ValueError(
            f"expected a name: one line of printable characters, at most {MOST_NAME_BYTES} bytes, got {shown(value)}"
        )
    return value


#: What names results, systems, cases and calls.
Name = Annotated[str, AfterValidator(name_of)]
MOST_NAME_BYTES = 200


S = TypeVar("S", bound=BaseModel)


def load(path: Path, model: type[S], read: Callable[[Path], Any] = read_yaml, *others: Path) -> S:
    """What `read` makes of `path` (and of `others`), validated as `model`, a frozen record.

    Raises `ConfigError` with every mistake in it. Files that have not changed since they were last loaded are not read
    again.
    """
    return cast(S, _loaded(path, model, read, *map(_state, (path, *others))))


@lru_cache(maxsize=256)
def _loaded(path: Path, model: type[BaseModel], read: Callable[[Path], Any], *_: tuple[int, ...] | None) -> BaseModel:
    return validate(read(path), model, source=str(path))


def _state(path: Path) -> tuple[int, ...] | None:
    """What tells a file from another and from itself before a change; None where there is none."""
    try:
        file = path.stat()
    except (OSError, ValueError):
        return None
    return file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size


def validate(data: Any, model: type[S], source: str = "", elsewhere: Mapping[str, str] | None = None) -> S:
    """`data` (plain or with ruamel.yaml's line numbers) as `model`; raises `ConfigError` with every mistake in it.

    `elsewhere`: key paths whose values are not from the file `source`, and where each is from, for messages.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(describe_errors(error, data, model, source, elsewhere))) from None


def describe_errors(
    error: ValidationError, data: Any, model: type[BaseModel], source: str, elsewhere: Mapping[str, str] | None = None
) -> list[str]:
    """One line per mistake: `file:line:column: key.path: what was expected`."""
    messages: dict[tuple[int | str, ...], list[str]] = {}
    got: dict[tuple[int | str, ...], Any] = {}
    for item in error.errors():
        location = _keys_of(item["loc"], data, missing=item["type"] == "missing")
        message = _in_words(item["msg"])
        if item["type"] == "extra_forbidden":
            message = f"unknown key{_nearest(str(location[-1]), _model_at(model, location[:-1]))}"
        elif item["type"] == "missing":
            message = "required, but missing"
        elif "input" in item and not isinstance(item["input"], dict) and repr(item["input"]) not in message:
            got[location] = item["input"]
        messages.setdefault(location, []).append(message)
    lines = []
    for location, found in messages.items():
        if any(other[: len(location)] == location and other != location for other in messages):
            continue  # one form of a value failed as a whole, another within: the latter says where
        key = ".".join(str(part) for part in location)
        origins = (where for other, where in (elsewhere or {}).items() if f"{key}.".startswith(f"{other}."))
        prefix = next(origins, None) or ":".join(part for part in (source, _position(data, location)) if part)
        message = " or ".join(dict.fromkeys([found[0], *(text.removeprefix("expected ") for text in found[1:])]))
        if location in got:
            message += f" (got {shown(got[location])})"
        lines.append(": ".join(part for part in (prefix, key, message) if part))
    return lines


def _in_words(message: str) -> str:
    """A message of pydantic's in people's words."""
    wanted = message.removeprefix("Input should be ")
    if wanted == message:
        return message.removeprefix("Value error, ")
    return "expected " + next(found.expand(said) for raw, said in _WORDS if (found := re.fullmatch(raw, wanted)))


class PlacedText(str):
    """Text of a YAML file that knows its `line:column`."""

    place: str


def placed(items: Any) -> Any:
    """A sequence as read from YAML, its texts with their places; anything else as it is."""
    marks = getattr(items, "lc", None)
    if marks is None or not isinstance(items, list):
        return items
    result: list[Any] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            text = PlacedText(item)
            line, column = marks.item(i)
            text.place = f"{line + 1}:{column + 1}"
            result.append(text)
        else:
            result.append(item)
    return result


def located(source: str, value: Any) -> str:
    """The file that a value is from, and where a mapping, sequence or placed text stands there, for messages."""
    marks = getattr(value, "lc", None)
    place = "" if marks is None or marks.line is None else f"{marks.line + 1}:{marks.col + 1}"
    return ":".join(filter(None, (source, value.place if isinstance(value, PlacedText) else place)))


def _keys_of(location: Sequence[int | str], data: Any, missing: bool) -> tuple[int | str, ...]:
    """A pydantic location without the tags of union members, which are no keys of the data."""
    keys: list[int | str] = []
    for i, part in enumerate(location):
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            if not (missing and i == len(location) - 1):
                continue
        keys.append(part)
    return tuple(keys)


def _position(data: Any, location: Sequence[int | str]) -> str:
    """`line:column` (from 1) of the deepest part of `location` that the data knows the position of."""
    where = ""
    for part in location:
        marks = getattr(data, "lc", None)
        if marks is None:
            break
        try:
            line, column = marks.item(part) if isinstance(part, int) else marks.key(part)
            where = f"{line + 1}:{column + 1}"
            data = data[part]
        except (KeyError, IndexError, TypeError):
            break
    return where


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue  # an element of a list of what was found
        fields = found.model_fields.items() if found else ()
        info = next((one for name, one in fields if part in (name, one.alias)), None)
        found = model_within(info.annotation) if info else None
    return found


def model_within(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone, as an option or in a list; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_within, get_args(annotation))), None)


def _nearest(name: str, model: type[BaseModel] | None) -> str:
    others = shipped("also_called.yaml").get(f"{model.__module__}.{model.__qualname__}", {}) if model else {}
    if name in others:  # what other programs call it
        return f"; here it is {others[name]}"
    known = [info.alias or name for name, info in model.model_fields.items()] if model else []
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; expected one of: {', '.join(known)}" if known else ""
