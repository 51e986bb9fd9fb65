"""Reads the metrics of training steps as frameworks write them: consoles, JSON Lines, CSV and JSON exports.

The frameworks' names of metrics and the lines of their consoles are rows of data/metrics.yaml. Times are in seconds.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from rlsim.base.refusals import refuse
from rlsim.base.tables import UNREADABLE, csv_errors, number_of, open_data, parse_json
from rlsim.errors import CalibrationError
from rlsim.frameworks.verl.settings import VerlSettings
from rlsim.trace.metrics import CONSOLES, LABELS, METRICS, begins_metrics

_OURS = {name: (ours, rank) for ours, names in METRICS.items() for rank, name in enumerate(names)}
_STEP_NAMES = ("training/global_step", "step", "global_step", "_step", "Step")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DICT = re.compile(r"\s*\{[^{}]*\}")
_PAIR = re.compile(r"'([^']+)': ('[^']*'|(?:\w+\.)?\w+\([^()]*\)|[^,}]*)")
_BULLET = re.compile(r"^\s*•\s+([^:]+):\s+([-+\d.eE]+|nan|inf)s?(?:\s|$)")
_PROCESS = re.compile(r"^\s*(\([\w:.]+ pid=\d+[^)]*\))\s?")
_NUMBER = re.compile(r"(?:(?:np\.\w+|tensor)\()?([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf))[),]*(?:\s|$)")
_JSON = re.compile(r"\s*(\[\s*)?\{\s*\"")
_MOST_CONFIG_LINES = 5000
LARGEST = 1e15  # of any metric: beyond it nothing was measured


@dataclass(frozen=True)
class VerlLog:
    """A run's metrics: `steps` has one row per step (index: its number) and the columns of `METRICS`, NaN where a
    metric was not logged, and `line`.

    `names` are all metric names found, `config` the run's settings if the log carries veRL's dump.
    """

    path: Path
    steps: pd.DataFrame
    names: tuple[str, ...]
    config: VerlSettings = field(default_factory=VerlSettings)
    notes: tuple[str, ...] = ()

    def need(self, metric: str) -> None:
        """Raises `CalibrationError` with the nearest names found if no step has this metric (one of `METRICS`)."""
        if self.steps[metric].notna().any():
            return
        wanted = METRICS[metric][0]
        near = difflib.get_close_matches(wanted, self.names, n=3, cutoff=0.6)
        kin = [name for name in self.names if name.split("/")[0] == wanted.split("/")[0]][:8]
        nearest = ", ".join(map(str, near or kin or self.names[:8])) or "nothing"
        raise CalibrationError(f"{self.path}: no step logs {wanted}; the nearest found: {nearest}")

    def where(self, step: int) -> str:
        return f"{self.path}:{int(self.steps['line'][step])}"


@dataclass
class _Record:
    """One logged step: its number, the line it stands in, and every metric as written."""

    step: int
    line: int
    metrics: dict[str, float] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)  # values that are not plain numbers

    def take(self, name: str, value: Any) -> None:
        """A metric: a number, or text that should spell one."""
        found = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
        if found or isinstance(value, int | float):
            self.metrics[name] = float(found[1] if found else value)
        else:
            self.unread[name] = str(value).strip()[:40]


def read_log(path: str | Path) -> VerlLog:
    """The metrics in `path`; its content tells the format.

    A step that was logged more than once (a run that was resumed) counts as it was logged last. Raises
    `CalibrationError` with file and line for a file that is missing, empty, in no known form, or damaged; a last line
    that was cut while being written is left out and noted.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            head = str(file.read(1 << 16))
    except FileNotFoundError:
        raise CalibrationError(f"{path}: no such file") from None
    except UNREADABLE as error:
        raise CalibrationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not head.strip():
        raise CalibrationError(f"{path}: the file is empty")
    notes: list[str] = []
    config = VerlSettings(name=path.stem)
    if _JSON.match(head):
        records = _from_json(path, notes)
    elif _is_csv(head):
        records = _from_csv(path)
    else:
        records = _from_console(path, notes, config)
    names = dict.fromkeys(name for record in records for name in (*record.metrics, *record.unread))
    return VerlLog(path, _table(path, records, notes), tuple(names), config, tuple(notes))


