"""Data files of other programs, read whole or refused: Parquet, JSON, compressed text, and columns of numbers.

What libraries raise for damaged files stays in here; importers see rows, or one error that names the file.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from rlsim.errors import RlsimError

if TYPE_CHECKING:
    import pandas as pd

#: What reading a text raises, compressed or not.
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error)


def parse_json(text: str) -> Any:
    """The value of a JSON text; raises `ValueError` for anything else, whole numbers that no float holds among it.

    Half a character, as in text that was cut, becomes a question mark: no file could hold it.
    """
    try:
        value = json.loads(text, parse_int=_whole)
        return _without_halves(value) if "\\ud" in text.lower() else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_halves(value: Any) -> Any:
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_halves(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _whole(digits: str) -> int:
    if len(digits) > 300:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def open_data(path: Path) -> IO[bytes]:
    """A file's bytes, decompressed if its name ends in .gz; reading may raise what `UNREADABLE` lists."""
    return cast("IO[bytes]", gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb"))


def json_lines(path: Path, error: type[RlsimError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file, one at a time with the numbers of their lines; blank lines are passed over.

    Raises `error`, with the line where there is one, for a file that cannot be read, is empty or holds anything else.
    """
    number, empty = 0, True
    try:
        with io.TextIOWrapper(open_data(path), encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                empty = False
                try:
                    values = parse_json(line)
                except ValueError as problem:
                    cut = "" if line.endswith("\n") else "; the last line was cut while being written? Delete it"
                    raise error(f"{path}: line {number}: not valid JSON: {problem}{cut}") from None
                if not isinstance(values, dict):
                    raise error(f'{path}: line {number}: expected an object such as {{"response_tokens": 512}}')
                yield number, values
    except UNREADABLE as problem:
        raise error(f"{path}: after line {number}: cannot be read (truncated or damaged?): {problem}") from None
    if empty:
        raise error(f"{path}: the file is empty")


@contextmanager
def csv_errors(path: Path, error: type[RlsimError]) -> Iterator[None]:
    """Whatever pandas raises within, over a file that is no table of comma-separated values, as one `error`.

    A row with more values than the header names is an error too, not a row that loses some.
    """
    import pandas as pd

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            yield
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except pd.errors.EmptyDataError:
        raise error(f"{path}: the file is empty") from None
    except UNREADABLE as problem:
        raise error(f"{path}: cannot be read (truncated or damaged?): {problem}") from None
    except (pd.errors.ParserWarning, ValueError, OverflowError) as problem:
        reason = str(problem).strip().removeprefix("Error tokenizing data. ").removeprefix("C error: ")
        raise error(f"{path}: not valid CSV: {reason}") from None


@contextmanager
def parquet_errors(path: Path, error: type[RlsimError]) -> Iterator[None]:
    """Whatever pyarrow raises within, over a file that is missing, truncated or damaged, as one `error`."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, ValueError, OverflowError) as problem:  # no UTF-8, a date of no year
        reason = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise error(f"{path}: not a readable Parquet file (truncated or damaged?): {reason}") from None


def read_parquet(path: Path, error: type[RlsimError]) -> tuple[pd.DataFrame, dict[bytes, bytes]]:
    """All rows of a Parquet file as it stores them, and its key-value metadata.

    Pages are checked against their checksums. Raises `error` for a file that is no Parquet, damaged, or has a column
    twice.
    """
    import pyarrow.parquet as pq

    with parquet_errors(path, error):
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
        table.validate(full=True)  # texts are UTF-8: pandas would find out only when it looks at one
        names = table.column_names
        frame = table.to_pandas(ignore_metadata=True, integer_object_nulls=True, timestamp_as_object=True)
    if len(set(names)) < len(names):
        raise error(f"{path}: a column name appears twice: {', '.join(names)}")
    return frame, dict(table.schema.metadata or {})


def floats(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """A column as numbers; NaN for whatever is none: missing, a flag, text that spells none, bytes, a date, a list."""
    if column.dtype.kind in "iuf":
        return column.to_numpy(np.float64, na_value=np.nan)
    return np.array([number_of(value) for value in column], np.float64)


def number_of(value: Any) -> float:
    """A number, or text that spells one, as a float; NaN for anything else and for numbers that no float holds."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | str | np.number):
        return math.nan
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        return math.nan  # Python's spellings, no program's
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
