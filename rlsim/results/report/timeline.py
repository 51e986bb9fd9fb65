"""A run as a timeline for https://ui.perfetto.dev or chrome://tracing: GPUs, requests, calls, counters, arrows."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from rlsim.base.output import atomic_path, check_own_file
from rlsim.errors import ConfigError
from rlsim.results.report.chosen_run import ChosenRun, choose_run
from rlsim.results.report.timeline_requests import write_requests
from rlsim.results.report.trace_events import TraceWriter, Track, Tracks, microseconds

if TYPE_CHECKING:
    from rlsim.experiment.result import Result

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
    if not 0 <= low <= high < all_gpus:
        raise ConfigError(f"spans: expected GPUs 0 to {all_gpus - 1}, got {low} to {high}")
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
