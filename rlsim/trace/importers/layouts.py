"""Every layout there is, and how a file's is found: by the keys of its first row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlsim.errors import TraceError
from rlsim.trace.importers import areal, metrics, nemo_rl, roll, slime, trl, verl
from rlsim.trace.importers.dumps import Dump
from rlsim.trace.importers.rows import CSV, JSONL, PARQUET, ends, first_keys
from rlsim.trace.importers.tables import TABLES

KINDS = ("parquet", "csv", "jsonl")
#: Rollout dumps in the order in which they are tried: those with more keys first.
DUMPS: tuple[Dump, ...] = tuple(
    sorted(
        (*areal.DUMPS, *verl.DUMPS, *nemo_rl.DUMPS, *slime.DUMPS, *trl.DUMPS, *roll.DUMPS),
        key=lambda dump: -len(dump.needs),
    )
)
SHAPES = {"histogram": ("response_tokens", "count"), "cdf": ("length", "cdf")}
FORMATS = tuple(
    dict.fromkeys(
        (*KINDS, "areal", "verl", metrics.NAME, "nemo-rl", "slime", "trl", "roll", "servegen",
         *(table.name for table in TABLES), *SHAPES)
    )
)  # fmt: skip
FILES = (*JSONL, *CSV, *PARQUET, *slime.SUFFIXES)
_VALIDATION = re.compile(r"(^|[_.-])(eval|val_data)[_.-]")


def find_files(path: Path, notes: list[str]) -> tuple[list[Path], list[Path]]:
    """The files to import in the order of the numbers in their names, and session traces that belong to them."""
    if path.is_dir():
        dumps, sessions = areal.trial_files(path)
        if dumps:
            notes.append(f"{len(dumps):,} files under {path.name}/rollout")
            return _in_order(dumps), sessions
        found = [file for file in path.iterdir() if file.is_file() and ends(file, FILES)]
        found = found or [file for file in path.rglob("*") if file.is_file() and ends(file, FILES)]
        if not found:
            raise TraceError(f"{path}: the folder holds no file that ends in {', '.join(FILES)}")
    elif path.exists() or not any(sign in path.name for sign in "*?["):
        return [path], []
    else:
        found = [file for file in path.parent.glob(path.name) if file.is_file()]
        if not found:
            raise TraceError(f"{path}: no file matches")
    kept = [file for file in found if not _VALIDATION.search(file.name)]
    if kept and len(kept) < len(found):
        notes.append(f"{len(found) - len(kept)} files of validation samples are left out")
    return _in_order(kept or found), []


def _in_order(files: Sequence[Path]) -> list[Path]:
    return sorted(files, key=lambda file: [int(p) if i % 2 else p for i, p in enumerate(re.split(r"(\d+)", str(file)))])


def dump_of(first: Path, wanted: str | None, columns: Mapping[str, str]) -> Dump | None:
    """The project whose dump this is, by the keys of the first row; None if it is none."""
    if wanted not in (None, *KINDS, *(dump.name for dump in DUMPS)):
        return None
    if ends(first, slime.SUFFIXES):
        if wanted not in (None, "slime"):
            raise TraceError(f"{first}: not in the {wanted} layout; a .pt file is read as slime's")
        return slime.DUMPS[0]
    if not first.is_file() or first.stat().st_size == 0:
        if wanted in KINDS or wanted is None:
            return None
        raise TraceError(f"{first}: {'the file is empty' if first.exists() else 'no such file'}")
    keys = first_keys(first)
    asked = [dump for dump in DUMPS if wanted in (None, *KINDS, dump.name)]
    found = next((dump for dump in asked if set(dump.needs) <= keys), None)
    if found is not None and not found.refused:
        return found
    if wanted is not None and wanted not in KINDS and found is None:
        needs = max((dump.needs for dump in asked), key=lambda needs: len(keys & set(needs)))
        raise TraceError(f"{first}: not in the {wanted} layout, which needs {', '.join(needs)}{nearest(needs, keys)}")
    if "response_tokens" not in columns and "response_tokens" not in keys:
        refuse_near(keys, first, [(dump.name, dump.needs) for dump in asked if not dump.refused])
    return found


def nearest(needs: Sequence[str], names: set[str]) -> str:
    """What a message says of the names that are nearly those needed, or of all there are."""
    hints = []
    for need in needs:
        near = difflib.get_close_matches(need, sorted(names - set(needs)), n=1, cutoff=0.7)
        if need not in names and near:
            hints.append(f"{near[0]!r} should be {need!r}")
    return f"; {' and '.join(hints)}" if hints else f", and the file has {', '.join(sorted(names))}"


def refuse_near(names: set[str], path: Path, layouts: Sequence[tuple[str, Sequence[str]]]) -> None:
    """A file that would be of a known layout but for a misspelt column is refused with the right name."""
    for layout, needs in layouts:
        missing = [n for n in needs if n not in names]
        if len(missing) == 1 and len(needs) > 1:
            near = difflib.get_close_matches(missing[0], sorted(names - set(needs)), n=1, cutoff=0.7)
            if near:
                like = f"{path}: looks like the {layout} layout"
                raise TraceError(f"{like}, but {near[0]!r} should be {missing[0]!r}")
