"""The text that nccl-tests prints, several tests a file, several files.

Times are microseconds of one call (out-of-place), sizes bytes of the full tensor. The operation is in the header
(`Collective test starting: all_reduce_perf`), the command line or the file's name; GPUs are the ranks listed. Lines may
carry the tags that mpirun and srun put before them and between what a process wrote at different times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from rlsim.base.refusals import refuse
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
#: (none: it is 1 whatever n).
USED: dict[str, tuple[str, float | None]] = {
    "all_reduce": ("all_reduce", 2.0),
    "all_gather": ("all_gather", 1.0),
    "reduce_scatter": ("reduce_scatter", 1.0),
    "alltoall": ("all_to_all", 1.0),
    "broadcast": ("broadcast", None),
    "sendrecv": ("send_recv", None),
}

_TAG = re.compile(r"^\s*(\[\d+,\d+\]<std\w+>:|\d+:(?=\s)|\[[^\]\s]+\](?=\s))\s?")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\son\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_LOCAL = re.compile(r"# nThread\s+(\d+)\s+nGpus\s+(\d+)")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_ROW = re.compile(r"\s*(\d+)\s+\d+\s.*?" + r"\s+([\d.e+-]+)" * 3 + r"\s+(\S+)(?:(?:\s+[\d.e+-]+){3}\s+\S+)?\s*")


@dataclass
class _Test:
    """A test's rows (line, bytes, microseconds, GB/s twice, count of wrong elements), and what is said about it."""

    program: str
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)  # host and device
    local: int = 0  # GPUs of one process
    rows: list[tuple[float, ...]] = field(default_factory=list)


def read(paths: Iterable[Path], *, gpu: str = "", reference: Reference | None = None) -> Measurements:
    """All collectives in these files (a folder stands for the files in it) as one table: op, gpus, bytes, seconds.

    Tests of operations that the simulator has no use for are left out and noted. Raises `CalibrationError` naming file
    and line for output that is cut off, has wrong elements, spans nodes, does not say what was run on how many GPUs,
    or contradicts itself; with `reference`, for rates beyond the link; with `gpu`, for another GPU's.
    """
    files = [file for path in paths for file in ([path] if not path.is_dir() else sorted(path.glob("[!.]*")))]
    files = [file for file in files if not file.is_dir()]
    parts, notes = [], dict[str, None]()
    for path in files:
        for test in _tests(path):
            if test.program not in USED:
                notes[f"{path.name}: {test.program} is of no use to the simulator and left out"] = None
                continue
            parts.append(_table(path, test, gpu))
            check_messages(path, parts[-1], reference, "bytes", "microseconds", OTHER_LINK)
    if not parts:
        said = f" ({next(iter(notes))})" if notes else ""
        raise CalibrationError(f"{', '.join(map(str, files)) or 'no files'}: no test of {', '.join(USED)}{said}")
    source = imported("nccl-tests", "own measurements", (path.name for path in files))
    return Measurements({"collective": medians(pd.concat(parts), "collective")}, (source,), tuple(notes))


def _tests(path: Path) -> Iterator[_Test]:
    stem = re.sub("[-_]", "", path.stem.lower())
    named = max((name for name in USED if name.replace("_", "") in stem), key=len, default="")
    test, found, table = _Test(named), 0, False
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        tag = _TAG.match(raw)
        line = raw[tag.end() :].replace(tag[1], " ") if tag else raw
        if rank := _RANK.search(line):
            test.ranks[int(rank[1])] = rank[2], rank[3].strip()
        elif starts := _LOCAL.search(line):
            if table:
                break
            test.local = int(starts[1]) * int(starts[2])
        elif (programs := _PROGRAM.findall(line)) and not table:
            test.program = programs[-1]
        elif re.match(r"#\s*size\s+count\s", line):
            table = True
        elif table and "Avg bus bandwidth" in line:
            if not test.program:
                raise CalibrationError(
                    f"{path}: line {number}: which collective is this? Expected a line such as "
                    f"'# Collective test starting: all_reduce_perf', or a file name with one of {', '.join(USED)}"
                )
            yield test
            test, found, table = _Test(named), found + 1, False
        elif table and re.match(r"\s*\d+\s+\d+\s", line):
            row = _ROW.fullmatch(line)
            # releases before 2.11 print an error in place of the count
            values = [*map(number_of, row.groups()[:4]), float(row[5]) if row[5].isdigit() else 0.0] if row else [-1.0]
            if not all(0.0 <= value <= LARGEST for value in values):
                raise CalibrationError(f"{path}: line {number}: not a row of nccl-tests (a line cut off?): {line[:80]}")
            test.rows.append((number, *values))
    if table:
        last = f"after line {test.rows[-1][0]}" if test.rows else "before the first row"
        raise CalibrationError(f"{path}: cut off {last}: no 'Avg bus bandwidth' ends the table")
    if not found:
        raise CalibrationError(f"{path}: no table of nccl-tests (a header with size, count, time, algbw, busbw)")


def _table(path: Path, test: _Test, gpu: str) -> pd.DataFrame:
    """The rows of one test as op, gpus, bytes, seconds, after every check that the output allows."""
    (op, bus), gpus = USED[test.program], max(len(test.ranks), test.local)
    hosts = len({host for host, _ in test.ranks.values()})
    for _, device in test.ranks.values():
        check_device(path, device, gpu)
    refuse("test of nccl-tests", CalibrationError, path=path, test=test, hosts=hosts, gpus=gpus)
    rows = [row for row in test.rows if row[1]]
    ratio = 1.0 if bus is None else bus * (gpus - 1) / gpus  # of busbw and algbw
    for row in rows:
        said = dict(zip(("line", "size", "time_us", "alg", "bus", "wrong"), row, strict=True))
        refuse("row of nccl-tests", CalibrationError, path=path, what=f"{op} on {gpus} GPUs", ratio=ratio, **said)
    kept = [(op, gpus, size, time_us * US) for _, size, time_us, *_ in rows]
    return pd.DataFrame(kept, columns=["op", "gpus", "bytes", "seconds"])
