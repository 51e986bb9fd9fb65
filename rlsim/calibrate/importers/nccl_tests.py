"""The output of nccl-tests: its text tables and its JSON reports (`-J FILE`), several tests a file, several files.

Times are microseconds of one call (out-of-place), sizes bytes of the full tensor. The operation is in the header
(`Collective test starting: all_reduce_perf`), the command line or the file's name; without these the reduction and the
ratio of bus to algorithm bandwidth tell all_reduce and reduce_scatter. GPUs are the ranks listed. Lines may carry the
tags that mpirun and srun put before them and between what a process wrote at different times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rlsim.calibrate.importers.reading import (
    LARGEST,
    OTHER_LINK,
    check_device,
    check_messages,
    imported,
    medians,
    read_json,
    read_text,
)
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Reference
from rlsim.errors import CalibrationError
from rlsim.tables import number_of

US = 1e-6
#: nccl-tests' programs without `_perf`, and their names in JSON.
PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
UNUSED = ("reduce", "gather", "scatter", "hypercube", "alltoallv", "bisection")
MOST_RANKS = 2**20  # more GPUs than any cluster has
#: Bus bandwidth over algorithm bandwidth, times n / (n - 1); the other operations have 1 whatever n.
BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
TOLERANCE = 0.05  # between a row's own bandwidth and size / time, both printed rounded
CLEAR = 0.5  # GB/s from which the printed bandwidths have digits enough for that
RATIO_TOLERANCE = 0.01  # of busbw / algbw, both of many digits from RATIO_CLEAR GB/s; tells 7 GPUs from 8
RATIO_CLEAR = 10.0
MOST_GPUS = 4096  # of a process, to refuse what cannot be meant

_TAG = re.compile(r"^\s*(\[\d+,\d+\]<std\w+>:|\d+:(?=\s)|\[[^\]\s]+\](?=\s))\s?")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\son\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_STARTS = re.compile(r"# nThread\s+(\d+)\s+nGpus\s+(\d+)")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_VERSION = re.compile(r"NCCL version\s+([\d.]+)|nccl-library=(\d+)")


@dataclass
class _Test:
    """What the lines before a table say about it."""

    program: str = ""
    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    local: int = 0  # threads x GPUs of one process
    nccl: str = ""


@dataclass(frozen=True)
class _Row:
    """A row as it is printed: bytes, microseconds, GB/s twice, and the count of wrong elements."""

    where: str
    size: float
    time: float
    alg_bw: float
    bus_bw: float
    nwrong: float


def read(paths: Iterable[Path], *, gpu: str = "", reference: Reference | None = None) -> Measurements:
    """All collectives in these files (a folder stands for the files in it) as one table: op, gpus, bytes, seconds.

    Tests of operations that the simulator has no use for are left out and noted. Raises `CalibrationError` naming file
    and line for output that is cut off, has wrong elements, spans nodes, does not say what was run on how many GPUs,
    or contradicts itself; with `reference`, for rates beyond the link; with `gpu`, for another GPU's.
    """
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise CalibrationError("no nccl-tests output given")
    parts, notes, versions = [], [], set()
    for path in files:
        found, version, left = _read_json(path, gpu) if _is_json(path) else _read_text(path, gpu)
        for rows in found:
            check_messages(path, rows.reset_index(drop=True), reference, "bytes", "microseconds", OTHER_LINK)
        parts.extend(found)
        versions.update(version)
        notes.extend(left)
    if not parts:
        raise CalibrationError(
            f"{', '.join(map(str, files))}: no test of {', '.join(PROGRAMS)}{f' ({notes[0]})' if notes else ''}"
        )
    table = medians(pd.concat(parts), "collective")
    about = f"NCCL {', '.join(sorted(versions))}" if versions else ""
    source = imported("nccl-tests", "own measurements", (path.name for path in files), about)
    return Measurements({"collective": table}, (source,), tuple(dict.fromkeys(notes)))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return [path]


def _is_json(path: Path) -> bool:
    return read_text(path).lstrip().startswith("{")


# Text -----------------------------------------------------------------------------------------------------------------


def _read_text(path: Path, gpu: str) -> tuple[list[pd.DataFrame], set[str], list[str]]:
    """Every test's table in a text file, the NCCL versions, and notes on tests left out."""
    test = _Test(program=_from_name(path))
    columns: list[str] | None = None
    rows: list[_Row] = []
    found: list[pd.DataFrame] = []
    versions: set[str] = set()
    notes: list[str] = []
    last, sums = 0, False
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        tag = _TAG.match(raw)
        line = raw[tag.end() :].replace(tag[1], " ") if tag else raw
        where = f"line {number}"
        starts = _STARTS.search(line)
        if starts and (rows or columns):
            raise _cut(path, last)
        if starts:
            test = _Test(program=test.program, local=int(starts[1]) * int(starts[2]), nccl=test.nccl)
        _describe(test, line, before_table=columns is None)
        words = line.lstrip("# \t").split()
        if words[:2] == ["size", "count"]:
            columns = words
        elif columns and words[:1] == ["(B)"]:
            times = [unit for name, unit in zip(_measured(columns), words[2:], strict=False) if name.endswith("time")]
            if times and times[0] != "(us)":
                raise CalibrationError(f"{path}: {where}: times in {times[0]}; nccl-tests prints microseconds")
        elif columns and re.match(r"\s*\d+\s+\d+\s", line):
            rows.append(_row(path, where, line, columns))
            sums, last = " sum " in line, number
        elif columns and "Avg bus bandwidth" in line:
            test.program = test.program or _told_by(rows, max(len(test.ranks), test.local), sums)
            if not test.program:
                raise CalibrationError(
                    f"{path}: {where}: which collective is this? Expected a line such as "
                    f"'# Collective test starting: all_reduce_perf', or a file name with one of {', '.join(PROGRAMS)}"
                )
            if test.program in PROGRAMS:
                found.append(_table(path, test, rows, gpu))
                versions.update({test.nccl} - {""})
            else:
                notes.append(_left_out(path, test.program))
            columns, rows = None, []
            test = _Test(nccl=test.nccl)
    if columns is not None:
        raise _cut(path, last)
    if not found and not notes:
        raise CalibrationError(f"{path}: no table of nccl-tests (a header with size, count, time, algbw, busbw)")
    return found, versions, notes


