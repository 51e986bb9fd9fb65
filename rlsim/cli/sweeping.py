"""`rlsim sweep`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsim.cli import complete
from rlsim.cli.common import Settings, Warmup, add_code_folders, echo, warmup_setting
from rlsim.cli.tables import late_legend, print_tables, setting_texts, speedup_text, table
from rlsim.formats import number, rate, share

if TYPE_CHECKING:
    from rlsim.sweeps.points import Definition
    from rlsim.sweeps.read import SweepResult
    from rlsim.sweeps.run import Progress

#: More rows than these are left to `rlsim compare` and the tables.
MOST_ROWS = 40


def sweep(
    file: Annotated[
        str,
        typer.Argument(
            help="Sweep file, or an experiment; or the name of one that ships with rlsim.",
            autocompletion=complete.sweeps,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Results directory (default: results/NAME).")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY.PATH=[A, B]",
            help="Add an axis: every value with all others; repeatable.",
            autocompletion=complete.settings,
        ),
    ] = None,
    settings: Settings = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, instead of the experiment's.")] = None,
    warmup: Warmup = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes (default: one a core); with ray: points at work at a time.")
    ] = None,
    executor: Annotated[str, typer.Option(help="local, or ray (needs the extra `ray`).")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster (default: $RAY_ADDRESS, else one is started here).")
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            help="Tables to keep beside steps and summary: calls (default), responses, stays, switches, spans; or all."
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove results of points that the sweep does not have any more.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the points; run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of every point as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the path of the results only.")] = False,
) -> None:
    """Run an experiment under many settings, on all cores; interrupted, the same command goes on.

    A point that fails is recorded and the rest goes on; the exit code is 1 then.

    Example: rlsim sweep pat_vs_static --grid "trace.cap=[4K, 8K]" --seeds 3 --out results/caps
    """
    from rlsim.errors import ConfigError
    from rlsim.experiment.load import parse_overrides
    from rlsim.output import results_folder
    from rlsim.sweeps.points import load_sweep
    from rlsim.sweeps.run import run_definition
    from rlsim.sweeps.tables import COLUMNS

    add_code_folders(file)
    axes = parse_overrides(grid or (), "--grid")
    for key in axes:
        if sum(text.partition("=")[0] == key for text in grid or ()) > 1:
            raise ConfigError(f"--grid {key} is given twice; give all its values at once")
    definition = load_sweep(file, overrides=[*(settings or ()), *warmup_setting(warmup)], seeds=seeds, axes=axes)
    if dry_run:
        _list(definition, as_json)
        return
    target = out or results_folder(definition.name)
    names = list(COLUMNS) if tables == "all" else tables.replace(" ", "").split(",") if tables else None
    try:
        with _progress(hidden=quiet or as_json) as progress:
            found = run_definition(
                definition,
                target,
                tables=names,
                workers=workers,
                executor=executor,  # type: ignore[arg-type]  # checked there
                address=address,
                prune=prune,
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo(f"rlsim: interrupted; what is done is in {target}, and the same command goes on", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"directory": str(target), "points": _plain(found)}, indent=2))
    elif quiet:
        typer.echo(str(target))
    else:
        _print(found, definition)
    for line in _failures(found):
        echo(f"rlsim: {line}", err=True)
    if found.failed:
        raise typer.Exit(1)


@contextmanager
def _progress(hidden: bool) -> Iterator[Progress | None]:
    """Points done and time left on standard error: a bar in a terminal, a line at every tenth otherwise."""
    if hidden:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rlsim.cli.terminal import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("points", total=None)

        def update(done: int, total: int, failed: int) -> None:
            bar.update(
                task, completed=done, total=total, description=f"points, {failed} failed" if failed else "points"
            )

        yield update


def _lines() -> Callable[[int, int, int], None]:
    import time

    begun, told, there = time.monotonic(), -1, -1

    def update(done: int, total: int, failed: int) -> None:
        nonlocal told, there
        there = done if there < 0 else there  # from an earlier run
        if 10 * done // total == told:
            return
        told = 10 * done // total
        left_s = (time.monotonic() - begun) / (done - there) * (total - done) if done > there else float("nan")
        left = f", {left_s:.0f} s left" if left_s > 0 else ""
        typer.echo(f"{done} of {total} points{f', {failed} failed' if failed else ''}{left}", err=True)

    return update


def _plain(found: SweepResult) -> list[dict[str, Any]]:
    return found.points_table().to_pylist()  # type: ignore[no-any-return]


def _failures(found: SweepResult) -> Iterator[str]:
    """One line for every distinct error."""
    points: dict[str, list[str]] = {}
    for point, error in found.failed.items():
        points.setdefault(error, []).append(point)
    for error, names in points.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"failed: {names[0]}{more}: {error}"


def _list(definition: Definition, as_json: bool) -> None:
    from rlsim.cli.terminal import Console

    axes = [axis.column.name for axis in definition.points[0].axes]
    rows = [(point.name, *(axis.value for axis in point.axes)) for point in definition.points]
    if as_json:
        typer.echo(json.dumps([dict(zip(["point", *axes], row, strict=True)) for row in rows], indent=2))
        return
    console = Console(soft_wrap=True, markup=False)
    console.print(table(["point", *axes], list(zip(*map(setting_texts, zip(*rows, strict=True)), strict=True))))
    console.print(_counted(definition), highlight=False)


def _counted(definition: Definition) -> str:
    points, again = len(definition.points), definition.asked - len(definition.points)
    return f"{points} point{'s' if points > 1 else ''}" + (
        f" ({again} more come out the same as others)" if again else ""
    )


def _print(found: SweepResult, definition: Definition) -> None:
    """The summary of every point, if they are few."""
    from rlsim.cli.terminal import Console
    from rlsim.experiment.notes import EXPLAINED

    summary = found.summary()
    unlike = (summary["speedup"] / summary["token_speedup"] - 1).abs() > EXPLAINED
    if 0 < len(summary) <= MOST_ROWS:
        axes = [axis.name for axis in found.axes]
        names = [*axes, *(["case"] if summary["case"].any() else []), "system"]
        texts = zip(*(setting_texts(summary[name].tolist()) for name in names), strict=True)
        shown = [
            [
                *text,
                rate(row["responses_per_s"]),
                speedup_text(row),
                number(row["token_speedup"]),
                number(row["step_time_s"], 1),
                number(row["gen_time_s"], 1),
                share(row["bubble_fraction"]),
                share(row["tail_fraction"]),
            ]
            for text, row in zip(texts, summary.to_dict("records"), strict=True)
        ]
        headings = [*names, "responses/s", "speedup", "by tokens", "step s", "gen s", "bubble", "tail"]
        caption = "speedup: trained responses per second over the baseline's; by tokens: the same of trained tokens"
        caption += late_legend(summary)
        print_tables([table(headings, shown, words=len(names), caption=caption)])
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{_counted(definition)}, {len(found.failed)} failed; results: {found.directory}")
    if unlike.any():
        console.print(
            f"note: in {unlike.sum()} of {len(summary)} rows the speedup differs by more than {EXPLAINED:.0%} from the "
            "one by tokens: these systems train on other responses than their baseline; rlsim compare says why"
        )
    console.print(f"next: rlsim compare {found.directory}")
