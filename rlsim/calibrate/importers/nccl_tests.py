"""The output of nccl-tests: its text tables and its JSON reports (`-J FILE`), several tests a file, several files.

Times are microseconds of one call (out-of-place), sizes bytes of the full tensor. The operation is in the header
(`Collective test starting: all_reduce_perf`), the command line or the file's name; without these the reduction and the
ratio of bus to algorithm bandwidth tell all_reduce and reduce_scatter. GPUs are the ranks listed. Lines may carry the
tags that mpirun and srun put before them and between what a process wrote at different times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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


class _Row(NamedTuple):
    """A row as it is printed: bytes, microseconds, GB/s twice, and the count of wrong elements."""

    where: str
    size: float
    time: float
    alg_bw: float
    bus_bw: float
    nwrong: float


@dataclass
class _Test:
    """A test's rows, and what is said about it."""

    program: str = ""
    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    local: int = 0  # threads x GPUs of one process
    nccl: str = ""
    rows: list[_Row] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return max(len(self.ranks), self.local)


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
        is_json = read_text(path).lstrip().startswith("{")
        for test in [_read_json(path)] if is_json else _read_text(path):
            if test.program not in PROGRAMS:
                notes.append(f"{path.name}: {test.program} is of no use to the simulator and left out")
                continue
            parts.append(_table(path, test, gpu))
            check_messages(path, parts[-1], reference, "bytes", "microseconds", OTHER_LINK)
            versions |= {test.nccl} - {""}
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


def _read_text(path: Path) -> Iterator[_Test]:
    """Every test of a text file."""
    test = _Test(program=_from_name(path))
    columns: list[str] = []  # of the table that is being read
    last, sums, count = 0, False, 0
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        tag = _TAG.match(raw)
        line = raw[tag.end() :].replace(tag[1], " ") if tag else raw
        starts, rank, program, version = (found.search(line) for found in (_STARTS, _RANK, _PROGRAM, _VERSION))
        if starts:
            if columns:
                break
            test = _Test(program=test.program, local=int(starts[1]) * int(starts[2]), nccl=test.nccl)
        if rank:
            test.ranks.add(int(rank[1]))
            test.hosts.add(rank[2])
            test.devices.add(rank[3].strip())
        if program and program[1] in (*PROGRAMS, *UNUSED) and not columns:
            test.program = program[1]
        if version:
            test.nccl = version[1] or _version(int(version[2]))
        words = line.lstrip("# \t").split()
        if words[:2] == ["size", "count"]:
            columns = words
        elif columns and words[:1] == ["(B)"]:
            times = [unit for name, unit in zip(_measured(columns), words[2:], strict=False) if name.endswith("time")]
            if times and times[0] != "(us)":
                raise CalibrationError(f"{path}: line {number}: times in {times[0]}; nccl-tests prints microseconds")
        elif columns and re.match(r"\s*\d+\s+\d+\s", line):
            test.rows.append(_text_row(path, f"line {number}", line, columns))
            sums, last = " sum " in line, number
        elif columns and "Avg bus bandwidth" in line:
            test.program = test.program or (_told_by(test) if sums else "")
            if not test.program:
                raise CalibrationError(
                    f"{path}: line {number}: which collective is this? Expected a line such as "
                    f"'# Collective test starting: all_reduce_perf', or a file name with one of {', '.join(PROGRAMS)}"
                )
            yield test
            test, columns, count = _Test(nccl=test.nccl), [], count + 1
    if columns:
        after = f"after line {last}" if last else "before the first row"
        raise CalibrationError(f"{path}: cut off {after}: no 'Avg bus bandwidth' ends the table")
    if not count:
        raise CalibrationError(f"{path}: no table of nccl-tests (a header with size, count, time, algbw, busbw)")


def _told_by(test: _Test) -> str:
    """The program that a reduction over so many GPUs and the ratio of its bandwidths tell; empty if they tell none."""
    ratios = [row.bus_bw / row.alg_bw for row in test.rows if row.alg_bw > RATIO_CLEAR]
    if not ratios or test.gpus < 2:
        return ""
    whole = ratios[-1] * test.gpus / (test.gpus - 1)
    return next((name for name in ("all_reduce", "reduce_scatter") if abs(whole / BUS[name] - 1) < 0.1), "")


def _measured(columns: list[str]) -> list[str]:
    """The columns from the first time on; before it are size, count and what is not always printed."""
    first = next((i for i, name in enumerate(columns) if name.endswith("time")), len(columns))
    return [name for name in columns[first:] if name != "timestamp"]


def _text_row(path: Path, where: str, line: str, columns: list[str]) -> _Row:
    names, words = _measured(columns), line.split()
    stamped = "timestamp" in columns
    words = words[:-2] if stamped else words
    if names[:1] == ["cputime"]:
        raise CalibrationError(f"{path}: {where}: CPU times (-C 1); run without it for the device's")
    if not 2 + len(names) <= len(words) <= len(columns) - stamped or "time" not in names:
        raise CalibrationError(
            f"{path}: {where}: {len(words)} values, the header names {len(columns)} (a line cut off?)"
        )
    values = dict(zip(reversed(names), reversed(words[-len(names) :]), strict=True))  # the first of each name
    wrong = values.get("#wrong", "0")
    counted = "0" if wrong == "N/A" or "error" in values else wrong
    return _row(path, where, words[0], values["time"], values.get("algbw"), values.get("busbw"), counted)