def _describe(test: _Test, line: str, before_table: bool) -> None:
    """Takes from a line what it says about the test."""
    rank, program, version = _RANK.search(line), _PROGRAM.search(line), _VERSION.search(line)
    if rank:
        test.ranks.add(int(rank[1]))
        test.hosts.add(rank[2])
        test.devices.add(rank[3].strip())
    if program and (program[1] in PROGRAMS or program[1] in UNUSED) and before_table:
        test.program = program[1]
    if version:
        test.nccl = version[1] or _version(int(version[2]))


def _told_by(rows: Sequence[_Row], gpus: int, sums: bool) -> str:
    """The program that a reduction over so many GPUs and the ratio of its bandwidths tell; empty if they tell none."""
    ratios = [row.bus_bw / row.alg_bw for row in rows if row.alg_bw > RATIO_CLEAR]
    if not sums or not ratios or gpus < 2:
        return ""
    near = (
        name for name in ("all_reduce", "reduce_scatter") if abs(ratios[-1] * gpus / (gpus - 1) / BUS[name] - 1) < 0.1
    )
    return next(near, "")


def _left_out(path: Path, program: str) -> str:
    return f"{path.name}: {program} is of no use to the simulator and left out"


def _cut(path: Path, line: int) -> CalibrationError:
    after = f"after line {line}" if line else "before the first row"
    return CalibrationError(f"{path}: cut off {after}: no 'Avg bus bandwidth' ends the table")


