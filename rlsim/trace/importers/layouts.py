"""Every layout there is, and how a file's is found: by its name, the keys of its first row, or its columns."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsim.base.reading import shipped
from rlsim.errors import TraceError
from rlsim.trace.files import CSV, JSONL, PARQUET, ends
from rlsim.trace.importers import agents, frameworks
from rlsim.trace.importers.dumps import Dump
from rlsim.trace.importers.rows import first_keys
from rlsim.trace.metrics import METRICS as METRIC_NAMES
from rlsim.trace.metrics import begins_metrics

KINDS = ("parquet", "csv", "jsonl")
#: Files of `torch.save`.
TORCH = (".pt", ".pth")
FILES = (*JSONL, *CSV, *PARQUET, *TORCH)
#: Files of one object or a list of them; in a folder that holds others they are something else.
JSON = (".json",)
METRICS = "verl-metrics"
_VALIDATION = re.compile(r"(^|[_./-])(eval|val_data|val_step)[_.-]")
_SUMMARIES = ("batch_summary.json", "aggregated_results.jsonl")  # rLLM's and SkyRL's, beside what they dump
_LENGTHS = (*METRIC_NAMES["response_mean"], *METRIC_NAMES["clip_ratio"])
#: A line of veRL's file logger, with the names of metrics.
_LOGGED = re.compile(r'"data":\s*\{\s*"[^"]*/')
METRICS_ADVICE = (
    "a log of metrics holds each step's mean length, longest and share cut at the cap, and no lengths: there is no "
    "trace in it. Import the dump of generations instead (veRL: trainer.rollout_data_dir), or say --derive to make "
    "lengths up that meet those means, which the trace then says of itself"
)


@dataclass(frozen=True)
class Table:
    """Another program's columns, with the keys of its row in data/layouts.yaml."""

    format: str
    needs: tuple[str, ...]
    columns: Mapping[str, str]
    note: str
    arrival: str
    drop: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    fails: bool = False


_FUNCTIONS = {**vars(agents), **vars(frameworks)}
_TABLE: Mapping[str, Any] = shipped("layouts.yaml")
#: Rollout dumps in the order in which they are tried: those with more keys first.
DUMPS = sorted(
    (Dump(**row | {k: _FUNCTIONS[row[k]] for k in ("more", "rows") if k in row}) for row in _TABLE["dumps"]),
    key=lambda dump: -len(dump.needs),
)
TABLES = [Table(**row) for row in _TABLE["tables"]]
FORMATS = tuple(
    dict.fromkeys((*KINDS, *(dump.format for dump in DUMPS), METRICS, "servegen", *(one.format for one in TABLES)))
)


def find_files(path: Path, notes: list[str]) -> list[Path]:
    """The files to import in the order of the numbers in their names."""
    if path.is_dir():
        if dumps := [*(path / "rollout").rglob("*.jsonl")]:  # a trial of AReaL's
            notes.append(f"{len(dumps):,} files under {path.name}/rollout")
            return _in_order(dumps)
        for kinds, pattern in itertools.product((FILES, JSON), ("*", "**/*")):
            files = [file for file in path.glob(pattern) if file.is_file() and file.name not in _SUMMARIES]
            found = [file for file in files if ends(file, kinds)]
            if found:
                break
        else:
            raise TraceError(f"{path}: the folder holds no file that ends in {', '.join(FILES)}")
    elif path.exists() or not any(sign in path.name for sign in "*?["):
        return [path]
    else:
        found = [file for file in path.parent.glob(path.name) if file.is_file()]
        if not found:
            raise TraceError(f"{path}: no file matches")
    kept = [file for file in found if not _VALIDATION.search(f"{file.parent.name}/{file.name}")]
    if kept and len(kept) < len(found):
        notes.append(f"{len(found) - len(kept)} files of validation samples are left out")
    return _in_order(kept or found)


