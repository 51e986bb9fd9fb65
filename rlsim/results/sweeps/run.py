"""Runs a sweep into a directory, going on from whatever is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

from rlsim.base.output import write_bytes
from rlsim.base.refusals import refuse
from rlsim.base.version import __version__
from rlsim.errors import ConfigError, check_arguments
from rlsim.experiment.columns import to_bytes
from rlsim.results.sweeps.points import Definition, load_sweep
from rlsim.results.sweeps.store import POINTS, Store, SweepResult, read_sweep
from rlsim.results.sweeps.tables import COLUMNS, DEFAULT_TABLES, differences, listed
from rlsim.results.sweeps.task import Answers, Failed, Task, run_locally

#: Called with (points done or failed, points in all, failed so far).
Progress = Callable[[int, int, int], None]
Executor = Literal["local", "ray"]


def sweep(
    source: str | Path | Mapping[str, Any] | Definition,
    *,
    out: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    seeds: int | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    tables: Iterable[str] | None = None,
    workers: int | None = None,
    executor: Executor = "local",
    address: str | None = None,
    prune: bool = False,
    progress: Progress | None = None,
) -> SweepResult:
    """Run every point of a sweep into the directory `out`, going on from what is there.

    `source`, `overrides`, `seeds` and `axes` are as in `load_sweep`. `tables` names the tables to keep (default: steps
    and calls) beside the summary. `workers` is the number of processes (default: one a core), or with the executor
    `ray` of points at work in the cluster at `address` (default: its CPUs). A point that fails is recorded, and the
    others go on; run again, failed points are tried again. Points are named by content, so a definition that has
    grown runs only what is new; `prune` removes points that it does not have any more. Raises `ConfigError` for a
    mistake in the definition or a directory that holds other points, before anything runs.
    """
    check_arguments(out=out, workers=workers, progress=progress)
    definition = load_sweep(source, overrides=overrides, seeds=seeds, axes=axes)
    wanted = None if tables is None else tuple(tables)
    _check(wanted, workers, executor, address)
    store = Store(Path(out))
    with store.locked():
        earlier = None
        with suppress(ConfigError):  # it is written anew
            earlier = store.definition()
        names = set(DEFAULT_TABLES if wanted is None and earlier is None else wanted or ())
        names |= {*(earlier["tables"] if earlier else ()), "steps", "summary"}
        kept = tuple(name for name in COLUMNS if name in names)
        _make_room(definition, store, earlier, prune)
        store.write_definition(_described(definition, kept))
        tasks = [
            Task(point, kept, definition.shown, definition.folder)
            for point in definition.points
            if not store.whole(point, kept)
        ]
        try:
            with closing(_answers(tasks, executor, workers, address)) as answers:
                total, failed = len(definition.points), 0
                told = progress or (lambda *_: None)
                before = total - len(tasks)
                told(before, total, failed)
                for done, answer in enumerate(answers, before + 1):
                    point, result = answer.task.point.name, answer.result
                    if isinstance(result, Failed):
                        store.fail(point, result)
                        failed += 1
                    else:
                        store.put(point, result)
                    fine = not isinstance(result, Failed)
                    store.log({"point": point, "done": fine, "elapsed_s": round(answer.elapsed_s, 3)})
                    told(done, total, failed)
        finally:
            found = read_sweep(out)
            write_bytes(store.directory / POINTS, to_bytes(found.points_table()))
    return found


def _check(tables: Sequence[str] | None, workers: int | None, executor: str, address: str | None) -> None:
    unknown = sorted({*(tables or ())} - set(COLUMNS))
    refuse("sweep", executor=executor, workers=workers, unknown=unknown, known=COLUMNS)
    if executor == "ray":
        from rlsim.results.sweeps.on_ray import check_ray

        check_ray(address)


def _answers(tasks: Sequence[Task], executor: str, workers: int | None, address: str | None) -> Answers:
    if executor == "ray":
        from rlsim.results.sweeps.on_ray import run_on_ray

        return run_on_ray(tasks, workers, address)
    from rlsim.base.processes import cores

    return run_locally(tasks, workers or cores())


def _make_room(definition: Definition, store: Store, earlier: Mapping[str, Any] | None, prune: bool) -> None:
    """Refuse, or with `prune` remove, results of points that the definition does not have."""
    own = {point.name for point in definition.points}
    foreign = store.done() - own
    if foreign and not prune:
        refuse("other points", count=len(foreign), folder=store.directory, why=_why(definition, earlier))
    for point in foreign | (store.unfinished() - own):
        store.remove(point)


def _why(definition: Definition, earlier: Mapping[str, Any] | None) -> str:
    if earlier is None:
        return ""
    if earlier.get("rlsim") != __version__:
        return f": they are of rlsim {earlier.get('rlsim')}, this is {__version__}"
    changed = differences([earlier.get("base", {}), definition.base])
    if not changed and earlier.get("inputs") != _inputs(definition):
        return ": what it reads has changed (trace, model, calibration or code)"
    return f": {listed(changed)}" if changed else ""


def _inputs(definition: Definition) -> dict[str, str]:
    return {what: value for point in definition.points for what, value in point.inputs.items()}


def _described(definition: Definition, tables: Sequence[str]) -> dict[str, Any]:
    return {
        "rlsim": __version__,
        "name": definition.name,
        "tables": list(tables),
        "base": definition.base,
        "inputs": dict(sorted(_inputs(definition).items())),
        "axes": [axis.column.model_dump() for axis in definition.points[0].axes],
        "points": [
            {"point": point.name, "axes": {axis.column.name: axis.value for axis in point.axes}}
            for point in definition.points
        ],
    }