def _opened(path: Path) -> TextIO:
    """The text of a file, decompressed if its name ends in .gz."""
    return io.TextIOWrapper(open_data(path), encoding="utf-8-sig", errors="replace", newline="\n")


def _text(path: Path) -> str:
    with _opened(path) as file:
        return file.read()


def logged_config(path: str | Path) -> dict[str, Any]:
    """The configuration that veRL prints at the start of a console log, nested; empty if there is none."""
    dump = _ConfigDump()
    for _, line in _lines(Path(path)):
        dump.take(line)
        if dump.config:
            break
    return dump.config


def _table(path: Path, records: Sequence[_Record], notes: list[str]) -> pd.DataFrame:
    rows, numbers = [_row(path, record) for record in records], [record.step for record in records]
    frame = pd.DataFrame(rows, index=pd.Index(numbers, name="step"), columns=["line", *METRICS])
    if repeated := int(frame.index.duplicated().sum()):
        notes.append(f"{repeated} steps were logged more than once: of each metric the last value counts")
    # Validation and metrics of one step may be logged apart: the last value of each metric, sorted by step.
    steps = frame.groupby(level="step").last().astype({"line": int})
    if steps["log_probs_s"].notna().any():
        notes.append("log-probs of policy and reference are logged together: each is taken to be half of that")
        for metric in ("old_log_prob_s", "ref_log_prob_s"):
            steps[metric] = steps[metric].fillna(steps["log_probs_s"] / 2)
    for metric, other in (("response_mean", "prompt_mean"), ("prompt_mean", "response_mean")):
        steps[metric] = steps[metric].fillna(steps["sequence_mean"] - steps[other])
    return steps


def _row(path: Path, record: _Record) -> dict[str, float]:
    row = {"line": float(record.line), **dict.fromkeys(METRICS, math.nan)}
    ranks: dict[str, int] = {}
    for name, value in record.metrics.items():
        ours, rank = _OURS.get(name, ("", 0))
        if ours and rank <= ranks.get(ours, rank):
            row[ours], ranks[ours] = value, rank
    for name, text in record.unread.items():
        if name in _OURS:
            raise CalibrationError(f"{path}:{record.line}: step {record.step}: {name} is {text!r}, not a plain number")
    for name in METRICS:
        if row[name] < 0 or row[name] > LARGEST:
            limit = "below zero" if row[name] < 0 else f"beyond {LARGEST:g}"
            raise CalibrationError(
                f"{path}:{record.line}: step {record.step}: {METRICS[name][0]} is {row[name]:g}, {limit}"
            )
    return row


# Console -------------------------------------------------------------------------------------------------------------


