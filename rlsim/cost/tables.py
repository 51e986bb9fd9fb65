"""The tables of a calibration: `NAME.csv` beside `NAME.yaml`, in which `see CSV` stands where a table belongs.

A table is a few lines. The first has its key path, the names of its axes, and the knots of the last one. Each other has
one combination of knots of the other axes, and the factors along the last:

    operators.gemm.table,m,n,k,256,1024
    ,1,256,,1.0,1.01
    ,1,1024,,1.02,0.98
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import product, takewhile
from math import prod
from pathlib import Path
from typing import Any

from rlsim.base.reading import read_text, read_yaml
from rlsim.base.refusals import refuse
from rlsim.errors import CalibrationError

IN_CSV = "see CSV"


def csv_of(path: Path) -> Path:
    """The file of the tables of a calibration's YAML file."""
    return path.with_suffix(".csv")


def read_calibration(path: Path) -> Any:
    """What a calibration's YAML file says, with its tables; raises `ConfigError` for files that cannot be read."""
    data, known = read_yaml(path), dict[str, Any]()
    for key, holder, part in list(_places(data)):
        if holder[part] != IN_CSV:
            continue
        refuse("tables of a calibration", CalibrationError, path=path, csv=csv_of(path))
        known = known or dict(_tables(csv_of(path)))
        holder[part] = known.get(key, IN_CSV)
    return data


def taken_out(data: Any) -> str:
    """The CSV text of all tables within plain values, in whose places `see CSV` stands from now on."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for key, holder, part in list(_places(data)):
        axes, factor = holder[part]["axes"], holder[part]["factor"]
        *knots, last = axes.values()
        width = len(last)
        lines.writerow([key, *axes, *map(_text, last)])
        for at in product(*knots):
            lines.writerow(["", *map(_text, at), "", *map(_text, factor[:width])])
            factor = factor[width:]
        holder[part] = IN_CSV
    return text.getvalue()


def _places(data: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The key path of every table within nested values, what holds it, and under which key or number."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for part, value in items:
        key = f"{path}.{part}".lstrip(".")
        if value == IN_CSV or (isinstance(value, dict) and value.keys() == {"axes", "factor"}):
            yield key, data, part
        else:
            yield from _places(value, key)


def _text(value: float) -> str:
    return f"{value:.10g}"


def _tables(path: Path) -> Iterator[tuple[str, Any]]:
    """The tables of a CSV file by key path, as a calibration has them."""
    rows = [(n, row) for n, row in enumerate(csv.reader(read_text(path).splitlines()), 1) if row and row[0][:1] != "#"]
    begins = [i for i, (_, row) in enumerate(rows) if row[0]]
    for first, last in zip(begins, [*begins[1:], len(rows)], strict=True):
        (line, (key, *cells)), *others = rows[first:last]
        names = list(takewhile(lambda cell: not _is_number(cell), cells))
        before = len(names) - 1
        try:
            at = [[float(cell) for cell in row[1 : before + 1]] for _, row in others]
            factor = [float(cell) for _, row in others for cell in row[before + 2 :]]
            knots = [list(dict.fromkeys(column)) for column in zip(*at, strict=True)]
            knots.append([float(cell) for cell in cells[len(names) :]])
        except ValueError as error:
            raise CalibrationError(f"{path}: table {key}, from line {line} on: {error}") from None
        complete = [list(one) for one in product(*knots[:-1])] if before else [[]]
        if before < 0 or at != complete or len(factor) != prod(map(len, knots)):
            raise CalibrationError(
                f"{path}: table {key}, from line {line} on: expected a line for each combination of knots of "
                f"{', '.join(names[:-1]) or 'its axis'}, and a factor in it for each of the last axis"
            )
        yield key, {"axes": dict(zip(names, knots, strict=True)), "factor": factor}


def _is_number(cell: str) -> bool:
    try:
        return bool(float(cell))
    except ValueError:
        return False
