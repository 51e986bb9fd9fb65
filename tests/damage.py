"""Damages files: their bytes, the tree that they hold (YAML, JSON, pickles), the cells of their tables."""

import copy
import gzip
import io
import json
import math
import pickle
import random
import re
import zipfile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 0.5, -0.5, 1e-320, 1e12, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf,
    2**31, 2**63, 2**64, -(2**63), 10**400, "", " ", "x", "x" * 5000, "nan", "-inf", "1e999", "9" * 5000, "-5", "0x10",
    "1_000", "1,000", "²", "24K", "20 ms", "1e308 s", "80 GiB", "null", "~", "[", "{", "'", '"', "\x00", "a\x00b",
    "\x1b[31mred", "</script>", "\ud800", "日本", "../../x", "/", ".", "a.b", "${x}", "%s", "2001-13-45",
    "1600-01-01T00:00:00Z", "module:thing", "builtins:exit", "time:tzset",
    [], {}, [None], [[]], [1, 2], [1, "a"], [math.nan], {"a": 1}, {"a": {"b": []}}, b"\xff\xfe",
)  # fmt: skip
_NASTY_TEXT = tuple(v if isinstance(v, bytes) else str(v).encode("utf-8", "surrogatepass") for v in NASTY)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NO_YAML = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}
_KINDS = (pa.string(), pa.binary(), pa.bool_(), pa.null(), pa.float32(), pa.list_(pa.float64()), pa.timestamp("ns"),
          pa.decimal128(30, 2), pa.dictionary(pa.int8(), pa.string()), pa.int8(), pa.struct([("a", pa.int64())]),
          pa.uint64())  # fmt: skip


def damaged(name: str, data: bytes, rng: random.Random) -> bytes:
    """`data` of the file `name` with one value changed in what it holds, or its bytes, or both."""
    if name.endswith(".gz") and rng.random() < 0.6:
        return gzip.compress(damaged(name.removesuffix(".gz"), gzip.decompress(data), rng), mtime=0)
    change = _IN_FILES.get(name.rpartition(".")[2])
    if change is not None and rng.random() < 0.7:
        data = change(data, rng)
        if rng.random() < 0.8:
            return data
    return _bytes(data, rng)


def _bytes(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = start + rng.choice((1, 2, 4, 16, 64, 256))
    match rng.choice(("flip", "insert", "delete", "repeat", "truncate", "lines", "encode", "number")):
        case "flip" if data:
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case "delete":
            return data[:start] + data[end:]
        case "repeat":
            return data[:end] + data[start:end] * rng.choice((1, 10)) + data[end:]
        case "truncate":
            return data[: rng.choice((0, 1, start, start))]
        case "lines":
            lines = data.splitlines(keepends=True) or [b""]
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i : i + 1] = rng.choice(([], [lines[i]] * 2, [lines[j]], [lines[i].rstrip(b"\r\n")]))
            return b"".join(lines)
        case "encode":
            text = data.decode("utf-8", "replace")
            coded = (b"\xef\xbb\xbf" + data, text.encode("utf-16"), (text + "é").encode("latin-1", "replace"))
            return rng.choice((*coded, data.replace(b"\n", b"\r\n"), data.replace(b"\n", b"\r"), gzip.compress(data)))
        case "number" if found := list(_NUMBER.finditer(data[:100_000])):
            one = rng.choice(found)
            return data[: one.start()] + rng.choice(_NASTY_TEXT) + data[one.end() :]
    odd = bytes([rng.choice(b"[]{}:,-\"'#&*!|>%@`\t\r\n\x1b\x85\xa0=$()")]) * rng.choice((1, 1, 2, 40))
    return data[:start] + rng.choice((b"\x00" * 4, rng.randbytes(4), rng.choice(_NASTY_TEXT), odd, odd)) + data[start:]


