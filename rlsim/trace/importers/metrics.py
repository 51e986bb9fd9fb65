"""Recognises veRL's metric logs, which hold means of lengths and no lengths: `rlsim.calibrate.verl_trace` derives some.

Metric names are those of `rlsim.calibrate.verl_log`, which reads them.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlsim.trace.importers.rows import CSV, JSONL, PARQUET, ends

NAME = "verl-metrics"
_CONSOLE = re.compile(r"(?:^|[\s)\]])step:\d+ - [^\n]*\w+/\w+:")
_METRIC = "response_length/"
_HEAD = 1 << 18  # characters that are looked at: a configuration dump stands before the first step
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
        head = file.read(_HEAD)
    if ends(path, CSV):
        first = head.partition("\n")[0]
        return _METRIC in first or (('"tag"' in first or first.startswith(("tag,", "step,tag"))) and _METRIC in head)
    if ends(path, (*JSONL, ".json")):
        return f'"{_METRIC}' in head and '"prompt"' not in head
    return bool(_CONSOLE.search(head)) or _METRIC in head
