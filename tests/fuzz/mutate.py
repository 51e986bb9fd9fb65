"""Mutations of files: of their bytes, of the tree that they hold (YAML, JSON, pickles), of their tables' cells.

A mutation is named by its kind and the seed of its own random numbers, so that a failing case can leave out one after
the other and is repeated exactly.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 0.5, -0.5, 1e-320, 1e-12, 1e12, 1e30, 1e308, -1e308,
    math.nan, math.inf, -math.inf, 2**31, 2**63, 2**64, -(2**63), 10**400,
    "", " ", "x", "x" * 300, "x" * 5000, "nan", "inf", "-inf", "1e999", "1e-999", "9" * 5000, "-5", "0x10", "1_000",
    "1,000", "²", "24K", "20 ms", "1e308 s", "80 GiB", "null", "~", "[", "{", "'", '"', "\x00", "a\x00b", "\x1b[31mred",
    "</script>", "\ud800", "é", "日本", "../../x", "/", "~/x", ".", "a.b", "${x}", "%s", "2001-13-45",
    "1900-01-01 00:00:00", "1600-01-01T00:00:00Z", "module:thing", "builtins:exit", "time:tzset",
    [], {}, [None], [[]], [1, 2], [1, "a"], [math.nan], {"a": 1}, {"a": {"b": []}}, b"\xff\xfe",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NASTY_TEXT = tuple(
    str(value).encode("utf-8", "surrogatepass") if not isinstance(value, bytes) else value for value in NASTY
)


@dataclass(frozen=True)
class Mutation:
    """One change of a file: what kind, and the seed of its choices."""

    kind: str
    seed: int


def plan(name: str, rng: random.Random) -> tuple[Mutation, ...]:
    """One to four mutations of a file of that name."""
    kinds = [*_BYTES, "number"]
    structured = _structured(name)
    count = rng.choice((1, 1, 1, 2, 2, 3, 4))
    return tuple(
        Mutation(
            rng.choice(structured) if structured and rng.random() < 0.7 else rng.choice(kinds), rng.getrandbits(48)
        )
        for _ in range(count)
    )


def mutated(name: str, data: bytes, mutations: Sequence[Mutation], others: Sequence[bytes]) -> bytes:
    """`data` of the file `name` after `mutations`; `others` are files whose parts may be spliced in."""
    for one in mutations:
        rng = random.Random(one.seed)
        if name.endswith(".gz") and rng.random() < 0.6:  # what the file holds, and not the compressed bytes
            try:
                data = gzip.compress(_change(name[:-3], gzip.decompress(data), one.kind, rng, others), mtime=0)
                continue
            except (OSError, EOFError, zlib.error):
                pass
        data = _change(name, data, one.kind, rng, others)
    return data


def _change(name: str, data: bytes, kind: str, rng: random.Random, others: Sequence[bytes]) -> bytes:
    if kind in _BYTES:
        return _BYTES[kind](data, rng, others)
    if kind == "number":
        return _number(data, rng)
    changed = _STRUCTURED[kind](name, data, rng)
    return _BYTES["flip"](data, rng, others) if changed is None else changed


def _structured(name: str) -> tuple[str, ...]:
    plain = name.removesuffix(".gz")
    if plain.endswith((".yaml", ".yml", ".json", ".jsonl", ".ndjson")):
        return ("tree",)
    if plain.endswith(".csv"):
        return ("cells",)
    if plain.endswith((".parquet", ".pq")):
        return ("table",)
    return ("pickle",) if plain.endswith(".pt") else ()


# Bytes ----------------------------------------------------------------------------------------------------------------


def _flip(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\x00")
    for _i in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 4, 16, 64, 256)))


def _insert(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(4)
    new = (
        b"\x00" * rng.choice((1, 4, 64)), rng.randbytes(rng.choice((1, 4, 16))), rng.choice(_NASTY_TEXT),
        bytes([rng.choice(b"[]{}:,-\"'#&*!|>%@`\t\r\n\x1b\x85\xa0=$()")]) * rng.choice((1, 1, 1, 2, 40)),
    )[kind]  # fmt: skip
    return data[:at] + new + data[at:]


def _delete(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 2, 10)) + data[end:]


def _truncate(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: rng.choice((0, 1, rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))]


def _splice(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    start, end = _span(other, rng)
    at, upto = _span(data, rng)
    return data[:at] + other[start:end] + data[upto:]


def _lines(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines.insert(j, lines[i])
        case 1:
            del lines[i]
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case _:
            lines[i] = lines[i].rstrip(b"\r\n")
    return b"".join(lines)


def _encode(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    text = data.decode("utf-8", "replace")
    match rng.randrange(6):
        case 0:
            return b"\xef\xbb\xbf" + data
        case 1:
            return text.encode("utf-16")
        case 2:
            return (text + "é").encode("latin-1", "replace")
        case 3:
            return data.replace(b"\n", b"\r\n")
        case 4:
            return data.replace(b"\n", b"\r")
        case _:
            return gzip.compress(data, mtime=0)


def _number(data: bytes, rng: random.Random) -> bytes:
    """One of the numbers in a text as another one."""
    found = list(_NUMBER.finditer(data[:200_000]))
    if not found:
        return _insert(data, rng, ())
    one = rng.choice(found)
    return data[: one.start()] + rng.choice(_NASTY_TEXT) + data[one.end() :]


_BYTES: dict[str, Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = {
    "flip": _flip, "insert": _insert, "delete": _delete, "repeat": _repeat, "truncate": _truncate, "splice": _splice,
    "lines": _lines, "encode": _encode,
}  # fmt: skip


# Trees ----------------------------------------------------------------------------------------------------------------


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of `tree` with one node changed: another type or number, renamed, missing, doubled, or moved."""
    tree = copy.deepcopy(tree)
    paths = list(_paths(tree))
    if not paths:
        return rng.choice(NASTY)
    parent, key = rng.choice(paths)
    value = parent[key]
    choice = rng.random()
    if choice < 0.45:
        parent[key] = copy.deepcopy(rng.choice(NASTY))
    elif choice < 0.65 and isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = value * rng.choice((-1, 0, 0.5, 2, 10, 1000, 10**9, 1e-9, 1e-30, 1e30, 1e300, 1.0000001))
    elif choice < 0.75:
        del parent[key]
    elif choice < 0.82 and isinstance(parent, dict):
        new = rng.choice(("", "x", str(key)[:-1], f"{key}s", str(key).upper(), f"{key}\x00", rng.choice(list(parent))))
        parent[rng.choice((new, new, new, 1, None, 1.5, True))] = parent.pop(key)
    elif choice < 0.9 and isinstance(parent, list):
        match rng.randrange(4):
            case 0:
                parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(value))
            case 1:
                parent.reverse()
            case 2:
                parent.clear()
            case _:
                parent.extend(copy.deepcopy(parent) * 3)
    elif choice < 0.92:
        for _i in range(rng.choice((1, 30, 1500))):
            value = [value]
        parent[key] = value
    else:
        other, place = rng.choice(paths)
        parent[key] = copy.deepcopy(other[place]) if place in other or isinstance(place, int) else None
    return tree