def _changed(tree: Any, rng: random.Random) -> Any:
    """`tree` with one node of another type or number, renamed, missing, doubled, or moved."""
    paths, stack = [], [tree]  # (container, key) of every node below the top
    while stack:
        here = stack.pop()
        paths += [(here, key) for key in (here if isinstance(here, dict) else range(len(here)))]
        stack += [
            value for value in (here.values() if isinstance(here, dict) else here) if isinstance(value, dict | list)
        ]
    if not paths:
        return rng.choice(NASTY)
    parent, key = rng.choice(paths)
    value, choice = parent[key], rng.random()
    if choice < 0.45:
        parent[key] = copy.deepcopy(rng.choice(NASTY))
    elif choice < 0.65 and isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = value * rng.choice((-1, 0, 0.5, 2, 1000, 10**9, 1e-30, 1e30, 1e300, 1.0000001))
    elif choice < 0.75:
        del parent[key]
    elif choice < 0.85 and isinstance(parent, dict):
        new = ("", "x", str(key)[:-1], f"{key}s", str(key).upper(), f"{key}\x00", rng.choice(list(parent)))
        parent[rng.choice(new)] = parent.pop(key)
    elif choice < 0.9 and isinstance(parent, list):
        parent[:] = rng.choice(([value, *parent], parent[::-1], [], parent + copy.deepcopy(parent) * 3))
    else:
        other, place = rng.choice(paths)
        parent[key] = copy.deepcopy(other[place]) if isinstance(other, dict) and place in other else [[[value]]]
    return tree


def _json(data: bytes, rng: random.Random) -> bytes:
    text = json.dumps(_changed(json.loads(data), rng), default=repr, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    return b"\n".join([*lines[:at], _json(lines[at], rng), *lines[at + 1 :], b""])


def _yaml(data: bytes, rng: random.Random) -> bytes:
    tree = _changed(YAML(typ="safe").load(data.decode()), rng)
    text = json.dumps(tree, default=repr, indent=1, ensure_ascii=False)  # which YAML reads too, but for these
    return re.sub(r"-?\b(NaN|Infinity)\b", lambda found: _NO_YAML[found[0]], text).encode("utf-8", "surrogatepass")


def _cells(data: bytes, rng: random.Random) -> bytes:
    """Comma-separated values with one cell changed, or one too many or too few."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    cells = lines[at].split(b",")
    where, nasty = rng.randrange(len(cells)), rng.choice(_NASTY_TEXT)
    cells[where : where + 1] = rng.choice(([], [cells[where]] * 2, [nasty], [nasty], [nasty]))
    return b"\n".join([*lines[:at], b",".join(cells), *lines[at + 1 :]])


def _table(data: bytes, rng: random.Random) -> bytes:
    """A Parquet table with a column of another type, nasty, renamed, doubled or missing, or with other rows."""
    table = pq.read_table(io.BytesIO(data), partitioning=None)
    at, names = rng.randrange(table.num_columns), table.column_names
    values, name, kind = table.column(at).to_pylist(), names[at], table.column(at).type
    match rng.randrange(7):
        case 0:
            table = table.remove_column(at)
        case 1:
            new = rng.choice(("", "x", name[:-1], name.upper(), rng.choice(names), "a\x00b"))
            table = table.rename_columns([*names[:at], new, *names[at + 1 :]])
        case 2:
            table = rng.choice((table.slice(0, 0), table.slice(0, 1), pa.concat_tables([table, table.slice(0, 1)])))
        case 3:
            table = table.replace_schema_metadata({b"rlsim.trace": rng.choice(_NASTY_TEXT), b"pandas": b"{"})
        case 4:
            table = table.set_column(at, name, _column(values, rng.choice(_KINDS)))
        case _:
            for i in range(rng.choice((1, 1, len(values)))):
                values[i if i else rng.randrange(len(values))] = rng.choice(NASTY)
            table = table.set_column(at, name, _column(values, kind))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _column(values: list[Any], kind: Any) -> Any:
    """The values as that type of column, each that cannot be as text or bytes or null."""

    def one(value: Any) -> Any:
        for form in (value, str(value), str(value).encode("utf-8", "replace"), [1.0], {"a": 1}, True):
            try:
                return pa.scalar(form, type=kind).as_py()
            except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
                continue
        return None

    return pa.array([one(value) for value in values], type=kind)


def _pickle(data: bytes, rng: random.Random) -> bytes:
    """An archive of `torch.save` whose pickle holds another tree, or is damaged itself."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    inside = next(name for name in held if name.endswith("data.pkl"))
    whole = pickle.dumps(_changed(pickle.loads(held[inside]), rng), protocol=2)
    held[inside] = whole if rng.random() < 0.7 else _bytes(held[inside], rng)
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    return sink.getvalue()


_IN_FILES = {"json": _json, "jsonl": _lines, "yaml": _yaml, "csv": _cells, "parquet": _table, "pt": _pickle}
