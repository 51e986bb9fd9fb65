"""The text that nccl-tests prints, several tests a file, several files.

Times are microseconds of one call (out-of-place), sizes bytes of the full tensor. The operation is in the header
(`Collective test starting: all_reduce_perf`), the command line or the file's name; without these the reduction and the
ratio of bus to algorithm bandwidth tell all_reduce and reduce_scatter. GPUs are the ranks listed. Lines may carry the
tags that mpirun and srun put before them and between what a process wrote at different times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from rlsim.base.tables import number_of
from rlsim.calibrate.importers.reading import (
    LARGEST,
    OTHER_LINK,
    check_device,
    check_messages,
    imported,
    medians,
    read_text,
)
from rlsim.calibrate.measurements import Measurements
from rlsim.cost.calibration import Reference
from rlsim.errors import CalibrationError

US = 1e-6
#: nccl-tests' programs without `_perf`, their names here, and bus bandwidth over algorithm bandwidth, times n / (n - 1)
#: (none: it is 1 whatever n). Programs without a name here are of no use to the simulator.
PROGRAMS: dict[str, tuple[str, float | None]] = {
    "all_reduce": ("all_reduce", 2.0),
    "all_gather": ("all_gather", 1.0),
    "reduce_scatter": ("reduce_scatter", 1.0),
    "alltoall": ("all_to_all", 1.0),
    "broadcast": ("broadcast", None),
    "sendrecv": ("send_recv", None),
    **dict.fromkeys(("reduce", "gather", "scatter", "hypercube", "alltoallv", "bisection"), ("", None)),
}
USED = [name for name, (op, _) in PROGRAMS.items() if op]
TOLERANCE = 0.05  # between a row's own bandwidth and size / time, both printed rounded
CLEAR = 0.5  # GB/s from which the printed bandwidths have digits enough for that
RATIO_TOLERANCE = 0.01  # of busbw / algbw, both of many digits from RATIO_CLEAR GB/s; tells 7 GPUs from 8
RATIO_CLEAR = 10.0

_TAG = re.compile(r"^\s*(\[\d+,\d+\]<std\w+>:|\d+:(?=\s)|\[[^\]\s]+\](?=\s))\s?")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\son\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_VERSION = re.compile(r"NCCL version\s+([\d.]+)|nccl-library=(\d+)")
_TIMES = r"\s+([\d.e+-]+)" * 3 + r"\s+(\S+)"
_ROW = re.compile(rf"\s*(\d+)\s+\d+\s.*?{_TIMES}(?:{_TIMES})?\s*")


class _Row(NamedTuple):
    """A row as it is printed: bytes, microseconds, GB/s twice, and the count of wrong elements."""

    line: int
    size: float
    time: float
    alg_bw: float
    bus_bw: float
    nwrong: float


@dataclass
class _Test:
    """A test's rows, and what is said about it; `local`: GPUs of one process."""

    program: str = ""
    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    local: int = 0
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
    files = [file for path in paths for file in ([path] if not path.is_dir() else sorted(path.glob("[!.]*")))]
    files = [file for file in files if not file.is_dir()]
    parts, notes, versions = [], [], set()
    for path in files:
        for test in _read_text(path):
            if test.program not in USED:
                notes.append(f"{path.name}: {test.program} is of no use to the simulator and left out")
                continue
            parts.append(_table(path, test, gpu))
            check_messages(path, parts[-1], reference, "bytes", "microseconds", OTHER_LINK)
            versions |= {test.nccl} - {""}
    if not parts:
        said = f" ({notes[0]})" if notes else ""
        raise CalibrationError(f"{', '.join(map(str, files)) or 'no files'}: no test of {', '.join(USED)}{said}")
    table = medians(pd.concat(parts), "collective")
    about = f"NCCL {', '.join(sorted(versions))}" if versions else ""
    source = imported("nccl-tests", "own measurements", (path.name for path in files), about)
    return Measurements({"collective": table}, (source,), tuple(dict.fromkeys(notes)))


