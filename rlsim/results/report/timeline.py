"""A run as a timeline for https://ui.perfetto.dev or chrome://tracing: GPUs, requests, calls, counters, arrows.

It is written as trace events: JSON, one a line, in the Trace Event Format (`X` slices, `C` counters, `s` and `f` flows,
`M` names). Moments are whole microseconds: Perfetto cuts fractions off, which would make neighbours overlap.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.base.output import atomic_path, check_own_file
from rlsim.base.refusals import refuse
from rlsim.errors import ConfigError
from rlsim.experiment.result import Result
from rlsim.results.report.chosen_run import ChosenRun, choose_run
from rlsim.sim.recorder import LEFT

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


# ---- a run as such events -------------------------------------------------------------------------------------------


SUFFIXES = (".json", ".json.gz")
#: Where groups of tracks stand, from top to bottom.
RUN, NODES, REQUESTS, REWARDS = 0, 1_000, 100_000, 10_000_000


class Timeline(NamedTuple):
    """A timeline that was written."""

    path: Path
    run: ChosenRun
    slices: int
    samples: int  # of counters
    arrows: int
    with_requests: tuple[int, ...]  # steps whose requests have tracks


def write_timeline(
    results: Result | str | Path,
    path: str | Path,
    *,
    case: str | None = None,
    system: str | None = None,
    seed: int | None = None,
    steps: Sequence[int] | None = None,
    requests: bool = True,
) -> Timeline:
    """Writes one run of an experiment as trace events (JSON; compressed if the path ends in .json.gz).

    `results` are in memory or in a directory that `rlsim run` wrote. The run is the first case, its first system, the
    first seed and all steps, unless others are named. Without `requests`, GPUs and calls alone; with many, the requests
    of the first steps. The file appears whole or not at all.

    Raises `CatalogueError` for a case, system, seed or step that the results don't have, and `ConfigError` for results
    without what a timeline needs, or a path that cannot be written.
    """
    path = Path(path)
    run = choose_run(results, case=case, system=system, seed=seed, steps=steps)
    refuse("timeline", path=path, known=SUFFIXES)
    check_own_file(path)
    with atomic_path(path) as temporary, _opened(temporary, compressed=path.suffix == ".gz") as file:
        about = {
            "simulator": f"rlsim {run.manifest['rlsim']}",
            "experiment": run.manifest["experiment"]["name"],
            "case": run.case,
            "system": run.system,
            "seed": run.seed,
            "steps": list(run.steps),
        }
        writer = TraceWriter(file, about)
        name = " · ".join(part for part in (run.case, run.system, f"seed {run.seed}") if part)
        pid = writer.process(name, RUN)
        _write_steps(writer, run, pid)
        generate = _write_calls(writer, run, pid)
        _write_gpus(writer, run)
        shown = write_requests(writer, run, pid, generate, places=(REQUESTS, REWARDS)) if requests else 0
        writer.close()
    return Timeline(path, run, writer.slices, writer.samples, writer.arrows, run.steps[:shown])


@contextmanager
def _opened(path: Path, compressed: bool) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        if not compressed:
            yield file
            return
        # The same results give the same bytes: no time, no name.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed:
            yield cast(BinaryIO, packed)


# ---- tracks of the whole run -----------------------------------------------------------------------------------------


def _write_steps(writer: TraceWriter, run: ChosenRun, pid: int) -> None:
    """One slice a step: they follow each other without a gap."""
    track, ends = writer.track(pid, "steps", 0), run.step_ends
    rows = run.rows("steps", ["step", "round", "tokens", "trained", "switches", "bubble_fraction"])
    for step, kind, tokens, trained, switches, bubble in rows.itertuples(index=False):
        start, end = microseconds([ends.get(step - 1, 0.0), ends[step]]).tolist()
        args = {"round": kind, "tokens": tokens, "responses trained on": trained, "switches": switches}
        writer.slice(track, f"step {step}", "step", start, end, {**args, "bubble_fraction": round(bubble, 4)})


def _write_calls(writer: TraceWriter, run: ChosenRun, pid: int) -> frozenset[str]:
    """A track for each call: when it waits for its GPUs, and when it runs. Those of two steps may overlap.

    Returns the calls that generate.
    """
    rows = run.rows("calls", ["step", "call", "kind", "model", "ready_at", "start_at", "end_at", "gpus"])
    names = list(dict.fromkeys(rows["call"]))
    tracks = Tracks(lambda call, number: writer.track(pid, _numbered(call, number), 1 + names.index(call)))
    rows = rows.assign(ready_at=rows[["ready_at", "start_at"]].min(axis=1)).sort_values("ready_at", kind="stable")
    times = microseconds(rows[["ready_at", "start_at", "end_at"]]).tolist()
    for row, (ready, start, end) in zip(rows.itertuples(), times, strict=True):
        track, call = tracks.place(row.call, ready, end), str(row.call)
        args = {"step": row.step, "kind": row.kind, "model": row.model, "gpus": row.gpus}
        writer.slice(track, "waits for GPUs", "call", ready, start, args)
        writer.slice(track, call, "call", start, end, args)
    return frozenset(rows.loc[rows["kind"] == "generate", "call"])


def _numbered(name: str, number: int) -> str:
    return f"{name} ({number + 1})" if number else name


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _write_gpus(writer: TraceWriter, run: ChosenRun) -> None:
    """A track for each GPU, by node; what runs beside other work (a judge) on tracks of its own."""
    per_node, all_gpus = int(run.setup["gpus_per_node"]), int(run.setup["gpus"])
    rows = run.rows("spans", ["step", "gpu", "gpus", "start_at", "end_at", "kind", "tp", "label", "shared"])
    low, high = rows["gpu"].min(), (rows["gpu"] + rows["gpus"]).max() - 1
    refuse("spans", low=low, high=high, gpus=all_gpus)
    kinds = ["", *dict.fromkeys(rows.loc[rows["shared"], "kind"])]  # alone, or beside other work
    process = cache(lambda node: writer.process(f"node {node}", NODES + node))

    def track_of(key: tuple[int, str], number: int) -> Track:
        gpu, beside = key
        name = f"GPU {gpu} · {beside} (shared)" if beside else f"GPU {gpu}"
        return writer.track(process(gpu // per_node), _numbered(name, number), 100 * gpu + kinds.index(beside))

    tracks = Tracks(track_of)
    rows = rows.sort_values("start_at", kind="stable")
    times = microseconds(rows[["start_at", "end_at"]]).tolist()
    row: Any
    for row, (start, end) in zip(rows.itertuples(), times, strict=True):
        args = {"step": row.step, "tp": row.tp, "label": row.label}
        for gpu in range(row.gpu, row.gpu + row.gpus):
            track = tracks.place((gpu, row.kind if row.shared else ""), start, end)
            writer.slice(track, row.kind, "gpu", start, end, args)


#: The first steps have tracks for their requests: as many as have no more stays at replicas than these, or one.
MOST_STAYS = 200_000
_STAYS = (
    "step", "call", "response", "replica", "gpu", "gpus", "arrived_at", "admitted_at", "decoding_at", "left_at",
    "start_tokens", "end_tokens", "left",
)  # fmt: skip
_RESPONSES = ("step", "response", "resumed", "score_start_at", "scored_at", "reward", "timed_out")
_COUNTERS = {"active sequences": "active", "waiting requests": "waiting", "KV tokens": "kv_tokens"}


def write_requests(
    writer: TraceWriter, run: ChosenRun, run_pid: int, generate: Collection[str], places: tuple[int, int]
) -> int:
    """Write the requests of a run, and what CPU workers scored; returns of how many of its steps.

    The replicas that ever are on the same GPUs make a group of tracks with counters of their own; each request there
    is on one of its tracks. `run_pid` is the group with the counters of all replicas together, `generate` the calls
    that make the responses (others with requests are judges); `places` say where the groups of requests, and that of
    the CPU workers of reward calls, stand.
    """
    stays, responses = run.rows("stays", _STAYS), run.rows("responses", _RESPONSES)
    counts = stays.groupby("step").size().cumsum()
    shown = run.steps
    if (beyond := counts.index[counts > MOST_STAYS]).size:
        shown = tuple(step for step in shown if step < max(beyond[0], run.steps[0] + 1))
        stays, responses = (rows[rows["step"].isin(shown)] for rows in (stays, responses))
    if len(stays):
        stays = _in_order(stays, generate)
        pids = _groups(writer, stays, places[0])
        _write_phases(writer, stays, pids)
        for place, pid in pids.items():
            _write_counters(writer, stays[stays["place"] == place], pid)
        _write_counters(writer, stays[stays["own"]], run_pid)
    _write_rewards(writer, stays, responses, generate, places[1])
    return len(shown)


def _in_order(stays: pd.DataFrame, generate: Collection[str]) -> pd.DataFrame:
    """The stays as they begin, in µs: where the one before of the same request ended, which is named by its `index`."""
    if unknown := set(stays["left"]) - set(LEFT):
        raise ConfigError(f"stays: column left: expected one of {', '.join(LEFT)}, got {unknown.pop()!r}")
    found = stays.sort_values(["step", "call", "response", "arrived_at", "left_at"], ignore_index=True)
    found["own"], found["place"] = found["call"].isin(generate), found.groupby(["call", "gpu", "gpus"]).ngroup()
    for name in ("arrived", "admitted", "decoding", "left"):  # what never came begins when it leaves
        found[f"{name}_us"] = microseconds(found[f"{name}_at"].fillna(found["left_at"]))
    ended = found.groupby(["step", "call", "response"])[["left_us", "left"]].shift()
    begins = ended["left_us"].fillna(found["arrived_us"]).clip(upper=found["arrived_us"])
    found = found.assign(begins_us=begins.astype(np.int64), after=ended["left"].fillna(""))
    return found.sort_values("begins_us", kind="stable")


def _groups(writer: TraceWriter, stays: pd.DataFrame, first_place: int) -> dict[int, int]:
    pids = {}
    for row in stays.drop_duplicates("place").sort_values("place").to_dict("records"):
        gpu, gpus = row["gpu"], row["gpus"]
        which, beside = f"GPU {gpu}" if gpus == 1 else f"GPUs {gpu}–{gpu + gpus - 1}", not row["own"]
        pids[row["place"]] = writer.process(f"{row['call']} · {which} · TP{gpus}", first_place + 10 * gpu + beside)
    return pids


def _write_phases(writer: TraceWriter, stays: pd.DataFrame, pids: Mapping[int, int]) -> None:
    """Slices of all that requests went through, and arrows from the replicas that they left to those they went to."""
    tracks = Tracks(lambda place, number: writer.track(pids[place], f"slot {number}", number))
    before: dict[Any, tuple[Track, bool]] = {}  # where a request was last, and whether it took any time
    stay: Any
    for stay in stays.itertuples():
        track, request = tracks.place(stay.place, stay.begins_us, stay.left_us), (stay.step, stay.call, stay.response)
        known = {"response": stay.response, "tp": stay.gpus, "step": stay.step}
        waited = {**known, "context": stay.start_tokens}
        done = {"tokens": stay.end_tokens - stay.start_tokens, "context": stay.end_tokens, "left": stay.left}
        away = ("tool", waited) if stay.after == "tool" else ("paused", {**waited, "after": stay.after})
        moments = (stay.begins_us, stay.arrived_us, stay.admitted_us, stay.decoding_us, stay.left_us)
        phases = (away, ("queued", waited), ("prefill", waited), ("decode", {**known, **done}))
        for (name, args), start, end in zip(phases, moments, moments[1:], strict=False):
            writer.slice(track, f"{name} {stay.response}", name, start, end, args)
        source, lasted = before.get(request, (track, False))
        if lasted and stay.after not in ("tool", "preempted") and stay.left_us > stay.begins_us:
            writer.arrow(stay.after, source, stay.begins_us - 1, track, stay.begins_us)
        before[request] = track, stay.left_us > stay.begins_us


def _write_counters(writer: TraceWriter, stays: pd.DataFrame, pid: int) -> None:
    held = held_by(stays)
    for name, column in _COUNTERS.items():
        changed = held[held[column].diff().fillna(held[column]) != 0]
        for at, value in zip(changed["at"].tolist(), changed[column].tolist(), strict=True):
            writer.sample(name, pid, at, value)


def held_by(stays: pd.DataFrame) -> pd.DataFrame:
    """What the replicas of these stays held whenever a request arrived, was admitted, joined the batch or left.

    Rows are moments `at` (µs): how many requests are `active` (admitted: in prefill or decoding) and `waiting`, and the
    contexts of the active ones, `kv_tokens`, each of which is taken to grow evenly while it decodes.
    """
    arrived, admitted, decoding, left = (stays[f"{name}_us"] for name in ("arrived", "admitted", "decoding", "left"))
    first, lasted = stays["start_tokens"], (left - decoding).clip(lower=1)
    slope = (stays["end_tokens"] - first).where(left > decoding, 0) / lasted
    begun = first - slope * decoding
    parts = [  # moments, and what changes: requests waiting and active, tokens at time 0, tokens a µs
        (arrived, 1, 0, 0, 0), (admitted, -1, 1, first, 0), (decoding, 0, 0, begun - first, slope),
        (left, 0, -1, -begun, -slope),
    ]  # fmt: skip
    names = ("at", "waiting", "active", "tokens", "slope")
    changes = pd.concat([pd.DataFrame(dict(zip(names, part, strict=True))) for part in parts])
    held = changes.groupby("at").sum().cumsum().reset_index()
    tokens = held["tokens"] + held["slope"] * held["at"]
    return held.assign(kv_tokens=np.rint(tokens.where(held["active"] > 0, 0)).astype(np.int64))


def _write_rewards(
    writer: TraceWriter, stays: pd.DataFrame, responses: pd.DataFrame, generate: Collection[str], place: int
) -> None:
    """When CPU workers scored responses; what a judge scored shows as its requests."""
    key = ["step", "response"]
    judged = pd.MultiIndex.from_frame(stays.loc[~stays["call"].isin(generate), key])
    rows = responses[~pd.MultiIndex.from_frame(responses[key]).isin(judged)]
    rows = rows[rows["scored_at"] > rows["score_start_at"]]
    # What was scored in an earlier step and goes on in this one was shown there.
    shown = rows.groupby("step")["scored_at"].max().cummax().shift()
    rows = rows[~(rows["resumed"] & (rows["scored_at"] <= rows["step"].map(shown)))]
    if rows.empty:
        return
    pid = writer.process("rewards · CPU workers", place)
    workers = Tracks(lambda _, number: writer.track(pid, f"worker {number}", number))
    rows = rows.sort_values("score_start_at", kind="stable")
    times = microseconds(rows[["score_start_at", "scored_at"]]).tolist()
    for row, (start, end) in zip(rows.itertuples(), times, strict=True):
        args = {"response": row.response, "step": row.step, "reward": row.reward, "timed_out": row.timed_out}
        writer.slice(workers.place(0, start, end), f"score {row.response}", "reward", start, end, args)
