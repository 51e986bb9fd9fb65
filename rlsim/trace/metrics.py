"""Which metrics of a training step logs hold, and how consoles print them: the rows of data/metrics.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsim.base.reading import shipped

_TABLE: Mapping[str, Any] = shipped("metrics.yaml")
#: Our name of a metric, and the names that frameworks give it.
METRICS: Mapping[str, Sequence[str]] = _TABLE["names"]
#: Labels of NeMo-RL's console, and the metric of each.
LABELS: Mapping[str, str] = _TABLE["labels"]
#: Of each console the row of the table, and what begins a line that holds metrics.
CONSOLES: Sequence[tuple[Mapping[str, str], re.Pattern[str]]] = [
    (row, re.compile(row["line"])) for row in _TABLE["consoles"]
]


def begins_metrics(line: str) -> bool:
    """Whether the line of a console begins the metrics of a step."""
    return any(form.search(line) for _, form in CONSOLES)
