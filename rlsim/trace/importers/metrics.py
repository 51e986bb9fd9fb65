"""Recognises veRL's metric logs, which hold means of lengths and no lengths: `rlsim.verl.trace` derives some.

Metric names are those of `rlsim.verl.log`, which reads them.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlsim.tables import parse_json
from rlsim.trace.importers.rows import CSV, JSONL, PARQUET, ends

NAME = "verl-metrics"
_CONSOLE = re.compile(r"(?:^|[\s)\]])step:\d+ - [^\n]*\w+/\w+:")
_METRIC = "response_length/"
ADVICE = (
    "veRL's metric log holds each step's mean, longest and share cut at the cap (response_length/mean, max, "
    "clip_ratio), and no lengths: there is no trace in it. Import the dump of generations (trainer.rollout_data_dir) "
    "instead, or say --derive to make lengths up that meet those means, which the trace then says of itself"
)


def is_metric_log(path: Path) -> bool:
    """Whether `path` looks like a metric log of veRL: console lines, the file logger's JSON Lines, or an export."""
    if not path.is_file() or ends(path, (*PARQUET, ".gz", ".pt", ".pth")):
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        if ends(path, CSV):
            first, second = file.readline(), file.readline()
            return _METRIC in first or ("tag" in first and _METRIC in second)
        if ends(path, JSONL):
            return _is_metrics_row(file.readline())
        return any(_CONSOLE.search(line) or f'"{_METRIC}' in line for line in file)


def _is_metrics_row(line: str) -> bool:
    try:
        row = parse_json(line)
    except ValueError:
        return False
    if not isinstance(row, dict):
        return False
    data = row.get("data")
    logged = isinstance(data, dict) and "step" in row and any("/" in key for key in data)
    return logged or any(key.startswith(_METRIC) for key in row)