def _paths(tree: Any) -> Any:
    """(container, key) of every node below the top."""
    stack = [tree]
    while stack:
        here = stack.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in list(items):
            yield here, key
            if isinstance(value, dict | list):
                stack.append(value)


def _tree(name: str, data: bytes, rng: random.Random) -> bytes | None:
    """The YAML or JSON in `data` (a line of it, of JSON Lines) with one node changed; None if it cannot be parsed."""
    if name.endswith((".jsonl", ".ndjson")):
        lines = data.split(b"\n")
        at = rng.randrange(len(lines))
        try:
            lines[at] = _json(changed_tree(json.loads(lines[at]), rng), rng)
        except (ValueError, RecursionError, OverflowError):
            return None
        return b"\n".join(lines)
    try:
        tree = json.loads(data) if name.endswith(".json") else _yaml(data)
        changed = changed_tree(tree, rng)
        return _json(changed, rng) if name.endswith(".json") else _as_yaml(changed).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, OverflowError):
        return None


def _json(tree: Any, rng: random.Random) -> bytes:
    text = json.dumps(tree, default=repr, ensure_ascii=rng.random() < 0.5, skipkeys=True)
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=512)
def _yaml(data: bytes) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe").load(data.decode("utf-8"))
    except (YAMLError, AttributeError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _as_yaml(tree: Any, depth: int = 0) -> str:
    """`tree` as YAML, mappings near the top in blocks so that lines can be told, the rest in flow style."""
    pad = "  " * depth
    if isinstance(tree, dict) and tree and depth < 3:
        return "".join(
            f"\n{pad}{_flow(key)}: {_as_yaml(value, depth + 1)}" for key, value in tree.items()
        ) + ("" if depth else "\n")  # fmt: skip
    return _flow(tree)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf") if math.isinf(value) else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return "1" + "0" * 400 if abs(value) > 2**80 else str(value)
    if isinstance(value, bytes):
        return "!!binary //4="
    return json.dumps(value, default=str, ensure_ascii=False)


# Tables and pickles ---------------------------------------------------------------------------------------------------


def _cells(_: str, data: bytes, rng: random.Random) -> bytes | None:
    """Comma-separated values with one cell changed, or one too many or too few."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    cells = lines[at].split(b",")
    where = rng.randrange(len(cells))
    match rng.randrange(6):
        case 0:
            del cells[where]
        case 1:
            cells.insert(where, cells[where])
        case _:
            cells[where] = rng.choice(_NASTY_TEXT)
    lines[at] = b",".join(cells)
    return b"\n".join(lines)


def _table(_: str, data: bytes, rng: random.Random) -> bytes | None:
    """A Parquet table with a column of another type, null, nasty, renamed, doubled or missing, or without rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data), partitioning=None)
        at = rng.randrange(table.num_columns)
        column, name = table.column(at), table.column_names[at]
        values = column.to_pylist()
        match rng.randrange(8):
            case 0:
                table = table.remove_column(at)
            case 1:
                new = rng.choice(("", "x", name[:-1], name.upper(), rng.choice(table.column_names), "a\x00b"))
                table = table.rename_columns([new if i == at else old for i, old in enumerate(table.column_names)])
            case 2:
                table = table.slice(0, rng.choice((0, 1)))
            case 3:
                table = pa.concat_tables([table, table.slice(0, 1)])
            case 4:
                table = table.replace_schema_metadata({b"rlsim.trace": rng.choice(_NASTY_TEXT), b"pandas": b"{"})
            case 5:
                kinds = (pa.string(), pa.binary(), pa.bool_(), pa.null(), pa.float32(), pa.list_(pa.float64()),
                         pa.timestamp("ns"), pa.decimal128(30, 2), pa.dictionary(pa.int8(), pa.string()), pa.int8(),
                         pa.large_string(), pa.struct([("a", pa.int64())]), pa.uint64())  # fmt: skip
                kind = rng.choice(kinds)
                table = table.set_column(at, name, _as_kind(values, kind))
            case _:
                for i in range(rng.choice((1, 1, len(values)))):
                    values[i if i else rng.randrange(len(values))] = rng.choice(NASTY)
                table = table.set_column(at, name, _as_kind(values, column.type))
        sink = io.BytesIO()
        pq.write_table(table, sink, write_page_checksum=rng.random() < 0.5)
    except (pa.ArrowException, OSError, ValueError, IndexError, TypeError, OverflowError):
        return None
    return sink.getvalue()


def _as_kind(values: list[Any], kind: Any) -> Any:
    """The values as that type of column, each that cannot be as null or text or bytes."""
    import pyarrow as pa

    def one(value: Any) -> Any:
        for form in (value, str(value), str(value).encode("utf-8", "replace"), [1.0], {"a": 1}, True):
            try:
                return pa.scalar(form, type=kind).as_py()
            except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
                continue
        return None

    return pa.array([one(value) for value in values], type=kind)


def _pickle(_: str, data: bytes, rng: random.Random) -> bytes | None:
    """An archive of `torch.save` whose pickle holds another tree, or is damaged itself."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        inside = next(name for name in held if name.endswith("data.pkl"))
        if rng.random() < 0.7:
            held[inside] = pickle.dumps(changed_tree(pickle.loads(held[inside]), rng), protocol=2)
        else:
            held[inside] = _BYTES[rng.choice(tuple(_BYTES))](held[inside], rng, ())
    except Exception:
        return None
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    return sink.getvalue()


_STRUCTURED: dict[str, Callable[[str, bytes, random.Random], bytes | None]] = {
    "tree": _tree, "cells": _cells, "table": _table, "pickle": _pickle,
}  # fmt: skip