def _from_console(path: Path, notes: list[str], config: VerlSettings) -> list[_Record]:
    """Every line of metrics, whatever stands before it; `config` takes the configuration that veRL prints."""
    records: list[_Record] = []
    dump = _ConfigDump()
    cut: list[str] = []  # what is not whole
    row: Mapping[str, str] = {}
    ended = True
    for number, line in _lines(path):
        dump.take(line)
        if bullet := _BULLET.match(line) if row.get("holds") == "bullets" else None:
            records[-1].take(LABELS.get(bullet[1], bullet[1]), bullet[2])
        for row_of, form in CONSOLES:
            if found := form.search(line):
                row, ended = row_of, line.endswith("\n")
                step = found.groupdict().get("step") or len(records) + 1  # TRL prints no number
                record = _Record(_whole(path, number, step), number)
                if _take(record, row["holds"], line[found.end() :]):
                    _add(records, record)
                else:
                    cut.append(f"step {record.step} (line {number})")
                break
    if not records:
        shown = "; ".join(f"{one['of']}: {one['shows']}" for one, _ in CONSOLES)
        raise CalibrationError(
            f"{path}: no metrics of a training step found; expected the console of a framework ({shown}), JSON Lines "
            'such as {"step": 12, "data": {…}}, or a CSV or JSON export with a step column'
        )
    last = records[-1]
    short = row["holds"] == "pairs" and not ended and _shorter(records)
    if short or (row["holds"] == "bullets" and row["whole"] not in last.metrics):
        cut.append(f"step {last.step} (line {last.line})")
        records.pop()
    notes += [f"{one} was cut while being written: left out" for one in cut]
    config.put(dump.config, path.name)
    if dump.failed:
        notes.append("the configuration in the log could not be read: give the settings as arguments")
    return records


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without colours; progress bars (split at carriage returns) share their line's number."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            for part in _ANSI.sub("", line).replace("\r\n", "\n").split("\r"):
                yield number, part


def _take(record: _Record, holds: str, text: str) -> bool:
    """Gives a record the metrics that stand in a console's line; false if they end in its midst."""
    if holds == "pairs":
        for pair in text.split(" - "):
            name, colon, value = pair.strip().rpartition(":")
            if colon:
                number = _NUMBER.match(value)  # Ray may say behind the last that a line is repeated
                record.take(name, number[0] if number else value)
    elif holds == "dict":
        found = _DICT.match(text)
        for name, value in _PAIR.findall(found[0] if found else ""):
            record.take(name, value.strip("'"))
        return bool(found)
    return True


def _add(records: list[_Record], record: _Record) -> None:
    """Adds a record, or its metrics to that of the same step which has none of them: a step may be logged by parts."""
    for other in records[-4:]:
        if other.step == record.step and not other.metrics.keys() & record.metrics.keys():
            other.metrics |= record.metrics
            return
    records.append(record)


def _shorter(records: Sequence[_Record]) -> bool:
    """Whether the last of several records ends earlier than the one before it."""
    if len(records) < 2:
        return False
    before, last = ([*record.metrics] for record in records[-2:])
    return not last or last[-1] != before[-1]