def _from_name(path: Path) -> str:
    """The program that a file's name tells, the longest name that fits."""
    stem = path.stem.lower().replace("-", "_")
    plain = stem.replace("_", "")
    fits = [name for name in (*PROGRAMS, *UNUSED) if name in stem or name.replace("_", "") in plain]
    return max(fits, key=len, default="")


def _version(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _read_json(path: Path) -> _Test:
    """The test of a JSON report."""
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict) or not _records(data.get("results")):
        raise CalibrationError(f"{path}: not a report of nccl-tests: expected keys config and results")
    if not data["results"]:
        raise CalibrationError(f"{path}: the report has no results")
    if "average_bus_bandwidth" not in data:
        raise CalibrationError(f"{path}: cut off: no average_bus_bandwidth ends the results")
    config, number = data["config"], data.get("nccl_version")
    devices = config.get("devices", [])
    local = [config.get(key, 1) for key in ("nthreads", "ngpus")]
    if not _records(devices) or not all(type(count) is int and 1 <= count <= MOST_GPUS for count in local):
        raise CalibrationError(f"{path}: config: expected whole numbers nthreads and ngpus, and devices as a list")
    test = _Test(
        program=_json_program(path, data),
        ranks=set(range(max(1, len(devices)) * local[0] * local[1])),  # a process lists its first device only
        hosts={str(one.get("hostname")) for one in devices},
        devices={str(one.get("device_info", "")) for one in devices},
        nccl=_version(number) if isinstance(number, int) else "",
    )
    if not test.program:
        raise CalibrationError(f"{path}: which collective is this? Neither args, experiment_name nor the file name say")
    for i, item in enumerate(data["results"] if test.program in PROGRAMS else []):
        where, body = f"results[{i}]", item.get("out_of_place") or item.get("in_place")
        if not isinstance(body, dict) or "size" not in item:
            raise CalibrationError(f"{path}: {where}: expected size and out_of_place")
        if "cpu_time" in body:
            raise CalibrationError(f"{path}: {where}: CPU times (-C 1); run without it for the device's")
        figures = (body.get(key) for key in ("time", "alg_bw", "bus_bw"))
        test.rows.append(_row(path, where, item["size"], *figures, body.get("nwrong") or 0.0))
    return test


def _records(value: Any) -> bool:
    """Whether it is a list of objects, none among them."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _json_program(path: Path, data: Mapping[str, Any]) -> str:
    args = data.get("args")
    named = _PROGRAM.search(str(args[0])) if isinstance(args, list) and args else None
    name = str(data["results"][0].get("experiment_name", "")).lower()
    known = {program.replace("_", ""): program for program in (*PROGRAMS, *UNUSED)}
    return named[1] if named else known.get(name, "") or _from_name(path)


def _row(path: Path, where: str, *values: Any) -> _Row:
    """These values as a row. Raises `CalibrationError` for one that is no number, or cannot be measured."""
    row = _Row(where, *map(number_of, values))
    for key, number, value in zip(row._fields[1:], row[1:], values, strict=True):
        if not 0.0 <= number <= LARGEST:
            raise CalibrationError(
                f"{path}: {where}: not a row of nccl-tests: {key} is {str(value)[:40]!r}, expected a number of zero "
                "or more"
            )
    return row


def _table(path: Path, test: _Test, gpu: str) -> pd.DataFrame:
    """The rows of one test as op, gpus, bytes, seconds, after every check that the output allows."""
    op, gpus, rows = PROGRAMS[test.program], test.gpus, test.rows
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
    if not 2 <= gpus <= MOST_RANKS:
        raise CalibrationError(
            f"{path}: {test.program} ran on {gpus or 'an unknown number of'} GPUs; expected 2 to {MOST_RANKS:,}"
        )
    rows = [row for row in rows if row.size]
    for row in rows:
        wrong = _contradiction(row, op, gpus)
        if wrong:
            raise CalibrationError(f"{path}: {row.where}: {wrong}")
    kept = [(op, gpus, row.size, row.time * US) for row in rows]
    return pd.DataFrame(kept, columns=["op", "gpus", "bytes", "seconds"])


def _contradiction(row: _Row, op: str, gpus: int) -> str:
    """What a row says against itself, nothing if it is sound."""
    if row.time == 0:
        return "a time of 0 us; expected a positive number"
    if row.nwrong:
        return f"{row.nwrong:.0f} wrong elements: the run did not compute right"
    rate = row.size / row.time / 1e3
    if max(row.alg_bw, rate) > CLEAR and abs(row.alg_bw / rate - 1.0) > TOLERANCE:
        return (
            f"{row.size:.0f} in {row.time:g} is {rate:.3g} GB/s, but the row says {row.alg_bw:g}: sizes are expected "
            "in bytes and times in microseconds"
        )
    expected = BUS[op] * (gpus - 1) / gpus if op in BUS else 1.0
    if row.alg_bw > RATIO_CLEAR and abs(row.bus_bw / row.alg_bw / expected - 1.0) > RATIO_TOLERANCE:
        return f"busbw / algbw is {row.bus_bw / row.alg_bw:.3g}; {op} on {gpus} GPUs has {expected:.3g}"
    return ""