def _in_order(files: Sequence[Path]) -> list[Path]:
    return sorted(files, key=lambda file: [int(p) if i % 2 else p for i, p in enumerate(re.split(r"(\d+)", str(file)))])


def is_metric_log(path: Path) -> bool:
    """Whether `path` looks like a training log: console lines, JSON Lines of a logger, or an export."""
    if not path.is_file() or ends(path, (*PARQUET, ".gz", *TORCH)):
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        if ends(path, CSV):
            first, second = file.readline(), file.readline()
            return _has_lengths(first) or ("tag" in first and _has_lengths(second))
        if ends(path, JSONL):
            first = file.readline()
            logged = '"step"' in first and _LOGGED.search(first) is not None
            return logged or any(f'"{name}"' in first for name in _LENGTHS)
        return any(begins_metrics(line) or '"response_length/' in line for line in file)


def _has_lengths(header: str) -> bool:
    return any(name in header for name in _LENGTHS if "/" in name)


def dump_of(first: Path, wanted: str | None, columns: Mapping[str, str]) -> Dump | None:
    """The project whose dump this is, by the keys of the first row; None if it is none."""
    any_layout = wanted is None or wanted in KINDS
    asked = [dump for dump in DUMPS if any_layout or dump.format == wanted]
    if not asked:
        return None
    if ends(first, TORCH):
        if wanted not in (None, "slime"):
            raise TraceError(f"{first}: not in the {wanted} layout; a .pt file is read as slime's")
        return next(dump for dump in DUMPS if dump.format == "slime")
    if not first.is_file() or first.stat().st_size == 0:
        if any_layout:
            return None
        raise TraceError(f"{first}: {'the file is empty' if first.exists() else 'no such file'}")
    keys = first_keys(first)
    found = next((dump for dump in asked if set(dump.needs) <= keys), None)
    if found is None and not any_layout:
        raise not_in(first, max(asked, key=lambda dump: len(keys & set(dump.needs))), keys)
    if (found is None or found.refused) and "response_tokens" not in (*columns, *keys):
        refuse_near(keys, first, [dump for dump in asked if not dump.refused])
    return found


def table_of(names: set[str], path: Path, wanted: str | None) -> Table | None:
    """The layout of a table with columns of these names; None if it is none. Raises `TraceError` as `dump_of`."""
    asked = [table for table in TABLES if wanted in (None, *KINDS, table.format)]
    found = next((table for table in asked if set(table.needs) <= names), None)
    if found is None and wanted is not None and wanted not in KINDS:
        raise not_in(path, asked[0], names)
    if found is None:
        refuse_near(names, path, asked)
    return found if wanted not in KINDS else None


def not_in(path: Path, layout: Dump | Table, names: Collection[str]) -> TraceError:
    """The error for a file that lacks columns of a layout, with the names that are nearly those needed, or all."""
    spare = sorted(set(names) - set(layout.needs))
    near = {need: difflib.get_close_matches(need, spare, n=1, cutoff=0.7) for need in layout.needs if need not in names}
    hints = [f"{found[0]!r} should be {need!r}" for need, found in near.items() if found]
    hint = f"; {' and '.join(hints)}" if hints else f", and the file has {', '.join(sorted(names))}"
    return TraceError(f"{path}: not in the {layout.format} layout, which needs {', '.join(layout.needs)}{hint}")


def refuse_near(names: set[str], path: Path, layouts: Sequence[Dump | Table]) -> None:
    """A file that would be of a known layout but for a misspelt column is refused with the right name."""
    for layout in layouts:
        missing = [n for n in layout.needs if n not in names]
        if len(missing) == 1 and len(layout.needs) > 1:
            near = difflib.get_close_matches(missing[0], sorted(names - set(layout.needs)), n=1, cutoff=0.7)
            if near:
                like = f"{path}: looks like the {layout.format} layout"
                raise TraceError(f"{like}, but {near[0]!r} should be {missing[0]!r}")
