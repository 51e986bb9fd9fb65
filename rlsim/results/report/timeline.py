"""A run as a timeline for https://ui.perfetto.dev or chrome://tracing: GPUs, requests, calls, counters, arrows."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import numpy as np
import pandas as pd
import pyarrow as pa

from rlsim.base.output import atomic_path, check_own_file
from rlsim.errors import ConfigError
from rlsim.results.report.chosen_run import ChosenRun, choose_run
from rlsim.results.report.timeline_requests import write_requests
from rlsim.results.report.trace_events import TraceWriter, Tracks, json_texts, microseconds

if TYPE_CHECKING:
    from rlsim.experiment.result import Result

SUFFIXES = (".json", ".json.gz")
#: Where groups of tracks stand, from top to bottom.
RUN, NODES, REQUESTS, REWARDS = 0, 1_000, 100_000, 10_000_000
#: More GPUs than there are.
ALL_GPUS = 10_000_000
#: Slices of one GPU track each, made from spans of many GPUs, at a time.
MOST_SLICES = 262_144


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
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"{path}: a timeline is written as one of {', '.join(SUFFIXES)}")
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
    tid = writer.thread(pid, "steps", 0)
    rows = run.rows("steps", ["step", "round", "tokens", "trained", "switches", "bubble_fraction"])
    steps = rows["step"].to_numpy()
    end = microseconds([run.step_ends[step] for step in steps.tolist()])
    start = microseconds([run.step_ends.get(step - 1, 0.0) for step in steps.tolist()])
    args = {
        "round": json_texts(pa.array(rows["round"])),
        "tokens": rows["tokens"].to_numpy(),
        "responses trained on": rows["trained"].to_numpy(),
        "switches": rows["switches"].to_numpy(),
        "bubble_fraction": np.round(rows["bubble_fraction"].to_numpy(), 4),
    }
    writer.add_slices(('"step ', steps, '"'), "step", pid, tid, start, end, args)


def _write_calls(writer: TraceWriter, run: ChosenRun, pid: int) -> str:
    """A track for each call: when it waits for its GPUs, and when it runs. Those of two steps may overlap.

    Returns the call that generates, if there is one.
    """
    rows = run.rows("calls", ["step", "call", "kind", "model", "ready_at", "start_at", "end_at", "gpus"])
    key, names = pd.factorize(rows["call"])

    def track_of(key: int, number: int) -> int:
        return writer.thread(pid, names[key] if not number else f"{names[key]} ({number + 1})", 1 + key)

    ready, start, end = (microseconds(rows[c]) for c in ("ready_at", "start_at", "end_at"))
    ready = np.minimum(ready, start)
    tid = Tracks(track_of).place(key, ready, end)
    args = {
        "step": rows["step"].to_numpy(),
        "kind": json_texts(pa.array(rows["kind"])),
        "model": json_texts(pa.array(rows["model"])),
        "gpus": rows["gpus"].to_numpy(),
    }
    writer.add_slices(('"waits for GPUs"',), "call", pid, tid, ready, start, args)
    writer.add_slices((json_texts(pa.array(rows["call"])),), "call", pid, tid, start, end, args)
    return next(iter(rows.loc[rows["kind"] == "generate", "call"]), "")


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _write_gpus(writer: TraceWriter, run: ChosenRun) -> None:
    """A track for each GPU, by node; what runs beside other work (a judge) on tracks of its own."""
    per_node, all_gpus = int(run.setup["gpus_per_node"]), int(run.setup["gpus"])
    all_rows = run.rows("spans", ["step", "gpu", "gpus", "start_at", "end_at", "kind", "tp", "label", "shared"])
    low, high = all_rows["gpu"].min(), (all_rows["gpu"] + all_rows["gpus"]).max() - 1
    if not 0 <= low <= high < all_gpus:
        raise ConfigError(f"spans: expected GPUs 0 to {all_gpus - 1}, got {low} to {high}")
    work, beside = pd.factorize(all_rows["kind"].where(all_rows["shared"]))  # -1: alone
    nodes: dict[int, int] = {}  # node: process
    of_node: dict[int, int] = {}  # track: process

    def track_of(key: int, number: int) -> int:
        kind, gpu = divmod(key, ALL_GPUS)
        node = gpu // per_node
        if node not in nodes:
            nodes[node] = writer.process(f"node {node}", NODES + node)
        name = f"GPU {gpu}" if not kind else f"GPU {gpu} · {beside[kind - 1]} (shared)"
        tid = writer.thread(nodes[node], name if not number else f"{name} ({number + 1})", 100 * gpu + kind)
        of_node[tid] = nodes[node]
        return tid

    tracks = Tracks(track_of)
    size = max(MOST_SLICES // int(all_rows["gpus"].max()), 1)  # a row makes a slice for each of its GPUs
    for first in range(0, len(all_rows), size):
        rows = all_rows[first : first + size]
        which = np.repeat(np.arange(len(rows)), rows["gpus"])
        gpu = rows["gpu"].to_numpy()[which] + np.arange(len(which)) - np.searchsorted(which, which)
        start, end = (microseconds(rows[c])[which] for c in ("start_at", "end_at"))
        tid = tracks.place((work[first : first + size] + 1)[which] * ALL_GPUS + gpu, start, end)
        pid = np.array([of_node[t] for t in tid.tolist()])
        kind, label = (json_texts(pa.array(rows[name])).take(pa.array(which)) for name in ("kind", "label"))
        args = {**{name: rows[name].to_numpy()[which] for name in ("step", "tp")}, "label": label}
        writer.add_slices((kind,), "gpu", pid, tid, start, end, args)