class _ConfigDump:
    """Collects the dictionary that veRL prints at its start, from the lines of the process that printed it."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.failed = False
        self._process: str | None = None
        self._parts: list[str] = []

    def take(self, line: str) -> None:
        found = _PROCESS.match(line)
        process, text = (found[1], line[found.end() :]) if found else ("", line)
        if not self._parts:
            if self.config or not text.lstrip().startswith("{'") or ": {" not in text:
                return
            self._process = process
        elif process != self._process:
            return
        self._parts.append(text.rstrip("\n"))
        whole = "\n".join(self._parts) if text.rstrip().endswith("}") else ""
        if whole and whole.count("{") == whole.count("}"):
            self._parts = []
            try:
                found_config = ast.literal_eval(whole.strip())
            except (ValueError, SyntaxError):
                self.failed = "actor_rollout_ref" in whole
                return
            if isinstance(found_config, dict) and isinstance(found_config.get("actor_rollout_ref"), dict):
                self.config, self.failed = found_config, False
        elif len(self._parts) > _MOST_CONFIG_LINES:
            self._parts, self.failed = [], True


# JSON ----------------------------------------------------------------------------------------------------------------


def _from_json(path: Path, notes: list[str]) -> list[_Record]:
    """JSON Lines of `{"step": n, "data": {…}}` or of flat records, or one JSON list of either."""
    text = _text(path)
    one_list = text.lstrip().startswith("[")
    texts, items = [text] if one_list else text.split("\n"), list[Any]()
    for number, part in enumerate(texts, 1):
        try:
            found: Any = parse_json(part) if part.strip() else None
        except ValueError as error:
            if number == len(texts) and not one_list:
                notes.append(f"line {number} was cut while being written: left out")
                continue
            at = error.lineno if one_list and isinstance(error, json.JSONDecodeError) else number
            raise CalibrationError(f"{path}:{at}: not valid JSON: {error}") from None
        items += enumerate(found, 1) if one_list else [(number, found)] * bool(part.strip())
    if not items and not one_list:
        raise CalibrationError(f"{path}: no whole line of JSON")
    records: list[_Record] = []
    for number, item in items:
        if not isinstance(item, dict):
            raise CalibrationError(f'{path}:{number}: expected a record such as {{"step": 12, "data": {{…}}}}')
        if not isinstance(data := item.get("data", item), dict):
            raise CalibrationError(f"{path}:{number}: data is not a record of metrics")
        _add(records, _record(path, number, data, item.get("step")))
    return records


def _record(path: Path, line: int, data: Mapping[str, Any], step: Any = None) -> _Record:
    """The metrics of a step; its number is among them if `step` does not say it."""
    numbers = (data[name] for name in _STEP_NAMES if data.get(name) is not None)
    step = next(numbers, None) if step is None else step
    if step is None:
        raise CalibrationError(f"{path}:{line}: no step number; expected one of: {', '.join(_STEP_NAMES)}")
    record = _Record(_whole(path, line, step), line)
    for name, value in data.items():
        if not isinstance(value, bool) and value is not None:
            record.take(name, value)
    return record


# CSV -----------------------------------------------------------------------------------------------------------------


def _is_csv(head: str) -> bool:
    first = next(line for line in head.splitlines() if line.strip())
    if begins_metrics(first) or "," not in first:
        return False
    columns = [_bare(name.strip().strip('"')) for name in first.split(",")]
    return any(name in _OURS or name in _STEP_NAMES for name in columns)


def _bare(column: str) -> str:
    """`run name - timing_s/gen` of an export, or `metrics.timing_s/gen`, without what stands before the metric."""
    return column.rpartition(" - ")[2].removeprefix("metrics.")


def _from_csv(path: Path) -> list[_Record]:
    """A table with one row per step and metric names as columns, or one row per value (tag, step, value)."""
    text = _text(path)
    with csv_errors(path, CalibrationError):
        table = pd.read_csv(io.StringIO(text), dtype=str, skip_blank_lines=False, index_col=False)
    table["line"] = range(2, len(table) + 2)
    table = table.dropna(how="all", subset=[column for column in table.columns if column != "line"])
    if {"tag", "step", "value"} <= set(table.columns):
        return _from_long(path, table)
    columns = [column for column in table.columns if column != "line" and not column.endswith(("__MIN", "__MAX"))]
    names = [_bare(column) for column in columns]
    refuse("columns of a log", CalibrationError, path=path, names=names, steps=_STEP_NAMES)
    records: list[_Record] = []
    for row in table.to_dict("records"):
        cells = {name: row[column] for column, name in zip(columns, names, strict=True)}
        told = {name: cell for name, cell in cells.items() if isinstance(cell, str) and cell.strip()}
        records.append(_record(path, int(row["line"]), told))
    if not records:
        raise CalibrationError(f"{path}: the table has a header and no rows")
    return records


def _from_long(path: Path, table: pd.DataFrame) -> list[_Record]:
    records: dict[int, _Record] = {}
    for row in table.to_dict("records"):
        step = _whole(path, int(row["line"]), str(row["step"]))
        record = records.setdefault(step, _Record(step, int(row["line"])))
        if isinstance(row["value"], str) and row["value"].strip():
            record.take(_bare(str(row["tag"])), row["value"])
    return list(records.values())


def _whole(path: Path, line: int, text: Any) -> int:
    value = number_of(text)
    if not (value.is_integer() and abs(value) <= LARGEST):
        raise CalibrationError(f"{path}:{line}: the step number is {str(text)[:40]!r}, not a whole number")
    return int(value)
