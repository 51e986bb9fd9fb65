"""`rlsim sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rlsim.base.formats import Table, few, written
from rlsim.base.output import results_folder
from rlsim.cli.common import (
    PRINTED,
    add_code_folders,
    echo,
    paths_only,
    progress_bar,
    say,
    say_notes,
    with_options,
    write_json,
)
from rlsim.cli.tables import caption, print_tables, setting_texts
from rlsim.errors import ConfigError

if TYPE_CHECKING:
    from rlsim.results.sweeps.points import Definition
    from rlsim.results.sweeps.store import SweepResult

#: More rows than these are left to `rlsim compare` and the tables.
MOST_ROWS = 40
#: More notes than these are left to the page.
MOST_NOTES = 5


def sweep(
    file: str,
    out: Path | None = None,
    grid: list[str] | None = None,
    settings: list[str] | None = None,
    seeds: int | None = None,
    warmup: int | None = None,
    certainty: int | None = None,
    workers: int | None = None,
    executor: str = "local",
    address: str | None = None,
    tables: str | None = None,
    prune: bool = False,
    dry_run: bool = False,
    json_file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Run an experiment under many settings, on all cores; interrupted, the same command goes on.

    A point that fails is recorded and the rest goes on; the exit code is 1 then.

    Example: rlsim sweep pat_vs_static --grid "trace.cap=[4K, 8K]" --seeds 3 --out results/caps
    """
    from rlsim.results.sweeps.points import load_sweep
    from rlsim.results.sweeps.run import sweep as run_sweep
    from rlsim.results.sweeps.tables import COLUMNS

    add_code_folders(file)
    overrides = with_options(settings, warmup=warmup, certainty=certainty)
    definition = load_sweep(file, overrides=overrides, seeds=seeds, axes=_axes(grid or ()))
    if dry_run:
        axes = [axis.column.name for axis in definition.points[0].axes]
        rows = [(point.name, *(axis.value for axis in point.axes)) for point in definition.points]
        if not write_json(json_file, [dict(zip(["point", *axes], row, strict=True)) for row in rows]):
            texts = list(zip(*map(setting_texts, zip(*rows, strict=True)), strict=True))
            print_tables([Table("", ["point", *axes], texts)])
            say(_counted(definition))
        return
    target = out or results_folder(definition.name)
    names = list(COLUMNS) if tables == "all" else tables.replace(" ", "").split(",") if tables else None
    try:
        with progress_bar(quiet or json_file == PRINTED, "points") as bar:

            def told(done: int, total: int, failed: int) -> None:
                if bar:
                    bar(done, total, f"{failed} failed" if failed else "")

            found = run_sweep(
                definition, out=target, tables=names, workers=workers, address=address, prune=prune, progress=told,
                executor=executor,  # type: ignore[arg-type]  # checked there
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo(f"rlsim: interrupted; what is done is in {target}, and the same command goes on", err=True)
        raise typer.Exit(130) from None
    _tell(found, definition, json_file, quiet)
    if found.failed:
        raise typer.Exit(1)


def _axes(grid: Sequence[str]) -> dict[str, Any]:
    from rlsim.experiment.load import parse_overrides

    axes = parse_overrides(grid, "--grid")
    for key in axes:
        if sum(text.partition("=")[0] == key for text in grid) > 1:
            raise ConfigError(f"--grid {key} is given twice; give all its values at once")
    return axes


def _tell(found: SweepResult, definition: Definition, json_file: Path | None, quiet: bool) -> None:
    """Print the results of the sweep, and on standard error a line for every distinct failure."""
    data = {"directory": str(found.directory), "points": found.points_table().to_pylist()}
    if not write_json(json_file, data) and not paths_only(quiet, found.directory):
        _print(found, definition)
    points_of: dict[str, list[str]] = {}
    for point, error in found.failed.items():
        points_of.setdefault(error, []).append(point)
    for error, names in points_of.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        echo(f"rlsim: failed: {names[0]}{more}: {error}", err=True)


def _counted(definition: Definition) -> str:
    points, again = len(definition.points), definition.asked - len(definition.points)
    same = f" ({again} more come out the same as others)" if again else ""
    return f"{points} point{'s' if points > 1 else ''}{same}"


def _print(found: SweepResult, definition: Definition) -> None:
    from rlsim.experiment.summary import EXPLAINED
    from rlsim.experiment.verdict import judge

    summary = found.summary()
    unlike = (summary["speedup"] / summary["token_speedup"] - 1).abs() > EXPLAINED
    if 0 < len(summary) <= MOST_ROWS:
        axes = [axis.name for axis in found.axes]
        names = [*axes, *(["case"] if summary["case"].any() else []), "system"]
        texts = [setting_texts(summary[name].tolist()) for name in names]
        verdicts = {
            (point, case): judge(rows, str(found.record(str(point))["baseline"]))
            for (point, case), rows in summary.groupby(["point", "case"], sort=False)
        }
        columns = written("sweep", summary, verdicts=verdicts)
        named = dict(zip(names, texts, strict=True))
        words = (*range(len(names)), len(names) + 4)
        print_tables([Table.of("", {**named, **columns}, *words, caption=caption("sweep", columns=columns))])
        say_notes(few(found.notes(), MOST_NOTES, f"are in its page: rlsim report {found.directory}"))
    say(f"{_counted(definition)}, {len(found.failed)} failed; results: {found.directory}")
    if unlike.any():
        say(
            f"note: in {unlike.sum()} of {len(summary)} rows the speedup differs by more than {EXPLAINED:.0%} from the "
            "one by tokens: these systems train on other responses than their baseline; rlsim compare says why"
        )
    say(f"next: rlsim compare {found.directory}")