def _measured(columns: list[str]) -> list[str]:
    """The columns from the first time on; before it are size, count and what is not always printed."""
    first = next((i for i, name in enumerate(columns) if name.endswith("time")), len(columns))
    return [name for name in columns[first:] if name != "timestamp"]


def _row(path: Path, where: str, line: str, columns: list[str]) -> _Row:
    names = _measured(columns)
    words = line.split()
    if "timestamp" in columns:
        words = words[:-2]
    if names[:1] == ["cputime"]:
        raise CalibrationError(f"{path}: {where}: CPU times (-C 1); run without it for the device's")
    described = len(columns) - len(names) - ("timestamp" in columns)
    if len(words) < 2 + len(names) or len(words) > described + len(names) or "time" not in names:
        raise CalibrationError(
            f"{path}: {where}: {len(words)} values, the header names {len(columns)} (a line cut off?)"
        )
    values = dict(zip(reversed(names), reversed(words[-len(names) :]), strict=True))  # the first of each name
    wrong = next((values[name] for name in ("#wrong", "error") if name in values), "0")
    wrong_count = "0" if wrong == "N/A" or "error" in values else wrong
    texts = {"size": words[0], "time": values["time"], "alg_bw": values.get("algbw"), "bus_bw": values.get("busbw"),
             "nwrong": wrong_count}  # fmt: skip
    return _Row(where, **_amounts(path, where, texts))


def _from_name(path: Path) -> str:
    """The program that a file's name tells, the longest name that fits."""
    stem = path.stem.lower().replace("-", "_")
    plain = stem.replace("_", "")
    fits = [name for name in (*PROGRAMS, *UNUSED) if name in stem or name.replace("_", "") in plain]
    return max(fits, key=len, default="")


def _version(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


# JSON -----------------------------------------------------------------------------------------------------------------


def _read_json(path: Path, gpu: str) -> tuple[list[pd.DataFrame], set[str], list[str]]:
    """The table of a JSON report, its NCCL version, and a note if the test is left out."""
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict) or not _records(data.get("results")):
        raise CalibrationError(f"{path}: not a report of nccl-tests: expected keys config and results")
    if not data["results"]:
        raise CalibrationError(f"{path}: the report has no results")
    if "average_bus_bandwidth" not in data:
        raise CalibrationError(f"{path}: cut off: no average_bus_bandwidth ends the results")
    config = data["config"]
    devices = config.get("devices", [])
    local = [config.get(key, 1) for key in ("nthreads", "ngpus")]
    if not _records(devices) or not all(type(count) is int and 1 <= count <= MOST_GPUS for count in local):
        raise CalibrationError(f"{path}: config: expected whole numbers nthreads and ngpus, and devices as a list")
    test = _Test(program=_json_program(path, data), nccl=_json_version(data))
    test.local = local[0] * local[1]
    # a process lists its first device only
    test.ranks = set(range(max(1, len(devices)) * test.local))
    test.hosts = {str(one.get("hostname")) for one in devices}
    test.devices = {str(one.get("device_info", "")) for one in devices}
    if not test.program:
        raise CalibrationError(f"{path}: which collective is this? Neither args, experiment_name nor the file name say")
    if test.program in UNUSED:
        return [], set(), [_left_out(path, test.program)]
    rows = [_json_row(path, i, item) for i, item in enumerate(data["results"])]
    return [_table(path, test, rows, gpu)], {test.nccl} - {""}, []


