"""What every importer needs: files read whole or refused with their row, and times that a GPU could have taken."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from rlsim.base import catalogue
from rlsim.base.refusals import refuse
from rlsim.base.tables import csv_errors, floats, read_parquet
from rlsim.calibrate.measurements import KEYS
from rlsim.cost.calibration import Reference, Source
from rlsim.errors import CalibrationError, nearest

MS = 1e-3
LARGEST = 1e15  # of any size, count or time in a table: beyond it nothing was measured
TOO_FAST_FLOPS = 1.5  # times the peak rate: above any clock boost, far below a wrong unit
TOO_FAST_BYTES = 25.0  # times the peak bandwidth: above what an L2 gives
FAULTY = 0.05  # share of such rows up to which they are single faults, beyond it the unit is wrong
TOO_SLOW = 0.02  # share of the roofline that the typical large row must reach
LARGE_S = 20e-6  # roofline time from which a row is large: launch time no longer rules it
TOO_FAST_LINK = 1.15  # times the link
OTHER_LINK = 10.0  # times the link, where the sizes' unit is certain but the node may have faster pairs
TOO_SLOW_LINK = 0.003
LARGE_MESSAGE_S = 100e-6


def imported(project: str, licence: str, files: Iterable[str], version: str = "") -> Source:
    """Where imported tables are from."""
    return Source(project=project, commit="as imported", licence=licence, files=tuple(files), engine_version=version)


def medians(table: pd.DataFrame, operator: str) -> pd.DataFrame:
    """One row for each point of an operator, with the median of its seconds."""
    return table.groupby(list(KEYS[operator]), as_index=False)[["seconds"]].median()


def row_name(path: Path, index: int) -> str:
    """How a person finds row `index` (from 0) of the file: the line of a text file, the row of a Parquet file."""
    return f"row {index + 1}" if path.suffix == ".parquet" else f"line {index + 2}"


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a file. Raises `CalibrationError` if it is missing, empty, not text or a Git LFS pointer."""
    try:
        text = path.read_text(encoding="utf-8-sig", errors=errors)
    except FileNotFoundError:
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CalibrationError(f"{path}: no such file{'; ' + nearest(path.name, beside) if beside else ''}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read as text: {error}") from None
    refuse("text of a file", CalibrationError, path=path, text=text)
    return text


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """A Parquet or comma-separated table that has at least `columns`, its index the row of the file from 0.

    Raises `CalibrationError` naming file and row for a file that is missing, cut short, empty, without a column,
    or with lists in one.
    """
    if path.suffix != ".parquet":
        with csv_errors(path, CalibrationError):
            text = io.StringIO(read_text(path))
            table = pd.read_csv(text, skip_blank_lines=False, index_col=False, low_memory=False)
    else:
        if not path.is_file() or path.read_bytes()[:4] in (b"", b"vers"):
            read_text(path)  # missing, empty or a pointer: says which
        table = read_parquet(path, CalibrationError)[0]
    missing = [name for name in columns if name not in table]
    mixed = [name for name in columns if name in table and table[name].dtype == object]
    lists = [name for name in mixed if table[name].map(pd.api.types.is_list_like).any()]
    refuse("table of a file", CalibrationError, path=path, table=table, missing=missing, lists=lists)
    return table


def numbers(path: Path, table: pd.DataFrame, names: Sequence[str], *, positive: bool = False) -> pd.DataFrame:
    """`table` with the columns `names` as floats; raises `CalibrationError` for the first row that is not a number, or
    is negative (zero too, if `positive`)."""
    table = table.copy()
    for name in names:
        values = floats(table[name])
        bad = ~np.isfinite(values) | (values < 0.0) | (values > LARGEST) | ((values == 0.0) & positive)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            where = row_name(path, int(table.index[at]))
            kind = "a positive number" if positive else "a number of zero or more"
            kind += f", {LARGEST:g} at most" if values[at] > LARGEST else ""
            raise CalibrationError(f"{path}: {where}: {name} is {table[name].iloc[at]!s}; expected {kind}")
        table[name] = values
    return table


def choose(path: Path, table: pd.DataFrame, column: str, wanted: Sequence[str]) -> pd.DataFrame:
    """The rows whose `column` is the first of `wanted` that occurs; raises `CalibrationError` if none does."""
    found = {str(value) for value in table[column].unique()}
    for value in wanted:
        if value in found:
            return table[table[column] == value]
    raise CalibrationError(
        f"{path}: no rows with {column} {' or '.join(wanted)}; there are: {', '.join(sorted(found))}"
    )


def launches(
    path: Path, whole: Sequence[str], chosen: Mapping[str, Sequence[str]] | None = None, needed: Sequence[str] = ()
) -> pd.DataFrame:
    """The rows of a table with a latency in milliseconds, as `seconds`.

    Of every column in `chosen` the first of its values that occurs; columns `whole` as integers, `needed` as they are.
    """
    chosen = chosen or {}
    table = read_table(path, [*chosen, *needed, *whole, "latency"])
    for column, wanted in chosen.items():
        table = choose(path, table, column, wanted)
    return in_seconds(path, table, whole)