def _read_text(path: Path) -> Iterator[_Test]:
    """Every test of a text file: its header, devices and table, which a line with the average bandwidth ends."""
    test, found, last, table, sums = _Test(_from_name(path)), 0, "before the first row", False, False
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        tag = _TAG.match(raw)
        line = raw[tag.end() :].replace(tag[1], " ") if tag else raw
        if starts := re.search(r"# nThread\s+(\d+)\s+nGpus\s+(\d+)", line):
            if table:
                break
            test = _Test(test.program, local=int(starts[1]) * int(starts[2]), nccl=test.nccl)
        if rank := _RANK.search(line):
            test.ranks.add(int(rank[1]))
            test.hosts.add(rank[2])
            test.devices.add(rank[3].strip())
        if (program := _PROGRAM.search(line)) and program[1] in PROGRAMS and not table:
            test.program = program[1]
        if version := _VERSION.search(line):
            test.nccl = version[1] or _version(int(version[2]))
        if re.match(r"#\s*size\s+count\s", line):
            table = True
            if "cputime" in line:
                raise CalibrationError(f"{path}: line {number}: CPU times (-C 1); run without it for the device's")
        elif table and re.match(r"\s*\d+\s+\d+\s", line):
            if not (row := _ROW.fullmatch(line)):
                raise CalibrationError(f"{path}: line {number}: not a row of nccl-tests (a line cut off?): {line[:80]}")
            wrong = row[5] if row[5].isdigit() else "0"  # older releases print an error there
            values = _Row(number, *map(number_of, (*row.groups()[:4], wrong)))
            if not all(0.0 <= value <= LARGEST for value in values[1:]):
                raise CalibrationError(f"{path}: line {number}: not a row of nccl-tests: {line[:80]}")
            test.rows.append(values)
            last, sums = f"after line {number}", " sum " in line
        elif table and "Avg bus bandwidth" in line:
            test.program = test.program or (_told_by(test) if sums else "")
            if not test.program:
                raise CalibrationError(
                    f"{path}: line {number}: which collective is this? Expected a line such as "
                    f"'# Collective test starting: all_reduce_perf', or a file name with one of {', '.join(USED)}"
                )
            yield test
            test, found, table = _Test(nccl=test.nccl), found + 1, False
    if table:
        raise CalibrationError(f"{path}: cut off {last}: no 'Avg bus bandwidth' ends the table")
    if not found:
        raise CalibrationError(f"{path}: no table of nccl-tests (a header with size, count, time, algbw, busbw)")


def _told_by(test: _Test) -> str:
    """The program that a reduction over so many GPUs and the ratio of its bandwidths tell; empty if they tell none."""
    ratios = [row.bus_bw / row.alg_bw for row in test.rows if row.alg_bw > RATIO_CLEAR]
    whole = ratios[-1] * test.gpus / (test.gpus - 1) if ratios and test.gpus > 1 else 0.0
    return next((one for one in ("all_reduce", "reduce_scatter") if abs(whole / (PROGRAMS[one][1] or 1) - 1) < 0.1), "")


def _from_name(path: Path) -> str:
    """The program that a file's name tells, the longest name that fits."""
    stem = re.sub("[-_]", "", path.stem.lower())
    return max((name for name in PROGRAMS if name.replace("_", "") in stem), key=len, default="")


def _version(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _table(path: Path, test: _Test, gpu: str) -> pd.DataFrame:
    """The rows of one test as op, gpus, bytes, seconds, after every check that the output allows."""
    (op, bus), gpus, rows = PROGRAMS[test.program], test.gpus, test.rows
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
    if gpus < 2:
        said = gpus or "an unknown number of"
        raise CalibrationError(f"{path}: {test.program} ran on {said} GPUs; expected two or more")
    rows = [row for row in rows if row.size]
    for row in rows:
        if wrong := _contradiction(row, f"{op} on {gpus} GPUs", 1.0 if bus is None else bus * (gpus - 1) / gpus):
            raise CalibrationError(f"{path}: line {row.line}: {wrong}")
    kept = [(op, gpus, row.size, row.time * US) for row in rows]
    return pd.DataFrame(kept, columns=["op", "gpus", "bytes", "seconds"])


def _contradiction(row: _Row, what: str, ratio: float) -> str:
    """What a row says against itself, nothing if it is sound; `ratio`: of busbw and algbw of such an operation."""
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
    if row.alg_bw > RATIO_CLEAR and abs(row.bus_bw / row.alg_bw / ratio - 1.0) > RATIO_TOLERANCE:
        return f"busbw / algbw is {row.bus_bw / row.alg_bw:.3g}; {what} has {ratio:.3g}"
    return ""
