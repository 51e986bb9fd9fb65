"""Rows of a rollout dump, one at a time, with the checks that name file and row."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rlsim.base.tables import csv_errors, json_lines, number_of, open_data, parquet_errors, parse_json
from rlsim.errors import TraceError, shown
from rlsim.trace.files import CSV, JSONL, PARQUET, ends

MAX_WHOLE = 2**53  # beyond it numbers are not whole any more in all programs
_BATCH = 256  # rows of a table that are held at a time: those of a rollout dump carry texts


@dataclass(frozen=True)
class Row:
    """One row of a dump: `values` as read, the `file` and the `place` in it ("line 3") for messages."""

    file: Path
    place: str
    values: Mapping[str, Any]
    project: str = ""

    def fail(self, why: str) -> TraceError:
        """The error that says what is wrong with this row."""
        return TraceError(f"{self.file}: {self.place}: {why}")

    def get(self, key: str) -> Any:
        """The value of `key`. Raises `TraceError` with the nearest name if the row has none."""
        if key in self.values:
            return self.values[key]
        near = difflib.get_close_matches(key, [str(k) for k in self.values], n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(map(str, self.values))[:200]}"
        raise self.fail(f"no {key!r}, which every row of {self.project or 'this layout'} has{hint}")

    def whole(self, key: str, least: int = 0) -> int:
        value = self.get(key)
        if not is_number(value) or value != math.floor(value) or not least <= value <= MAX_WHOLE:
            raise self.fail(f"{key} should be a whole number, {least} or more (got {shown(value)})")
        return int(value)

    def step(self, key: str) -> int:
        """The number of a step, which may be text (TRL until 0.26)."""
        value = self.get(key)
        is_text = isinstance(value, str) and value.isdecimal() and len(value) < 16
        return int(value) if is_text else self.whole(key)

    def number(self, key: str) -> float | None:
        """A number, or None where the row has null or NaN."""
        value = self.get(key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        if not is_number(value):
            raise self.fail(f"{key} should be a number (got {shown(value)})")
        return float(value)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.fail(f"{key} should be text (got {shown(value)})")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.fail(f"{key} should be a list (got {shown(value)})")
        return value

    def objects(self, key: str) -> list[Row]:
        """The objects of a list, each as a row of its own at this place."""
        values = self.items(key)
        if not all(isinstance(value, dict) for value in values):
            raise self.fail(f"{key} should be a list of objects (got {shown(values)})")
        return [self.having(value, f": {key} {number}") for number, value in enumerate(values, 1)]

    def having(self, values: Mapping[str, Any], place: str = "") -> Row:
        """The same place with other values, as for one sample of a row that holds several."""
        return Row(self.file, f"{self.place}{place}", values, self.project)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number; flags and texts are none."""
    return not isinstance(value, str) and math.isfinite(number_of(value))


def first_keys(path: Path) -> set[str]:
    """The keys of a file's first row: what a layout is recognised by. Empty if the kind of file is another."""
    if ends(path, PARQUET):
        return set(_parquet(path).schema_arrow.names)
    if ends(path, (*JSONL, *CSV, ".json")):
        row = next(file_rows(path), None)
        return set() if row is None else {str(key) for key in row.values}
    return set()


def file_rows(path: Path, project: str = "") -> Iterator[Row]:
    """The rows of a JSON Lines, Parquet or CSV file, never all in memory at once.

    Raises `TraceError` for a file that is empty, damaged, or has a line that is no JSON object.
    """
    number = 0
    objects = _objects(path) if ends(path, (".json",)) else None
    if objects is not None:
        yield from (Row(path, f"object {number}", values, project) for number, values in enumerate(objects, 1))
        return
    if not ends(path, (*PARQUET, *CSV)):
        for number, values in json_lines(path, TraceError):
            yield Row(path, f"line {number}", values, project)
        return
    parquet = ends(path, PARQUET)
    with parquet_errors(path, TraceError) if parquet else csv_errors(path, TraceError):
        batches: Iterator[list[dict[Any, Any]]] = (
            (batch.to_pylist() for batch in _parquet(path).iter_batches(batch_size=_BATCH))
            if parquet
            else _csv_batches(path)
        )
        for number, values in enumerate(chain.from_iterable(batches), 1):
            yield Row(path, f"row {number}", values, project)
    if number == 0:
        raise TraceError(f"{path}: the table {'holds no' if parquet else 'has a header and no'} rows")


def _objects(path: Path) -> list[dict[str, Any]] | None:
    """The objects of a file that is one JSON value, an object or a list; None if it is not, such as JSON Lines."""
    try:
        value = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return None
    values = value if isinstance(value, list) else [value]
    return values if values and all(isinstance(one, dict) for one in values) else None


def _parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    with parquet_errors(path, TraceError):
        return pq.ParquetFile(path, page_checksum_verification=True)


def _csv_batches(path: Path) -> Iterator[list[dict[Any, Any]]]:
    import pandas as pd

    with open_data(path) as file:
        for chunk in pd.read_csv(file, chunksize=_BATCH, index_col=False, keep_default_na=False, na_values=[""]):
            yield chunk.rename(columns=str).astype(object).where(chunk.notna(), None).to_dict("records")
