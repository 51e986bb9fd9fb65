"""Every column of every result table: name, type, unit, meaning. Feeds the tables, their metadata and the docs.

They are rows of `rlsim/data/columns.csv`. `every` table begins with the same columns; the parts of a call add up to its
time on its GPUs. Where a row of the summary says no more than a name, the column is that of `steps`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class Column(NamedTuple):
    """One column of a result table."""

    name: str
    dtype: str  # as pandas names it
    unit: str
    meaning: str


def _groups() -> dict[str, dict[str, Column]]:
    found: dict[str, dict[str, Column]] = {}
    path = Path(__file__).resolve().parents[1] / "data" / "columns.csv"
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    for group, name, *rest in rows:
        known = Column(name, *rest) if any(rest) else {**found["every"], **found["steps"]}[name]
        found.setdefault(group, {})[name] = known
    return found


_GROUPS = _groups()
#: What a call's time goes to.
CALL_PARTS = tuple(_GROUPS.pop("call parts").values())
#: Columns of `Result.summary()`, one row per case and system; means are over the steady steps of all seeds.
SUMMARY = tuple(_GROUPS.pop("summary").values())
_EVERY = _GROUPS.pop("every").values()
TABLES: dict[str, tuple[Column, ...]] = {
    table: (*_EVERY, *own.values(), *(CALL_PARTS if table == "calls" else ())) for table, own in _GROUPS.items()
}
#: What rollout controls did: changes of degree, responses moved, replicas given up, responses dropped.
ACTED = ("switches", "moved", "released", "aborted")
