"""Mutations of files: of their bytes, of the tree that they hold (YAML, JSON, pickles), of their tables' cells."""

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
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

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
_NASTY_TEXT = tuple(v if isinstance(v, bytes) else str(v).encode("utf-8", "surrogatepass") for v in NASTY)
_BYTES = ("flip", "insert", "delete", "repeat", "truncate", "splice", "lines", "encode")


def mutated(name: str, data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """`data` of the file `name` after one to four mutations; `others` are files whose parts may be spliced in."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if name.endswith(".gz") and rng.random() < 0.6:  # what the file holds, and not the compressed bytes
            try:
                data = gzip.compress(_changed(name[:-3], gzip.decompress(data), rng, others), mtime=0)
                continue
            except (OSError, EOFError, zlib.error):
                pass
        data = _changed(name, data, rng, others)
    return data


def _changed(name: str, data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    if rng.random() < 0.7:
        ending = name.rpartition(".")[2]
        if ending in ("jsonl", "ndjson"):
            lines = data.split(b"\n")
            at = rng.randrange(len(lines))
            if (line := _tree("json", lines[at], rng)) is not None:
                return b"\n".join([*lines[:at], line, *lines[at + 1 :]])
        structured = {"yaml": _tree, "yml": _tree, "json": _tree, "csv": _cells, "parquet": _table, "pt": _pickle}
        found = structured[ending](ending, data, rng) if ending in structured else None
        if found is not None:
            return found
    return _bytes(data, rng.choice((*_BYTES, "number")), rng, others)


# Bytes ----------------------------------------------------------------------------------------------------------------


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 4, 16, 64, 256)))


def _bytes(data: bytes, kind: str, rng: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _span(data, rng)
    match kind:
        case "flip":
            flipped = bytearray(data or b"\x00")
            for _ in range(rng.choice((1, 1, 2, 8))):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case "delete":
            return data[:start] + data[end:]
        case "repeat":
            return data[:end] + data[start:end] * rng.choice((1, 2, 10)) + data[end:]
        case "truncate":
            return data[: rng.choice((0, 1, start, start))]
        case "splice":
            other = rng.choice(others) if others else data
            first, last = _span(other, rng)
            return data[:start] + other[first:last] + data[end:]
        case "lines":
            lines = data.splitlines(keepends=True) or [b""]
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            doubled, swapped = [*lines[:j], lines[i], *lines[j:]], [*lines]
            swapped[i], swapped[j] = swapped[j], swapped[i]
            joined = [*lines[:i], lines[i].rstrip(b"\r\n"), *lines[i + 1 :]]
            return b"".join(rng.choice((doubled, lines[:i] + lines[i + 1 :], swapped, joined)))
        case "encode":
            text = data.decode("utf-8", "replace")
            return rng.choice((
                b"\xef\xbb\xbf" + data, text.encode("utf-16"), (text + "é").encode("latin-1", "replace"),
                data.replace(b"\n", b"\r\n"), data.replace(b"\n", b"\r"), gzip.compress(data, mtime=0),
            ))  # fmt: skip
        case "number" if found := list(_NUMBER.finditer(data[:200_000])):
            one = rng.choice(found)
            return data[: one.start()] + rng.choice(_NASTY_TEXT) + data[one.end() :]
    new = rng.choice((
        b"\x00" * rng.choice((1, 4, 64)), rng.randbytes(rng.choice((1, 4, 16))), rng.choice(_NASTY_TEXT),
        bytes([rng.choice(b"[]{}:,-\"'#&*!|>%@`\t\r\n\x1b\x85\xa0=$()")]) * rng.choice((1, 1, 1, 2, 40)),
    ))  # fmt: skip
    return data[:start] + new + data[start:]


# Trees ----------------------------------------------------------------------------------------------------------------


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of `tree` with one node changed: another type or number, renamed, missing, doubled, or moved."""
    tree = copy.deepcopy(tree)
    paths, stack = [], [tree]  # (container, key) of every node below the top
    while stack:
        here = stack.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        paths += [(here, key) for key, _ in items]
        stack += [value for _, value in items if isinstance(value, dict | list)]
    if not paths:
        return rng.choice(NASTY)
    parent, key = rng.choice(paths)
    value, choice = parent[key], rng.random()
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
        more = [copy.deepcopy(value), *parent], parent[::-1], [], [*parent, *copy.deepcopy(parent) * 3]
        parent[:] = rng.choice(more)
    elif choice < 0.92:
        for _ in range(rng.choice((1, 30, 1500))):
            value = [value]
        parent[key] = value
    else:
        other, place = rng.choice(paths)
        parent[key] = copy.deepcopy(other[place]) if place in other or isinstance(place, int) else None
    return tree


def _tree(ending: str, data: bytes, rng: random.Random) -> bytes | None:
    """The YAML or JSON in `data` with one node changed; None if it cannot be parsed."""
    try:
        if ending == "json":
            tree = changed_tree(json.loads(data), rng)
            text = json.dumps(tree, default=repr, ensure_ascii=rng.random() < 0.5, skipkeys=True)
        else:
            text = _as_yaml(changed_tree(_yaml(data), rng))
        return text.encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, OverflowError):
        return None