def in_seconds(path: Path, table: pd.DataFrame, whole: Sequence[str]) -> pd.DataFrame:
    """Checked numbers, `whole` as integers, and seconds beside the latency in milliseconds."""
    table = numbers(path, numbers(path, table, whole), ["latency"], positive=True)
    return table.astype(dict.fromkeys(whole, int)).assign(seconds=table.latency * MS)


def check_kernels(
    path: Path,
    table: pd.DataFrame,
    flops: ArrayLike,
    size: ArrayLike,
    ref: Reference | None,
    notes: list[str] | None = None,
) -> pd.DataFrame:
    """`table` without rows whose time (column `seconds`) no kernel of `flops` operations and `size` bytes could have
    taken; a note says how many.

    Many rows that beat the peak rates by far, or large rows that typically miss them by far, mean another unit than
    milliseconds and raise `CalibrationError`. Without `ref` nothing is known and nothing is checked.
    """
    if ref is None or table.empty:
        return table
    seconds = table.seconds.to_numpy(float)
    rate, bandwidth = np.asarray(flops, float) / ref.bf16_flop_per_s, np.asarray(size, float) / ref.memory_bytes_per_s
    fast = (rate > TOO_FAST_FLOPS * seconds) | (bandwidth > TOO_FAST_BYTES * seconds)
    ideal = np.maximum(rate, bandwidth)
    if fast.mean() > FAULTY:
        at = int(np.flatnonzero(fast)[0])
        where = row_name(path, int(table.index[at]))
        raise CalibrationError(
            f"{path}: {where} is {ideal[at] / seconds[at]:.0f} times faster than the GPU's peak allows, and so are "
            f"{fast.mean():.0%} of the rows; times are expected in milliseconds; these look like a longer unit, "
            "another GPU's, or kernels that skip work"
        )
    large = ideal > LARGE_S
    if large.any() and float(np.median(ideal[large] / seconds[large])) < TOO_SLOW:
        share = float(np.median(ideal[large] / seconds[large]))
        at = int(np.flatnonzero(large)[0])
        raise CalibrationError(
            f"{path}: {row_name(path, int(table.index[at]))} and the other large rows reach {share:.2%} of the GPU's "
            f"peak; times are expected in milliseconds; these look like a shorter unit"
        )
    if fast.any() and notes is not None:
        notes.append(f"{path.name}: {int(fast.sum())} rows far beyond the GPU's peak rates are left out")
    return table[~fast]


def check_messages(
    path: Path, table: pd.DataFrame, ref: Reference | None, sizes: str, unit: str, most: float = TOO_FAST_LINK
) -> None:
    """Refuses collectives (columns op, gpus, bytes, seconds) that the link could not have carried, or hardly used.

    `sizes` is what the file's sizes count and `unit` the unit of its times, for the message; `most` the factor over the
    link's rate from which a row is impossible.
    """
    if ref is None or table.empty:
        return
    n = table.gpus.to_numpy(float)
    parts = table.op.isin(["all_gather", "reduce_scatter", "all_to_all"]).to_numpy(bool)
    ideal = table.bytes.to_numpy(float) * np.where(parts, (n - 1) / n, 1.0) / ref.link_bytes_per_s
    factor = ideal / table.seconds.to_numpy(float)
    if float(factor.max()) > most:
        at = int(np.argmax(factor))
        where = row_name(path, int(table.index[at]))
        guess = "times in a longer unit" if factor[at] > 20 else "sizes in another unit, or another link's"
        raise CalibrationError(
            f"{path}: {where}: {factor[at]:.1f} times the rate of the link ({ref.link_bytes_per_s / 1e9:.0f} GB/s); "
            f"sizes are expected in {sizes} and times in {unit}; these look like {guess}"
        )
    large = ideal > LARGE_MESSAGE_S
    if large.any() and float(np.median(factor[large])) < TOO_SLOW_LINK:
        raise CalibrationError(
            f"{path}: large messages reach {float(np.median(factor[large])):.2%} of the link; sizes are expected in "
            f"{sizes} and times in {unit}; these look like times in a shorter unit"
        )


def check_device(path: Path, device: str, gpu: str) -> None:
    """Refuses a table measured on another GPU of the catalogue than `gpu`; devices and GPUs it does not know pass."""
    known = catalogue.names("gpus")
    families = {name.split("-")[0] for name in known}
    found = {name for name in families if re.search(rf"\b{name}\b", device.lower())}
    if gpu in known and found and gpu.split("-")[0] not in found:
        raise CalibrationError(f"{path}: measured on {device}, but the GPU given is {gpu}")


def subfolders(folder: Path) -> list[str]:
    """The names of the folders in `folder`, none if it does not exist."""
    return sorted(item.name for item in folder.iterdir() if item.is_dir()) if folder.is_dir() else []


def version_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts releases: 0.9 < 0.14.0rc2 < 0.14.0 < 0.14.0.post1."""
    key: list[tuple[int, int, str]] = []
    for number, word in re.findall(r"(\d+)|([a-z]+)", name.lower()):
        if number:
            key.append((1, int(number), ""))
        else:
            key.append((-1 if word in ("a", "b", "rc", "dev") else 2, 0, word))
    return (*key, (0, 0, ""))
