"""`rlsim check`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlsim.cli import complete
from rlsim.cli.common import Settings, add_code_folders, echo


def check(
    file: Annotated[
        str,
        typer.Argument(
            help="Experiment or sweep file, or the name of one that ships with rlsim.", autocompletion=complete.sweeps
        ),
    ],
    settings: Settings = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, instead of the experiment's.")] = None,
) -> None:
    """Check an experiment or a sweep, all its cases and points, without a simulation or a search for plans.

    Prints what it is in one line, or what is wrong with it (exit code 2). Whether a plan that is yet to be searched for
    fits into memory is known after the search only.

    Example: rlsim check experiments/pat_vs_static.yaml --set trace.cap=8K
    """
    from rlsim.experiment.check import check_experiment
    from rlsim.sweeps.points import check_sweep, is_sweep

    add_code_folders(file)
    if is_sweep(file):
        name, points = check_sweep(file, settings or (), seeds)
        runs = sum(point.runs for point in points)
        many = f"{len(points):,} point{'s' * (len(points) > 1)}"
        echo(f"{name}: {many} (the first: {points[0].counted}); {runs:,} run{'s' * (runs > 1)} in all")
    else:
        points = [check_experiment(file, settings or (), seeds)]
        echo(f"{points[0].name}: {points[0].counted}")
    for note in dict.fromkeys(note for point in points for note in point.notes):
        echo(f"note: {note}")
