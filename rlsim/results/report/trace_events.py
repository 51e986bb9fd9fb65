"""Trace events as Chrome and Perfetto read them: JSON, one event a line, written whole columns at a time.

The format is the Trace Event Format (`X` slices, `C` counters, `s` and `f` flows, `M` names). Moments are whole
microseconds: Perfetto cuts fractions off, which would make neighbours overlap.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

#: Lines that are put together at a time.
LINES = 32_768
#: More tracks than a key ever needs.
MOST_TRACKS = 1 << 20

Numbers: TypeAlias = NDArray[Any]
#: A piece of every line: the same text or number in each, or a column of numbers or of JSON texts.
Piece: TypeAlias = "str | int | Numbers | pa.Array"


def microseconds(seconds: Any) -> NDArray[np.int64]:
    """Moments in whole microseconds."""
    return np.rint(np.asarray(seconds, np.float64) * 1e6).astype(np.int64)


def json_texts(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column of texts, each as JSON writes it; made once for each that is different."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    encoded = values.dictionary_encode()
    return pa.array([json.dumps(text) for text in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


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
        return self._named("process", name, place, next(self._ids))

    def thread(self, pid: int, name: str, place: int) -> int:
        return self._named("thread", name, place, pid, next(self._ids))

    def _named(self, kind: str, name: str, place: int, pid: int, tid: int | None = None) -> int:
        where = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
        for event, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": place})):
            self._file.write(self._between + json.dumps({"ph": "M", "name": event, **where, "args": args}).encode())
            self._between = b",\n"
        return pid if tid is None else tid

    def add_slices(
        self,
        name: tuple[Piece, ...],
        category: str,
        pid: Piece,
        tid: Piece,
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        args: Mapping[str, Piece],
    ) -> None:
        """Slices from `start` to `end` (µs); those of no length are left out.

        `name` is JSON text in pieces. Slices on one track may not overlap (see `Tracks`).
        """
        some = end > start
        pieces: list[Piece] = [',\n{"ph":"X","name":', *name, f',"cat":"{category}","pid":', pid, ',"tid":', tid]
        pieces += [',"ts":', start, ',"dur":', end - start, ',"args":{']
        for i, (key, value) in enumerate(args.items()):
            pieces += [f'{"," if i else ""}"{key}":', value]
        self.slices += self._write([*pieces, "}}"], some)

    def add_samples(self, name: str, pid: Piece, at: NDArray[np.int64], value: Numbers, some: Numbers) -> None:
        """Values that a counter takes on at these moments (µs), where `some` says so."""
        pieces: list[Piece] = [f',\n{{"ph":"C","name":"{name}","pid":', pid, ',"ts":', at, ',"args":{"value":', value]
        self.samples += self._write([*pieces, "}}"], some)

    def add_arrows(
        self,
        name: pa.Array,
        source: tuple[Numbers, Numbers, NDArray[np.int64]],
        target: tuple[Numbers, Numbers, NDArray[np.int64]],
    ) -> None:
        """Arrows between slices, each end a process, a track and a moment (µs) within the slice."""
        ids = np.fromiter(itertools.islice(self._ids, len(name)), np.int64, len(name))
        for phase, (pid, tid, at) in (('"s"', source), ('"f","bp":"e"', target)):  # e: to the slice around it
            head = f',\n{{"ph":{phase},"cat":"flow","name":'
            pieces: list[Piece] = [head, name, ',"id":', ids, ',"pid":', pid, ',"tid":', tid, ',"ts":', at, "}"]
            self._write(pieces, np.ones(len(name), np.bool_))
        self.arrows += len(name)

    def close(self) -> None:
        self._file.write(b"\n]}\n")

    def _write(self, pieces: list[Piece], some: Numbers) -> int:
        """One line for every entry of the columns where `some` says so; returns how many."""
        rows = np.flatnonzero(some)
        for first in range(0, len(rows), LINES):
            part: Numbers | slice = rows[first : first + LINES]
            if len(rows) == len(some):
                part = slice(first, first + LINES)
            lines = pc.binary_join_element_wise(*[_texts(piece, part) for piece in pieces], "")
            _, offsets, text = lines.buffers()
            end = np.frombuffer(offsets, np.int32, len(lines) + 1)[-1]
            self._file.write(memoryview(text)[:end])
        return len(rows)


def _texts(piece: Piece, rows: Numbers | slice) -> Any:
    if isinstance(piece, str | int):
        return pa.scalar(str(piece))
    if isinstance(piece, np.ndarray):
        return pa.array(piece[rows]).cast(pa.string())
    return piece[rows] if isinstance(rows, slice) else piece.take(pa.array(rows))


class Tracks:
    """Tracks on which no two slices overlap: for every key as many as its slices need, the first one preferred.

    `track_of(key, number)` makes the `number`-th track of a key (from 0) and returns its id.
    """

    def __init__(self, track_of: Callable[[int, int], int]) -> None:
        self._track_of = track_of
        self._ids: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}  # by key: when the last slice of each of its tracks ends

    def place(self, keys: Numbers, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """The track of each slice, given its key and when it starts and ends (µs)."""
        order = np.lexsort((start, keys))
        groups = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else []
        tracks = np.empty(len(order), np.int64)
        for group in groups:
            key = int(keys[group[0]])
            numbers = self._numbers(self._ends.setdefault(key, []), start[group], end[group])
            ids = self._ids.setdefault(key, [])
            while len(ids) < len(self._ends[key]):
                ids.append(self._track_of(key, len(ids)))
            tracks[group] = np.array(ids)[numbers]
        return tracks

    @staticmethod
    def _numbers(ends: list[int], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """For slices in the order in which they start: the lowest track free by then. Brings `ends` up to date."""
        if len(ends) < 2 and (not ends or ends[0] <= start[0]) and (start[1:] >= end[:-1]).all():
            ends[:] = [int(end[-1])]
            return np.zeros(len(start), np.int64)
        # One number for when a track is free again and which it is: faster than pairs.
        busy = [at * MOST_TRACKS + number for number, at in enumerate(ends)]
        heapify(busy)
        free: list[int] = []
        numbers = []
        for starts, stops in zip(start.tolist(), end.tolist(), strict=True):
            by_now = (starts + 1) * MOST_TRACKS
            while busy and busy[0] < by_now:
                heappush(free, heappop(busy) % MOST_TRACKS)
            if free:
                number = heappop(free)
                ends[number] = stops
            else:
                number = len(ends)
                ends.append(stops)
            heappush(busy, stops * MOST_TRACKS + number)
            numbers.append(number)
        return np.array(numbers)
