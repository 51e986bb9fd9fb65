"""What does not go together, by the tables that ship with rlsim: conditions are expressions over values, by name.

`rlsim/data/refusals.yaml` has a group of rows for each thing that can be refused: a record read from YAML, by its class
(`rlsim.base.schema.Schema`), or parts of a system. The first row of a group whose condition holds says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from types import CodeType
from typing import Any

from rlsim.base.reading import shipped
from rlsim.errors import ConfigError, nearest, shown, unknown_name

#: Functions that expressions of tables may call.
FUNCTIONS = {
    "abs": abs,
    "any": any,
    "bool": bool,
    "ceil": math.ceil,
    "dict": dict,
    "is_list": lambda value: isinstance(value, list | tuple),
    "is_map": lambda value: isinstance(value, dict),
    "len": len,
    "max": max,
    "min": min,
    "nearest": nearest,
    "next": next,
    "prod": math.prod,
    "set": set,
    "shown": shown,
    "sorted": sorted,
    "str": str,
    "unknown_name": unknown_name,
}


@cache
def code_of(condition: str) -> CodeType:
    """A condition of a table: an expression; the names in it are those of values."""
    return compile(condition, condition, "eval")


def worth(expression: str, values: Mapping[str, Any]) -> Any:
    """What such an expression is worth with these values."""
    return eval(code_of(expression.strip()), {"__builtins__": FUNCTIONS, **values})


def text_of(text: str, values: Mapping[str, Any]) -> str:
    """A text of a table, in whose `{…}` stand expressions over these values, as in an f-string."""
    quotes = "'''" if text.endswith('"') else '"""'
    return str(worth(f"f{quotes}{text}{quotes}", values))


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether such a condition holds of these values."""
    return bool(worth(condition, values))


def said(rows: Iterable[str | Mapping[str, str]], **known: Any) -> list[str]:
    """The texts among these rows, those with a condition (`if`) where it holds, with what is `known` for `{…}`."""
    texts = (row if isinstance(row, str) else row["says"] * holds(row["if"], known) for row in rows)
    return [text_of(text, known) for text in texts if text]


def sentence(group: str, **known: Any) -> str:
    """What a group of rows of `rlsim/data/says.yaml` says together."""
    return "".join(said(shipped("says.yaml")[group], **known))


def rows_of(group: str) -> list[dict[str, str]]:
    """The rows of a group; none where the table has no such group."""
    return shipped("refusals.yaml").get(group, [])  # type: ignore[no-any-return]


def refusal(group: str, values: Mapping[str, Any]) -> str:
    """The words of the first row of a group whose condition holds; empty if none does."""
    return next((text_of(row["says"], values) for row in rows_of(group) if holds(row["if"], values)), "")


def refuse(group: str, error: type[Exception] = ConfigError, /, **values: Any) -> None:
    """Raises `error` with the words of the first row of a group whose condition holds."""
    if said := refusal(group, values):
        raise error(said)