def _records(value: Any) -> bool:
    """Whether it is a list of objects, none among them."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _json_program(path: Path, data: Mapping[str, Any]) -> str:
    args = data.get("args")
    named = _PROGRAM.search(str(args[0])) if isinstance(args, list) and args else None
    if named:
        return named[1]
    name = str(data["results"][0].get("experiment_name", "")).lower()
    known = {program.replace("_", ""): program for program in (*PROGRAMS, *UNUSED)}
    return known.get(name, "") or _from_name(path)


def _json_version(data: Mapping[str, Any]) -> str:
    number = data.get("nccl_version")
    return _version(number) if isinstance(number, int) else ""


def _json_row(path: Path, index: int, item: Mapping[str, Any]) -> _Row:
    where = f"results[{index}]"
    body = item.get("out_of_place") or item.get("in_place")
    if not isinstance(body, dict) or "size" not in item:
        raise CalibrationError(f"{path}: {where}: expected size and out_of_place")
    if "cpu_time" in body:
        raise CalibrationError(f"{path}: {where}: CPU times (-C 1); run without it for the device's")
    values = {"size": item["size"], **{key: body.get(key) for key in ("time", "alg_bw", "bus_bw")},
              "nwrong": body.get("nwrong") or 0.0}  # fmt: skip
    return _Row(where, **_amounts(path, where, values))


# Both -----------------------------------------------------------------------------------------------------------------


def _amounts(path: Path, where: str, values: Mapping[str, Any]) -> dict[str, float]:
    """These values as numbers. Raises `CalibrationError` with the row for one that is none, or cannot be measured."""
    numbers = {key: number_of(value) for key, value in values.items()}
    for key, number in numbers.items():
        if not 0.0 <= number <= LARGEST:
            raise CalibrationError(
                f"{path}: {where}: not a row of nccl-tests: {key} is {str(values[key])[:40]!r}, expected a number of "
                "zero or more"
            )
    return numbers


def _table(path: Path, test: _Test, rows: list[_Row], gpu: str) -> pd.DataFrame:
    """The rows of one test as op, gpus, bytes, seconds, after every check that the output allows."""
    op = PROGRAMS[test.program]
    if not rows:
        raise CalibrationError(f"{path}: the table of {test.program} has no rows")
    if len(test.hosts) > 1:
        share = max(row.bus_bw for row in rows) * len(test.hosts) / max(len(test.ranks), 1)
        raise CalibrationError(
            f"{path}: {test.program} ran over {len(test.hosts)} nodes; a calibration holds collectives inside one. The "
            "network between nodes is told by the cluster's YAML: inter: {name: …, bytes_per_s: …, latency_s: …}; here "
            f"the bus bandwidth is {share:.3g} GB/s for each GPU of a node"
        )
    for device in test.devices:
        check_device(path, device, gpu)
    gpus = max(len(test.ranks), test.local)
    if not 2 <= gpus <= MOST_RANKS:
        raise CalibrationError(
            f"{path}: {test.program} ran on {gpus or 'an unknown number of'} GPUs; expected 2 to {MOST_RANKS:,}"
        )
    kept = []
    for row in rows:
        if row.size == 0:
            continue
        if row.time == 0:
            raise CalibrationError(f"{path}: {row.where}: a time of {row.time:g} us; expected a positive number")
        if row.nwrong:
            raise CalibrationError(
                f"{path}: {row.where}: {row.nwrong:.0f} wrong elements: the run did not compute right"
            )
        rate = row.size / row.time / 1e3
        if max(row.alg_bw, rate) > CLEAR and abs(row.alg_bw / rate - 1.0) > TOLERANCE:
            raise CalibrationError(
                f"{path}: {row.where}: {row.size:.0f} in {row.time:g} is {rate:.3g} GB/s, but the row says "
                f"{row.alg_bw:g}: sizes are expected in bytes and times in microseconds"
            )
        expected = BUS[op] * (gpus - 1) / gpus if op in BUS else 1.0
        if row.alg_bw > RATIO_CLEAR and abs(row.bus_bw / row.alg_bw / expected - 1.0) > RATIO_TOLERANCE:
            raise CalibrationError(
                f"{path}: {row.where}: busbw / algbw is {row.bus_bw / row.alg_bw:.3g}; {op} on {gpus} GPUs has "
                f"{expected:.3g}"
            )
        kept.append((op, gpus, row.size, row.time * US))
    return pd.DataFrame(kept, columns=["op", "gpus", "bytes", "seconds"])
