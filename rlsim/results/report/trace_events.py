"""Trace events as Chrome and Perfetto read them: JSON, one event a line.

The format is the Trace Event Format (`X` slices, `C` counters, `s` and `f` flows, `M` names). Moments are whole
microseconds: Perfetto cuts fractions off, which would make neighbours overlap.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from heapq import heappop, heappush
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

#: A track: its process, which is a group of them, and its thread.
Track = tuple[int, int]
_json = json.JSONEncoder(separators=(",", ":")).encode


def microseconds(seconds: Any) -> NDArray[np.int64]:
    """Moments in whole microseconds."""
    return np.rint(np.asarray(seconds, np.float64) * 1e6).astype(np.int64)


class TraceWriter:
    """Writes the events of one trace to an open file, as they come. `close` makes it complete."""

    def __init__(self, file: BinaryIO, about: Mapping[str, object]) -> None:
        self.slices = 0
        self.samples = 0  # of counters
        self.arrows = 0
        self._file = file
        self._ids = itertools.count(1)  # of processes, threads and arrows
        head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
        file.write(f'{head[:-1]}, "traceEvents": ['.encode())
        self._between = b"\n"  # then a comma too

    def process(self, name: str, place: int) -> int:
        """A new group of tracks; `place` says where it stands among the others."""
        pid = next(self._ids)
        self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": place}})
        return pid

    def track(self, pid: int, name: str, place: int) -> Track:
        tid = next(self._ids)
        self._write({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        self._write({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": place}})
        return pid, tid

    def slice(self, track: Track, name: str, category: str, start: int, end: int, args: Mapping[str, Any]) -> None:
        """A slice from `start` to `end` (µs); one of no length is left out. Those of a track may not overlap."""
        if end > start:
            (pid, tid), time = track, {"ts": start, "dur": end - start}
            self._write({"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **time, "args": args})
            self.slices += 1

    def sample(self, name: str, pid: int, at: int, value: int) -> None:
        self._write({"ph": "C", "name": name, "pid": pid, "ts": at, "args": {"value": value}})
        self.samples += 1

    def arrow(self, name: str, source: Track, left: int, target: Track, arrived: int) -> None:
        """An arrow from a moment (µs) within a slice to one within another."""
        known = {"cat": "flow", "name": name, "id": next(self._ids)}
        self._write({"ph": "s", **known, "pid": source[0], "tid": source[1], "ts": left})
        around = {"bp": "e"}  # to the slice around it
        self._write({"ph": "f", **around, **known, "pid": target[0], "tid": target[1], "ts": arrived})
        self.arrows += 1

    def close(self) -> None:
        self._file.write(b"\n]}\n")

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._between + _json(event).encode())
        self._between = b",\n"


class Tracks:
    """Tracks on which no two slices overlap: for every key as many as its slices need, the first one preferred.

    `track_of(key, number)` makes the `number`-th track of a key (from 0).
    """

    def __init__(self, track_of: Callable[[Any, int], Track]) -> None:
        self._track_of = track_of
        self._made: dict[Hashable, list[Track]] = defaultdict(list)
        self._busy: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)  # by key: until when, and which
        self._free: dict[Hashable, list[int]] = defaultdict(list)

    def place(self, key: Hashable, start: int, end: int) -> Track:
        """The track of a slice (µs); those of a key come in the order in which they start."""
        made, busy, free = self._made[key], self._busy[key], self._free[key]
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        number = heappop(free) if free else len(made)
        if number == len(made):
            made.append(self._track_of(key, number))
        heappush(busy, (end, number))
        return made[number]