@lru_cache(maxsize=512)
def _yaml(data: bytes) -> Any:
    try:
        return YAML(typ="safe").load(data.decode("utf-8"))
    except (YAMLError, AttributeError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _as_yaml(tree: Any, depth: int = 0) -> str:
    """`tree` as YAML, mappings near the top in blocks so that lines can be told, the rest in flow style."""
    match tree:
        case dict() if tree and depth < 3:
            rows = (f"\n{'  ' * depth}{_as_yaml(key, 3)}: {_as_yaml(value, depth + 1)}" for key, value in tree.items())
            return "".join(rows) + ("" if depth else "\n")
        case dict():
            return "{" + ", ".join(f"{_as_yaml(key, 3)}: {_as_yaml(value, 3)}" for key, value in tree.items()) + "}"
        case list():
            return "[" + ", ".join(_as_yaml(value, 3) for value in tree) + "]"
        case float():
            return repr(tree) if math.isfinite(tree) else {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(tree)]
        case int() if not isinstance(tree, bool):
            return "1" + "0" * 400 if abs(tree) > 2**80 else str(tree)
        case bytes():
            return "!!binary //4="
    return json.dumps(tree, default=str, ensure_ascii=False)


# Tables and pickles ---------------------------------------------------------------------------------------------------


def _cells(_: str, data: bytes, rng: random.Random) -> bytes:
    """Comma-separated values with one cell changed, or one too many or too few."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    cells = lines[at].split(b",")
    where, nasty = rng.randrange(len(cells)), rng.choice(_NASTY_TEXT)
    cells[where : where + 1] = rng.choice(([], [cells[where]] * 2, [nasty], [nasty], [nasty], [nasty]))
    return b"\n".join([*lines[:at], b",".join(cells), *lines[at + 1 :]])


_KINDS = (pa.string(), pa.binary(), pa.bool_(), pa.null(), pa.float32(), pa.list_(pa.float64()), pa.timestamp("ns"),
          pa.decimal128(30, 2), pa.dictionary(pa.int8(), pa.string()), pa.int8(), pa.large_string(),
          pa.struct([("a", pa.int64())]), pa.uint64())  # fmt: skip


def _table(_: str, data: bytes, rng: random.Random) -> bytes | None:
    """A Parquet table with a column of another type, null, nasty, renamed, doubled or missing, or without rows."""
    try:
        table = pq.read_table(io.BytesIO(data), partitioning=None)
        at, names = rng.randrange(table.num_columns), table.column_names
        values, name, kind = table.column(at).to_pylist(), names[at], table.column(at).type
        match rng.randrange(8):
            case 0:
                table = table.remove_column(at)
            case 1:
                new = rng.choice(("", "x", name[:-1], name.upper(), rng.choice(names), "a\x00b"))
                table = table.rename_columns([*names[:at], new, *names[at + 1 :]])
            case 2:
                table = table.slice(0, rng.choice((0, 1)))
            case 3:
                table = pa.concat_tables([table, table.slice(0, 1)])
            case 4:
                table = table.replace_schema_metadata({b"rlsim.trace": rng.choice(_NASTY_TEXT), b"pandas": b"{"})
            case 5:
                table = table.set_column(at, name, _as_kind(values, rng.choice(_KINDS)))
            case _:
                for i in range(rng.choice((1, 1, len(values)))):
                    values[i if i else rng.randrange(len(values))] = rng.choice(NASTY)
                table = table.set_column(at, name, _as_kind(values, kind))
        sink = io.BytesIO()
        pq.write_table(table, sink, write_page_checksum=rng.random() < 0.5)
    except (pa.ArrowException, OSError, ValueError, IndexError, TypeError, OverflowError):
        return None
    return sink.getvalue()


def _as_kind(values: list[Any], kind: Any) -> Any:
    """The values as that type of column, each that cannot be as null or text or bytes."""

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
            held[inside] = _bytes(held[inside], rng.choice(_BYTES), rng, ())
    except Exception:
        return None
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    return sink.getvalue()
