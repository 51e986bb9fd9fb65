"""What must hold of a file of trace events, whatever made it."""

import bisect
import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Slice(NamedTuple):
    start: int
    end: int
    name: str
    args: dict[str, Any]


class Trace:
    """The events of a file, by kind. Reading it checks the format of each."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.about = content["otherData"]
        self.groups: dict[int, str] = {}  # process: name
        self.tracks: dict[int, str] = {}  # thread: name
        self.group_of: dict[int, int] = {}
        self.slices: dict[int, list[Slice]] = defaultdict(list)  # by thread
        self.counters: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        self.flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)  # by id: `s` and `f`
        sorted_by: dict[tuple[str, int], int] = {}
        for event in content["traceEvents"]:
            self._read(event, sorted_by)
        assert {pid for kind, pid in sorted_by if kind == "process"} == set(self.groups)
        assert {tid for kind, tid in sorted_by if kind == "thread"} == set(self.tracks)

    def _read(self, event: dict[str, Any], sorted_by: dict[tuple[str, int], int]) -> None:
        kind, pid = event["ph"], event["pid"]
        if kind != "M":
            assert type(event["ts"]) is int
            assert event["ts"] >= 0
            assert pid in self.groups, "a group is named before it is used"
        match kind:
            case "M" if event["name"] == "process_name":
                assert pid not in self.groups
                self.groups[pid] = event["args"]["name"]
            case "M" if event["name"] == "thread_name":
                assert event["tid"] not in self.tracks
                self.tracks[event["tid"]] = event["args"]["name"]
                self.group_of[event["tid"]] = pid
            case "M":
                what = event["name"].removesuffix("_sort_index")
                sorted_by[what, event["tid"] if what == "thread" else pid] = event["args"]["sort_index"]
            case "X":
                assert self.group_of[event["tid"]] == pid
                assert type(event["dur"]) is int
                assert event["dur"] > 0
                assert event["name"]
                assert event["cat"]
                made = Slice(event["ts"], event["ts"] + event["dur"], event["name"], event["args"])
                self.slices[event["tid"]].append(made)
            case "C":
                assert list(event["args"]) == ["value"]
                self.counters[pid, event["name"]].append((event["ts"], event["args"]["value"]))
            case "s" | "f":
                assert event.get("bp") == ("e" if kind == "f" else None)
                assert kind not in self.flows[event["id"]]
                self.flows[event["id"]][kind] = event
            case _:
                raise AssertionError(event)

    def check(self) -> None:
        """What must hold among the events."""
        for slices in self.slices.values():
            slices.sort()
            for before, after in itertools.pairwise(slices):
                assert before.end <= after.start, "slices on one track may not overlap"
        for flow in self.flows.values():
            assert flow.keys() == {"s", "f"}
            assert flow["s"]["ts"] < flow["f"]["ts"]
            assert flow["s"]["name"] == flow["f"]["name"]
            for end in flow.values():
                assert self.at(end["tid"], end["ts"]) is not None, "an arrow ends outside of every slice"
        for values in self.counters.values():
            values.sort()
            assert all(value >= 0 for _, value in values)
            assert len({at for at, _ in values}) == len(values), "a counter has two values at one moment"
            assert values[-1][1] == 0, "at the end nothing is held"

    def at(self, tid: int, moment: int) -> Slice | None:
        """The slice of a track at a moment (the tracks are sorted)."""
        slices = self.slices[tid]
        i = bisect.bisect_right(slices, moment, key=lambda s: s.start) - 1
        return slices[i] if i >= 0 and moment < slices[i].end else None

    def named(self, group: str) -> dict[str, list[Slice]]:
        """The tracks of the group of that name, by their names."""
        [pid] = [pid for pid, name in self.groups.items() if name == group]
        return {self.tracks[tid]: self.slices[tid] for tid in self.tracks if self.group_of[tid] == pid}
