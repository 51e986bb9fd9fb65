"""`rlsim report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Results directory of rlsim run or rlsim sweep.")],
    out: Annotated[Path | None, typer.Option(help="The page to write (default: DIR/report.html).")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page (default: the experiment's name).")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write every chart there as a PNG.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write every chart there as an SVG.")] = None,
    case: Annotated[str | None, typer.Option(help="Case in the charts over time (default: the first).")] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(help="System in the charts over time; repeatable (default: the baseline and the best other)."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed in the charts over time (default: of the median step).")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step in the charts over time (default: the baseline's median one).")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the path of the page only.")] = False,
) -> None:
    """Write results as one HTML page that works offline: what was found, charts, and exactly what was run.

    Example: rlsim report results/pat-vs-static --system verl-tp1 --system pat --png charts
    """
    from rlsim.report.write import write_report

    path = write_report(
        directory, out, title=title, png=png, svg=svg, case=case, systems=system or (), seed=seed, step=step
    )
    if quiet:
        typer.echo(str(path))
        return
    typer.echo(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB, opens in any browser)")
    for folder in (png, svg):
        if folder is not None:
            typer.echo(f"charts: {folder}")
